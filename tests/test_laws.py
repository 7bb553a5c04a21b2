"""Laws 1 and 3 of the design: a policy that refreshes at every step equals `none`, and padding changes nothing.

Every policy meets every commit rule under every padding. A new policy is one row in `REFRESHED`, a rule one in `RULES`.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiered
from tiered.output import GenerationOutput
from tiered.policies.registry import POLICIES, make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
# By policy, the options with which nothing is ever stale.
REFRESHED: dict[str, dict[str, Any]] = {
    "none": {},
    "fast_dllm_prefix": {"refresh_interval": 1},
    "fast_dllm_dual": {"refresh_interval": 1},
    "dllm_cache": {"prompt_interval": 1, "response_interval": 1},
    "elastic_cache": {"refresh_interval": 1},
    "dkv_decode": {"refresh_interval": 1},
    "dkv_greedy": {"refresh_interval": 1},
    "dkv_prefill": {"prompt_interval": 1},
    "dkv_pd": {"prompt_interval": 1, "refresh_interval": 1},
    "uniform": {"refresh_interval": 1},
    "polestar": {"refresh_interval": 1},
    "composed": {"prompt_interval": 1, "response_interval": 1},
}
RULES: dict[str, dict[str, Any]] = {
    "one a step": {},
    "two a step": {"steps": 16},
    "uneven": {"steps": 12},
    "random": {"remasking": "random", "seed": 3},
    "random, uneven": {"remasking": "random", "seed": 4, "steps": 12},
    "threshold": {"confidence_threshold": 0.3},
    "factor": {"factor": 1.0},
    "drift-aware": {"confidence_threshold": 0.8, "early_threshold": 0.2, "drift_slope": 0.1, "drift_ceiling": 9.0},
    "guidance": {"cfg_scale": 0.7, "steps": 16},
    "sampled": {"temperature": 0.8, "seed": 5},
}
LENGTHS = (17, 9, 12)
SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 8}
# A policy that recomputes what comes next must know it before the step.
CASES = [
    (policy, rule)
    for policy, rule in itertools.product(REFRESHED, RULES)
    if "random" in rule or not make_policy(policy).needs_order()
]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 480, (length,), generator=generator) for length in LENGTHS]


def padded(side: str) -> tuple[Tensor, Tensor]:
    """The prompts as one batch, padding on one side, or scattered among the tokens."""
    longest = max(LENGTHS)
    ids, mask = torch.full((len(LENGTHS), longest), 499), torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    generator = torch.Generator().manual_seed(12)
    for row, prompt in enumerate(prompts()):
        columns = {
            "left": torch.arange(longest - len(prompt), longest),
            "right": torch.arange(len(prompt)),
            "scattered": torch.randperm(longest, generator=generator)[: len(prompt)].sort().values,
        }[side]
        ids[row, columns], mask[row, columns] = prompt, 1
    return ids, mask


def answers(out: GenerationOutput) -> Tensor:
    return out.sequences[:, -SIZES["max_new_tokens"] :]


def test_every_policy_is_under_the_laws():
    assert set(REFRESHED) == set(POLICIES)


@pytest.mark.parametrize(("policy", "rule"), [case for case in CASES if case[0] != "none"])
def test_a_policy_that_refreshes_every_step_equals_none(runtime: Runtime, policy: str, rule: str):
    ids, mask = padded("left")
    fresh, exact = (
        runtime.with_policy(name, **options).generate(
            ids, attention_mask=mask, stop_at_eos=False, output_history=True, **RULES[rule], **SIZES
        )
        for name, options in ((policy, REFRESHED[policy]), ("none", {}))
    )
    assert fresh.history is not None and exact.history is not None
    assert torch.equal(torch.stack(fresh.history), torch.stack(exact.history))


@pytest.mark.parametrize(("policy", "rule"), CASES)
def test_a_padded_batch_answers_as_each_row_alone(runtime: Runtime, policy: str, rule: str):
    # Stale caches on purpose: padding must change nothing in what is cached, either.
    runtime = runtime.with_policy(policy)
    options: dict[str, Any] = {"stop_at_eos": False, **RULES[rule], **SIZES}
    seed = options.pop("seed", None)
    alone = [
        runtime.generate(prompt[None], seed=None if seed is None else seed + row, **options)
        for row, prompt in enumerate(prompts())
    ]
    expected = torch.cat([answers(out) for out in alone])
    for side in ("left", "right", "scattered"):
        ids, mask = padded(side)
        out = runtime.generate(ids, attention_mask=mask, seed=seed, **options)
        assert torch.equal(answers(out), expected), side
        assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
        assert out.forwards == [one.num_forwards for one in alone]
        torch.testing.assert_close(out.tokens_per_forward, torch.cat([one.tokens_per_forward for one in alone]))


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
def test_logits_of_a_padded_batch_are_those_of_each_row_alone(runtime: Runtime, side: str):
    ids, mask = padded(side)
    logits = runtime.logits(ids, mask)
    for row, prompt in enumerate(prompts()):
        torch.testing.assert_close(logits[row, mask[row].bool()], runtime.logits(prompt[None])[0], atol=2e-4, rtol=1e-5)


def test_stale_caches_do_differ_from_none(runtime: Runtime):
    # Else the laws above would hold of a cache that is never read.
    ids, mask = padded("left")
    exact = answers(runtime.with_policy("none").generate(ids, attention_mask=mask, stop_at_eos=False, **SIZES))
    for policy in ("fast_dllm_prefix", "fast_dllm_dual"):
        stale = runtime.with_policy(policy).generate(ids, attention_mask=mask, stop_at_eos=False, **SIZES)
        assert not torch.equal(answers(stale), exact)
