"""The caches of Fast-dLLM (arXiv 2505.22618): a full pass at each block's start, then the block's rows alone.

Semantics follow the authors' code at commit 2a2de8c: the pass that begins a block also commits tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from tiered.policies.base import PassKind, Policy, PolicyState, Step, StepPlan
from tiered.policies.schedule import check_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCache(Policy):
    """Shared by both caches.

    Attributes:
        refresh_interval: forwards from one full pass to the next within a block; None: only the block's first. With 1
            nothing is ever stale, and the answers equal those of `none`.
    """

    refresh_interval: int | None = None

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)

    def refreshes(self, step: Step) -> bool:
        """Whether this step recomputes every row."""
        return step.number % self.refresh_interval == 0 if self.refresh_interval else step.number == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDLLMPrefix(_BlockCache):
    """Prefix cache: a step recomputes the block and everything behind it."""

    name: ClassVar[str] = "fast_dllm_prefix"

    def start(self) -> PolicyState:
        return _Rows(self, whole_suffix=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDLLMDual(_BlockCache):
    """Dual cache: a step recomputes the block alone; prefix and suffix are read as the block's start left them."""

    name: ClassVar[str] = "fast_dllm_dual"

    def start(self) -> PolicyState:
        return _Rows(self, whole_suffix=False)


class _Rows(PolicyState):
    def __init__(self, policy: _BlockCache, *, whole_suffix: bool) -> None:
        self._policy = policy
        self._whole_suffix = whole_suffix

    def plan(self, step: Step) -> StepPlan:
        length = step.canvas.length
        if self._policy.refreshes(step):
            return StepPlan.of_span(0, length, step, PassKind.REFRESH)
        stop = length if self._whole_suffix else step.last_row
        return StepPlan.of_span(step.first_row, stop, step, PassKind.STEP)
