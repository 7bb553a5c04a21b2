"""Fast-dLLM's caches if blocks begin without a refresh: the rows that begin a block, in every family and batch."""

from typing import Any

import pytest
import torch
from baselines import parity
from four_blocks import BLOCK, BLOCKS, FAMILIES, GOLDENS, PROMPT, alone, answered

import tiered
from tiered.policies.registry import make_policy

POLICIES = ("fast_dllm_prefix", "fast_dllm_dual")


@pytest.mark.parametrize("refresh_blocks", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("family", "shift"), [("llada", 0), ("dream", 1)])
def test_a_block_between_begins_with_the_finished_one(family: str, shift: int, policy: str, refresh_blocks: int):
    out = answered(family, make_policy(policy, refresh_blocks=refresh_blocks), steps=2 * BLOCKS)
    whole, expected = PROMPT + BLOCKS * BLOCK, []
    for block in range(BLOCKS):
        behind = (BLOCKS - block) * BLOCK if policy == "fast_dllm_prefix" else BLOCK
        expected += [whole if block % refresh_blocks == 0 else BLOCK + shift + behind, shift + behind]
    assert list(out.rows_per_step) == expected
    refreshes = -(-BLOCKS // refresh_blocks)
    assert (out.steps_by_kind["refresh"], out.steps_by_kind.get("update", 0)) == (refreshes, BLOCKS - refreshes)


@pytest.mark.parametrize("policy", POLICIES)
def test_under_a_noise_mask_every_block_begins_with_a_refresh(policy: str):
    assert answered("gidd", make_policy(policy, refresh_blocks=2), block_steps=4).steps_by_kind["refresh"] == BLOCKS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("family", "official", "options"),
    [
        ("llada", False, {"confidence_threshold": 0.6}),
        ("llada", False, {"confidence_threshold": 0.6, "cfg_scale": 0.5}),
        ("dream", False, {"confidence_threshold": 0.6}),
        ("dream", True, {}),
        ("gidd", False, {"block_steps": 5, "seed": 3}),
    ],
)
def test_a_batch_answers_as_its_prompts_alone(family: str, policy: str, official: bool, options: dict[str, Any]):
    made = (parity.policy if official else make_policy)(policy, refresh_blocks=2)
    together = answered(family, made, slice(0, 3), **options).sequences
    for number in range(3):
        assert torch.equal(together[number], alone(family, made, number, **options).sequences[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_in_the_authors_code_a_block_between_gives_its_first_token_alone(policy: str):
    out = answered("dream", parity.policy(policy, refresh_blocks=2), steps=2 * BLOCKS, output_history=True)
    assert out.history is not None and out.steps_by_kind["update"] == BLOCKS // 2
    begins = [index for index, rows in enumerate(out.rows_per_step) if rows > BLOCK * BLOCKS]
    second = begins[0] + (len(out.rows_per_step) - begins[0]) // BLOCKS
    changed = (out.history[second + 1] != out.history[second])[0].nonzero().flatten().tolist()
    assert changed == [PROMPT + BLOCK]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_changes_no_token(policy: str):
    ids = torch.randint(2, 480, (2, 200), generator=torch.Generator().manual_seed(4))
    call = {"max_new_tokens": BLOCK * BLOCKS, "block_length": BLOCK, "steps": 2 * BLOCKS, "stop_at_eos": False}
    given: dict[str, Any] = {"dtype": "float32", "policy": policy, "refresh_blocks": 2}
    free = tiered.from_pretrained(GOLDENS / FAMILIES["llada"], **given).generate(ids, **call)
    least = free.memory.peak_device_bytes * 19 // 20
    tight = tiered.from_pretrained(GOLDENS / FAMILIES["llada"], **given, memory=least).generate(ids, **call)
    assert sum(tight.memory.moved.values()) > 0 and torch.equal(tight.sequences, free.sequences)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"refresh_blocks": 0}, ValueError, "refresh_blocks = 0"),
        ({"refresh_blocks": True}, TypeError, "refresh_blocks = True"),
        ({"refresh_blocks": "often"}, TypeError, "refresh_blocks = 'often'"),
        ({"refresh_blocks": 2, "refresh_interval": 4}, ValueError, "one of them"),
        ({"refresh_blocks": "auto", "refresh_interval": 4}, ValueError, "one of them"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], named: str):
    with pytest.raises(error, match=named):
        make_policy("fast_dllm_dual", **options)
