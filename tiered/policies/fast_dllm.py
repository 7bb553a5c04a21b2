"""The caches of Fast-dLLM (arXiv 2505.22618): a refresh at each block's start, then the block's rows alone.

Semantics follow the authors' code at commit 2a2de8c: the step that begins a block also commits tokens. What it does
otherwise where a family predicts a token from the row in front of it (Dream) is under `parity`.
"""

from dataclasses import dataclass
from typing import ClassVar

from tiered.core.checks import check_switch
from tiered.core.rows import Rows
from tiered.kernels.host_values import on_device
from tiered.policies.base import Policy, PolicyState, Step, StepKind, StepRows
from tiered.policies.schedule import check_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockCache(Policy):
    """Shared by both caches.

    Attributes:
        refresh_interval: forwards from one refresh to the next within a block; None: only the block's first. With 1
            nothing is ever stale, and the answers equal those of `none`.
        parity: as the authors' code where predictions are shifted: the step that begins a block gives the logits of the
            row in front of it alone, so it commits the block's first token, however unsure; steps leave that row out.
    """

    refresh_interval: int | None = None
    parity: bool = False

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)
        check_switch("parity", self.parity)

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

    def rows(self, step: Step) -> StepRows:
        if self._policy.parity and step.first_row < step.start:
            return self._first_token_first(step)
        length = step.canvas.length
        if self._policy.refreshes(step):
            return StepRows.of_span(0, length, step, StepKind.REFRESH)
        stop = length if self._whole_suffix else step.stop
        return StepRows.of_span(step.first_row, stop, step, StepKind.STEP)

    def _first_token_first(self, step: Step) -> StepRows:
        """The authors' rows where predictions are shifted. Those with logits are not the span that a step needs."""
        row, start, length = step.first_row, step.start, step.canvas.length
        # A rule may leave the first token open, and no step without the row in front predicts it.
        if step.number == 0 or step.canvas.pending(start, start + 1).any():
            columns, output, kind = [row, *range(row), *range(start, length)], 1, StepKind.REFRESH
        elif self._policy.refreshes(step):
            return StepRows.of_span(0, length, step, StepKind.REFRESH)
        else:
            columns = [*range(start, length if self._whole_suffix else step.stop)]
            output, kind = step.stop - start, StepKind.STEP
        index = on_device(columns, step.canvas.tokens.device).expand(step.canvas.batch, -1)
        return StepRows(Rows.at(index), slice(0, output), kind)
