"""A family whose rows predict the token behind their own: the row in front of a block, which every policy needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from baselines import parity
from jaxtyping import Bool
from torch import Tensor

import tiered
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.policies.registry import make_policy, policies_for
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "dream"
PROMPT = torch.randint(0, 480, (1, 17), generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "stop_at_eos": False}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "dream_tiny", policy="none", dtype="float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFirst(CommitRule):
    """One token a step, the rightmost; notes which columns each step offers."""

    name: ClassVar[str] = "last_first"
    offered: list[list[bool]] = field(default_factory=list)

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _LastFirst(self.offered)


class _LastFirst(CommitState):
    def __init__(self, offered: list[list[bool]]) -> None:
        self._offered = offered

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        pass

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        self._offered.append(candidates.pending[0].tolist())
        pending = candidates.pending.int()
        return candidates.pending & (pending.flip(1).cumsum(dim=1).flip(1) == 1)


@pytest.mark.parametrize("policy", [name for name in policies_for("canvas") if not make_policy(name).needs_order()])
def test_every_pending_token_of_a_block_is_a_candidate(runtime: Runtime, policy: str):
    # The block's first token stays open to the end, so the row in front of the block is needed in every step.
    options = {"window": 8} if policy == "elastic_cache" else {}
    rule = LastFirst()
    out = runtime.with_policy(policy, **options).generate(PROMPT, commit=rule, **SIZES)
    assert rule.offered == [[column <= last for column in range(8)] for last in reversed(range(8))] * 3
    assert out.num_forwards == 24
    assert not (out.sequences == runtime.model.mask_token_id).any()


@pytest.mark.parametrize("policy", ["fast_dllm_prefix", "fast_dllm_dual"])
def test_in_parity_a_rule_may_leave_the_first_token_open(runtime: Runtime, policy: str):
    # Only the row in front predicts it: without that row the block would never end.
    class Late(_LastFirst):
        def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
            self.steps = 0

        def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
            self.steps += 1
            return super().choose(candidates) & (self.steps > 2)

    class LateRule(LastFirst):
        def start(self, steps_per_block: int, streams: Generators) -> CommitState:
            return Late(self.offered)

    rule = LateRule()
    out = runtime.with_policy(parity.policy(policy)).generate(PROMPT, commit=rule, **SIZES)
    assert rule.offered[:4] == [[True] + [False] * 7] * 3 + [[False] + [True] * 7]
    assert out.num_forwards == 3 * (3 + 7)


@pytest.mark.parametrize("policy", ["fast_dllm_prefix", "fast_dllm_dual"])
def test_in_parity_a_pass_within_a_block_may_refresh(runtime: Runtime, policy: str):
    out = runtime.with_policy(parity.policy(policy, refresh_interval=3)).generate(PROMPT, **SIZES)
    kept = [8] * 24 if policy == "fast_dllm_dual" else [41 - start for start in (17, 25, 33) for _ in range(8)]
    assert out.rows_per_step == [41 if n % 8 % 3 == 0 else rows for n, rows in enumerate(kept)]


def test_parity_changes_nothing_if_predictions_are_not_shifted():
    llada = tiered.from_pretrained(GOLDENS.parent / "llada" / "llada_tiny", dtype="float32")
    for policy in ("fast_dllm_prefix", "fast_dllm_dual"):
        plain, official = (
            llada.with_policy(make(policy)).generate(PROMPT, **SIZES) for make in (make_policy, parity.policy)
        )
        assert torch.equal(plain.sequences, official.sequences)
        assert plain.rows_per_step == official.rows_per_step


EMPTY: dict[str, Callable[[Runtime], object]] = {
    "no column": lambda runtime: runtime.generate(torch.zeros(1, 0, dtype=torch.long), **SIZES),
    "all padding": lambda runtime: runtime.generate(
        PROMPT.repeat(2, 1), attention_mask=torch.tensor([[1] * 17, [0] * 17]), **SIZES
    ),
}


@pytest.mark.parametrize("case", EMPTY)
def test_a_prompt_of_nothing_is_refused(runtime: Runtime, case: str):
    # No row would predict the answer's first token.
    with pytest.raises(ValueError, match=r"(is|are) empty"):
        EMPTY[case](runtime)
