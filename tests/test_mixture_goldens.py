"""What official code answers on mixtures of experts: logits, the experts that routers pick, and histories."""

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

GOLDENS = Path(__file__).parent / "goldens"
# By checkpoint, the length of blocks in each case of its logits; None where rows see the whole canvas.
LOGITS: dict[str, dict[str, int | None]] = {
    "llada_moe/lladamoe_tiny": {"full": None, "leftpad": None},
    "llada2/llada2_tiny": {"block32": 32, "block8_masks": 8, "block16_tail": 16},
    "sdar_moe/sdar_moe_tiny": {"block4": 4, "block8": 8},
}
RUNTIMES: dict[str, Runtime] = {}


def runtime(checkpoint: str) -> Runtime:
    if checkpoint not in RUNTIMES:
        RUNTIMES[checkpoint] = tiered.from_pretrained(GOLDENS / checkpoint, policy="none")
    return RUNTIMES[checkpoint]


def recorded(checkpoint: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = GOLDENS / checkpoint.partition("/")[0]
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize(("checkpoint", "case"), [(of, case) for of, cases in LOGITS.items() for case in cases])
def test_logits_and_experts(monkeypatch: pytest.MonkeyPatch, checkpoint: str, case: str):
    routes: list[Tensor] = []
    monkeypatch.setattr(Forward, "note_picks", lambda forward, layer, experts: routes.append(experts))
    folder, _, name = checkpoint.partition("/")
    tensors, name = load_file(GOLDENS / folder / "logits.safetensors"), f"{name}.{case}"
    ids, mask, block = tensors[f"{name}.input_ids"], tensors.get(f"{name}.attention_mask"), LOGITS[checkpoint][case]
    logits = runtime(checkpoint).logits(ids.long(), mask, block_length=block)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    torch.testing.assert_close(logits[real], tensors[f"{name}.logits"][real], atol=5e-4, rtol=1e-4)
    expected = tensors[f"{name}.routes"]
    assert torch.equal(torch.stack(routes).view(expected.shape)[:, real], expected[:, real].long())


@pytest.mark.parametrize("case", recorded("llada_moe/lladamoe_tiny", "sampling")[0])
def test_sequences_of_llada_moe(case: str):
    cases, tensors = recorded("llada_moe/lladamoe_tiny", "sampling")
    out = runtime("llada_moe/lladamoe_tiny").generate(
        tensors[f"{case}.prompt"].long(), stop_at_eos=False, output_history=True, **cases[case]["kwargs"]
    )
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), tensors[f"{case}.history"])
    assert torch.equal(out.sequences.int(), tensors[f"{case}.final"])
    assert out.rows_per_step == cases[case]["fwd_seq_lens"]
