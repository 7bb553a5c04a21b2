"""SDAR against official code: logits of three block lengths, and histories of every strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import Replayed, changes
from safetensors.torch import load_file
from workloads.blocks import expected_rows
from workloads.input_rows import hidden_states

import tiered
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "sdar"
LOGITS = load_file(GOLDENS / "logits.safetensors")
RECORDED: dict[str, dict[str, Any]] = json.loads((GOLDENS / "sampling.json").read_text())
SEQUENCES = load_file(GOLDENS / "sampling.safetensors")
CASES = [case for case in RECORDED if "quirk" not in case]  # that one shows how fixed tokens are overwritten
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
    states = hidden_states(runtime, LOGITS["sdar_tiny.block8_masks.input_ids"].long(), block_length=8)
    torch.testing.assert_close(states[1], LOGITS["sdar_tiny.block8_masks.hidden.1"], atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["block_causal", "none"])
@pytest.mark.parametrize("case", CASES)
def test_sequences(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, case: str, policy: str):
    recorded, replayed = RECORDED[case], None
    options: dict[str, Any] = dict(recorded["kwargs"])
    if recorded["draw"] == "greedy":  # the likeliest token, with its probability at temperature 1
        options["temperature"] = 0.0
    else:
        replayed = Replayed(SEQUENCES[f"{case}.sampled"], monkeypatch)
    ends = options.get("stopping_criteria_idx")
    options |= {"stop_at_eos": ends is not None, "output_history": True, "seed": 0}
    out = runtime.with_policy(policy).generate(SEQUENCES[f"{case}.prompt"].long(), **options)
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), changes([*SEQUENCES[f"{case}.history"]]))
    expected = SEQUENCES[f"{case}.final"].clone()
    if ends is not None:  # behind an end stands padding: no unwanted tokens, and no masks
        expected[0, 1 + expected[0].tolist().index(*ends) :] = runtime.model.pad_token_id
    assert torch.equal(out.sequences.int(), expected)
    if policy == "block_causal":
        assert out.rows_per_step == expected_rows(recorded)
        assert out.steps_by_kind["step"] + out.steps_by_kind["commit"] == recorded["denoise_forwards"]
        assert out.steps_by_kind["prefill"] + out.steps_by_kind["commit"] == recorded["stores_kv"][:-1].count(True)
    if replayed is not None:
        replayed.check(SEQUENCES[f"{case}.sampled_prob"])


def test_fixed_tokens_are_never_overwritten(runtime: Runtime):
    # There fewer masks are left than a step fixes, and the prompt's last tokens go.
    (case,) = (case for case in RECORDED if "quirk" in case)
    options: dict[str, Any] = {**RECORDED[case]["kwargs"], "temperature": 0.0}
    prompt = SEQUENCES[f"{case}.prompt"].long()
    out = runtime.generate(prompt, stop_at_eos=False, **options)
    assert torch.equal(out.sequences[:, : prompt.shape[1]], prompt)
    assert not (out.sequences == runtime.model.mask_token_id).any()
    assert out.num_forwards <= RECORDED[case]["n_forward"]
