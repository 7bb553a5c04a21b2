"""The caches of Fast-dLLM (arXiv 2505.22618): a refresh at each block's start, then the block's rows alone.

Semantics follow the authors' code at commit 2a2de8c: the step that begins a block also commits tokens. What it does
otherwise where a family predicts a token from the row in front of it (Dream) is under `parity`. Blocks that begin
without a refresh (`refresh_blocks`) are beyond the paper.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tiered.core.checks import check_integer, check_switch
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
        refresh_blocks: blocks from one that begins with a refresh to the next; the others begin with the rows of the
            finished block and their own, which does not grow with the context. "auto": 4 for answers of two blocks or
            more behind 256 tokens or more, else 1.
        parity: as the authors' code where predictions are shifted: the step that begins a block gives the logits of the
            row in front of it alone, so it commits the block's first token, however unsure; steps leave that row out.
    """

    refresh_interval: int | None = None
    refresh_blocks: int | Literal["auto"] = 1
    parity: bool = False

    def __post_init__(self) -> None:
        check_interval("refresh_interval", self.refresh_interval)
        if self.refresh_blocks != "auto":
            check_integer("refresh_blocks", self.refresh_blocks, least=1)
        if self.refresh_blocks != 1 and self.refresh_interval is not None:
            raise ValueError(
                f"refresh_blocks = {self.refresh_blocks} saves refreshes, refresh_interval adds some; give one of them"
            )
        check_switch("parity", self.parity)

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
        row, stop = step.first_row, step.canvas.length if self._whole_suffix else step.stop
        parity = self._policy.parity and row < step.start
        # A rule may leave the first token open, and no step without the row in front predicts it.
        alone = parity and (step.number == 0 or bool(step.canvas.pending(step.start, step.start + 1).any()))
        if not alone and not self._policy.begins(step):
            if parity:
                return self._apart(step, [*range(step.start, stop)], step.stop - step.start, StepKind.STEP)
            return StepRows.of_span(row, stop, step, StepKind.STEP)
        first, kind = row - (step.stop - step.start), StepKind.UPDATE
        if self._policy.refreshes(step):
            first, stop, kind = 0, step.canvas.length, StepKind.REFRESH
        if alone:
            return self._apart(step, [row, *range(first, row), *range(step.start, stop)], 1, kind)
        return StepRows.of_span(first, stop, step, kind)

    def _apart(self, step: Step, columns: list[int], output: int, kind: StepKind) -> StepRows:
        """The authors' rows where predictions are shifted; the first `output` have logits, which are not the span that
        a step needs."""
        index = on_device(columns, step.canvas.tokens.device).expand(step.canvas.batch, -1)
        return StepRows(Rows.at(index), slice(0, output), kind)
