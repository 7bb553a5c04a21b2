"""The caches of Fast-dLLM (arXiv 2505.22618): a refresh at each block's start, then the block's rows alone.

Semantics follow the authors' code at commit 2a2de8c: the step that begins a block also commits tokens. Blocks that
begin without a refresh (`refresh_blocks`) are beyond the paper.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from tiered.core.checks import check_integer
from tiered.forward.sizes import CallSizes
from tiered.policies.base import Policy, PolicyState, Step, StepKind, StepRows
from tiered.policies.schedule import LEAST_STALE_PROMPT, SELDOM, check_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCache(Policy):
    """Shared by both caches.

    Attributes:
        refresh_interval: forwards from one refresh to the next within a block; None: only the block's first. With 1
            nothing is ever stale, and the answers equal those of `none`.
        refresh_blocks: blocks from one that begins with a refresh to the next; the others begin with the rows of the
            finished block and their own, which does not grow with the context. "auto": 1, or 4 where a call is faster
            by it and its prompts are long enough to hold their answers.
    """

    refresh_interval: int | None = None
    refresh_blocks: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)
        if self.refresh_blocks != "auto":
            check_integer("refresh_blocks", self.refresh_blocks, least=1)
        if self.refresh_blocks != 1 and self.refresh_interval is not None:
            raise ValueError(
                f"refresh_blocks = {self.refresh_blocks} saves refreshes, refresh_interval adds some; give one of them"
            )

    def candidates(self, sizes: CallSizes, prompt: int) -> tuple[Policy, ...]:
        if self.refresh_blocks != "auto":
            return (self,)
        blocks = (1, SELDOM) if prompt >= LEAST_STALE_PROMPT else (1,)
        return tuple(replace(self, refresh_blocks=count) for count in blocks)

    def begins(self, step: Step) -> bool:
        """Whether more than the rows of any step are due: where a block begins, and at the interval."""
        return step.number % self.refresh_interval == 0 if self.refresh_interval else step.number == 0

    def refreshes(self, step: Step) -> bool:
        """Whether what begins is a refresh."""
        assert self.refresh_blocks != "auto", "decided before a call"
        return step.remasked or step.block % self.refresh_blocks == 0


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

    def rows(self, step: Step) -> StepRows:
        first, stop = step.first_row, step.canvas.length if self._whole_suffix else step.stop
        if not self._policy.begins(step):
            return StepRows.of_span(first, stop, step, StepKind.STEP)
        if self._policy.refreshes(step):
            return StepRows.of_span(0, step.canvas.length, step, StepKind.REFRESH)
        return StepRows.of_span(first - (step.stop - step.start), stop, step, StepKind.UPDATE)
