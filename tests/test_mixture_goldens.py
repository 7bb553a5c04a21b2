"""Mixtures of experts against official code: histories. Logits and picked experts: test_answer_studies.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import Replayed, changes
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
RUNTIMES: dict[str, Runtime] = {}


def runtime(checkpoint: str) -> Runtime:
    if checkpoint not in RUNTIMES:
        RUNTIMES[checkpoint] = tiered.from_pretrained(GOLDENS / checkpoint, policy="none")
    return RUNTIMES[checkpoint]


def recorded(checkpoint: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = GOLDENS / checkpoint.partition("/")[0]
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


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


SAMPLERS = [(name, case) for name in ("sampling", "edit_sampling") for case in recorded("llada2/llada2_tiny", name)[0]]


@pytest.mark.parametrize("policy", ["block_causal", "none"])
@pytest.mark.parametrize(("name", "case"), SAMPLERS)
def test_sequences_of_llada2(monkeypatch: pytest.MonkeyPatch, name: str, case: str, policy: str):
    cases, tensors = recorded("llada2/llada2_tiny", name)
    options, replayed = cases[case]["kwargs"], None
    if f"{case}.sampled" in tensors:
        replayed = Replayed(tensors[f"{case}.sampled"], monkeypatch)
    prompt, final = tensors[f"{case}.prompt"].long(), tensors[f"{case}.final"][0]
    length, asked = prompt.shape[1], options["gen_length"]
    # LLaDA2.1's goes on behind a block with an end, and cuts there all the same.
    call = {**options, "seed": 0, "output_history": True, "stop_at_eos": "eos_no_early" not in case}
    out = runtime("llada2/llada2_tiny").with_policy(policy).generate(prompt, **call)
    assert out.sequences[0, length : length + len(final)].tolist() == final.tolist()
    # Tokens behind the end of an answer are padding here, in the last canvas of a call that has stopped there.
    states = torch.stack(out.history or []).int()
    expected = changes([*tensors[f"{case}.history"][:, :, : length + asked]])
    assert torch.equal(states[:-1], expected[:-1])
    assert torch.equal(states[-1, :, : length + len(final)], expected[-1, :, : length + len(final)])
    steps = out.num_forwards - out.steps_by_kind.get("prefill", 0)
    assert steps == cases[case]["n_forward"]
    if replayed is not None:
        replayed.check(tensors[f"{case}.sampled_prob"])


def test_a_model_that_wants_masks_ends_all_the_same(monkeypatch: pytest.MonkeyPatch):
    llada2 = runtime("llada2/llada2_tiny")
    logits, mask = llada2.model.logits, llada2.model.mask_token_id

    def masks(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        found[..., mask] = 50.0
        return found

    monkeypatch.setattr(llada2.model, "logits", masks)
    call: dict[str, Any] = {"gen_length": 16, "block_length": 8, "stop_at_eos": False}
    rules: list[dict[str, Any]] = [{"threshold": 0.7, "editing_threshold": 0.5}, {"threshold": 0.95}]
    for options in rules:
        out = llada2.generate(torch.arange(3, 14)[None], **call, **options)
        assert not (out.sequences == mask).any() and out.num_forwards <= 3 * (8 + 16)


def test_an_end_in_the_prompt_ends_no_answer():
    # The official code of LLaDA2.0 finds it first, and answers nothing.
    llada2 = runtime("llada2/llada2_tiny")
    prompt = torch.arange(3, 23)[None]
    prompt[0, 5] = llada2.model.eos_token_id
    out = llada2.generate(prompt, gen_length=12, block_length=8, threshold=0.5, eos_early_stop=True)
    assert out.timings.tokens > 0 and torch.equal(out.sequences[:, :20], prompt)
