"""The token sequences and rows of dKV-Cache's authors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.decoding.sampling import SequenceNoise
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDENS / "dkv_cache.json").read_text())
RECORDED = load_file(GOLDENS / "dkv_cache.safetensors")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny", policy="none", dtype="float32")


def in_order(order: Tensor) -> Callable[..., Tensor]:
    """Scores that rank columns as `order` [blocks, length] does, the row of the block that is asked for."""

    def confidence(_: SequenceNoise, length: int, pads: list[int], start: int, stop: int, active: list[bool]) -> Tensor:
        block = (start - (length - len(order) * (stop - start))) // (stop - start)
        ranks = torch.empty(length, dtype=torch.float64)
        ranks[order[block].long()] = -torch.arange(length, dtype=torch.float64)
        return ranks[start:stop].expand(len(pads), -1).clone()

    return confidence


@pytest.mark.parametrize("case", CASES)
def test_parity_with_the_authors_code(runtime: Runtime, case: str, monkeypatch: pytest.MonkeyPatch):
    recorded = CASES[case]
    options = dict(recorded["kwargs"])
    interval, window = options.pop("cache_reloading_step", None), options.pop("window_size", None)
    if not options.pop("enable_cache"):
        runtime = runtime.with_policy("none")
    elif recorded["kind"] == "decode":
        runtime = runtime.with_policy("dkv_decode", refresh_interval=interval, parity=True)
    else:
        runtime = runtime.with_policy("dkv_greedy", refresh_interval=interval, window=window, parity=True)
        monkeypatch.setattr(SequenceNoise, "confidence", in_order(RECORDED[f"{case}.denoising_index"]))
    out = runtime.generate(RECORDED[f"{case}.prompt"].long(), stop_at_eos=False, output_history=True, **options)
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), RECORDED[f"{case}.history"])
    assert torch.equal(out.sequences, RECORDED[f"{case}.final"].long())
    assert out.rows_per_forward == recorded["fwd_seq_lens"]
