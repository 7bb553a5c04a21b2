"""What official code answers on LLaDA-MoE: logits, the experts that its routers pick, and histories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.forward.forward import Forward
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada_moe"
LOGITS = load_file(GOLDENS / "logits.safetensors")
RECORDED: dict[str, dict[str, Any]] = json.loads((GOLDENS / "sampling.json").read_text())
SEQUENCES = load_file(GOLDENS / "sampling.safetensors")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "lladamoe_tiny", policy="none")


@pytest.mark.parametrize("case", ["full", "leftpad"])
def test_logits_and_experts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, case: str):
    routes: list[Tensor] = []
    monkeypatch.setattr(Forward, "note_picks", lambda forward, layer, experts: routes.append(experts))
    ids, mask = LOGITS[f"lladamoe_tiny.{case}.input_ids"], LOGITS.get(f"lladamoe_tiny.{case}.attention_mask")
    logits = runtime.logits(ids.long(), mask)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], LOGITS[f"lladamoe_tiny.{case}.logits"][real], atol=5e-4, rtol=1e-4)
    expected = LOGITS[f"lladamoe_tiny.{case}.routes"]
    found = torch.stack(routes).view(expected.shape)
    assert torch.equal(found[:, real], expected[:, real].long())


@pytest.mark.parametrize("case", RECORDED)
def test_sequences(runtime: Runtime, case: str):
    recorded = RECORDED[case]
    prompt = SEQUENCES[f"{case}.prompt"].long()
    out = runtime.generate(prompt, stop_at_eos=False, output_history=True, **recorded["kwargs"])
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), SEQUENCES[f"{case}.history"])
    assert torch.equal(out.sequences.int(), SEQUENCES[f"{case}.final"])
    assert out.rows_per_step == recorded["fwd_seq_lens"]
