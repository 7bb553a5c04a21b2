"""What official code answers on SDAR: logits of three block lengths."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiered
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "sdar"
LOGITS = load_file(GOLDENS / "logits.safetensors")
BLOCKS = {"block4": 4, "block8_masks": 8, "block16_masks": 16}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "sdar_tiny", dtype="float32")


@pytest.mark.parametrize("case", BLOCKS)
def test_logits(runtime: Runtime, case: str):
    ids = LOGITS[f"sdar_tiny.{case}.input_ids"].long()
    logits = runtime.logits(ids, block_length=BLOCKS[case])
    torch.testing.assert_close(logits, LOGITS[f"sdar_tiny.{case}.logits"], atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("pads", [(0, 5), (5, 0), (8, 3)], ids=["right", "left", "both"])
def test_logits_of_padded_rows(runtime: Runtime, pads: tuple[int, int]):
    # Blocks count from the first token, wherever that stands.
    case, (left, right) = "block8_masks", pads
    ids = torch.nn.functional.pad(LOGITS[f"sdar_tiny.{case}.input_ids"].long(), pads, value=7)
    mask = torch.ones_like(ids)
    mask[:, :left] = mask[:, ids.shape[1] - right :] = 0
    logits = runtime.logits(ids, mask, block_length=8)[:, left : ids.shape[1] - right]
    torch.testing.assert_close(logits, LOGITS[f"sdar_tiny.{case}.logits"], atol=5e-4, rtol=1e-4)


def test_hidden_states(runtime: Runtime):
    states = runtime.hidden_states(LOGITS["sdar_tiny.block8_masks.input_ids"].long(), block_length=8)
    torch.testing.assert_close(states[1], LOGITS["sdar_tiny.block8_masks.hidden.1"], atol=5e-4, rtol=1e-4)
