"""Caches of keys and values by a schedule of the rows that steps recompute and of full refreshes.

Eight policies are rows of the table `SCHEDULES`, each with the options that its row names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from tiered.core.canvas import PROMPT
from tiered.core.checks import check_count, check_integer, unknown_name
from tiered.core.features import Feature
from tiered.core.rows import rows_where
from tiered.kernels.host_values import on_device
from tiered.models.shape import BLOCK_CAUSAL, CANVAS, ModelShape, Sight
from tiered.policies.base import Pass, Policy, PolicyState, Step, StepKind

RowsOf = Literal["all", "block", "suffix", "answer", "undecided", "next_commits"]

# Tokens of a prompt from which stale prompt keys were measured to cost no answers (docs/measurements/). Shorter lists,
# of up to about 40 tokens, are sorted right in 98 of 100 cases without a cache, and in 42 to 65 with one.
LEAST_STALE_PROMPT = 256
REFRESH_EVERY_4 = 4  # blocks from one refresh to the next, if a block need not begin with one


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchedule(Policy):
    """Keep keys and values of all layers. A call's first step recomputes every row.

    Attributes:
        name: key of `SCHEDULES`.
        rows: rows that every step recomputes. "all" for every row, "block" for the current block, "suffix" for the
            block and all rows behind it, "answer" for all rows behind the prompt. "undecided" for pending tokens and
            those committed in the last `delay` steps. "next_commits" for tokens committed next, those committed last,
            and a `window` around the latter.
        refresh_interval: steps from one refresh of all rows to the next; None for the first alone. Each block counts
            its own steps and begins with a refresh, or each sequence counts its steps if `refresh_blocks` is None.
        refresh_blocks: blocks from one that begins with a refresh to the next; None for refreshes that ignore blocks.
            The other blocks begin with the rows of the finished block and those of a step. "auto" to decide before a
            call.
        prompt_interval: steps of a sequence from one refresh of the prompt's rows to the next; None for the first
            alone, "refresh" for the same steps as all rows.
        next_block_interval: steps of a block from one update of the next block's rows to another; None for no such
            update.
        delay: steps after its commit in which an undecided row is still recomputed; 0 keeps the features of its mask.
        window: rows around each just committed token, half of them on either side.
    """

    name: str  # pyright: ignore[reportIncompatibleVariableOverride] one class has the names of a table
    rows: RowsOf
    refresh_interval: int | None = None
    refresh_blocks: int | Literal["auto"] | None = None
    prompt_interval: int | Literal["refresh"] | None = "refresh"
    next_block_interval: int | None = None
    delay: int = 1
    window: int = 0

    def __post_init__(self) -> None:
        if self.rows not in get_args(RowsOf):
            raise unknown_name("rows", str(self.rows), get_args(RowsOf))
        for name in ("refresh_interval", "next_block_interval"):
            check_count(name, getattr(self, name))
        if self.prompt_interval != "refresh":
            check_count("prompt_interval", self.prompt_interval)
        if self.refresh_blocks not in (None, "auto"):
            check_integer("refresh_blocks", self.refresh_blocks, least=1)
        if self.refresh_blocks not in (None, 1) and self.refresh_interval is not None:
            raise ValueError(
                f"refresh_blocks = {self.refresh_blocks} and refresh_interval = {self.refresh_interval} conflict, "
                "because one saves refreshes and the other adds some; give one of them"
            )
        check_integer("delay", self.delay, least=0)
        check_integer("window", self.window, least=0)

    @property
    def sights(self) -> frozenset[Sight]:  # pyright: ignore[reportIncompatibleVariableOverride] see `name`
        return CANVAS | BLOCK_CAUSAL if self.rows == "all" else CANVAS

    @property
    def defaults(self) -> Mapping[str, Any]:
        return SCHEDULES[self.name].options

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        layers = 1 if self.rows == "all" else shape.layers
        return {Feature.KEY: layers, Feature.VALUE: layers}

    def needs_order(self) -> bool:
        return self.rows == "next_commits"

    def start(self) -> PolicyState:
        assert self.refresh_blocks != "auto", "decided before a call"
        return ScheduledRows(self)


class Schedule(NamedTuple):
    """A row of `SCHEDULES`: `options` with their defaults, and `fixed` fields of `RowSchedule`."""

    rows: RowsOf
    options: Mapping[str, Any] = MappingProxyType({})
    fixed: Mapping[str, Any] = MappingProxyType({})


_BY_BLOCK = {"refresh_interval": None, "refresh_blocks": 1}
SCHEDULES: Mapping[str, Schedule] = {
    # As the official samplers: keys and values are in a workspace of one layer.
    "none": Schedule("all"),
    # Fast-dLLM (arXiv 2505.22618), after the authors' code (commit 2a2de8c), in which the first step of a block commits
    # tokens too. Blocks that begin without a refresh are beyond the paper.
    "fast_dllm_prefix": Schedule("suffix", _BY_BLOCK),
    "fast_dllm_dual": Schedule("block", _BY_BLOCK),
    # dKV-Cache (arXiv 2505.15781): a token's keys and values are kept from one step after its commit.
    "dkv_decode": Schedule("undecided", {"delay": 1, "refresh_interval": 8}),
    "dkv_greedy": Schedule("next_commits", {"window": 4, "refresh_interval": 2}),
    "dkv_prefill": Schedule("answer", {"prompt_interval": None}),
    "dkv_pd": Schedule("undecided", {"delay": 1, "refresh_interval": 8, "prompt_interval": None}),
    # Uniform-Cache (Barry, "Block-Wise KV Caching for Uniform Diffusion Language Models", UT Austin 2026): after the
    # block's own keys, those of the next block change most.
    "uniform": Schedule("block", {"next_block_interval": 4, "refresh_interval": None}, {"refresh_blocks": 1}),
}


def row_schedule(name: str, **options: Any) -> RowSchedule:
    row = SCHEDULES[name]
    return RowSchedule(name=name, rows=row.rows, **{**row.fixed, **row.options, **options})


class Span(NamedTuple):
    """Columns `start` to `stop` (exclusive) of the sequences that are True in `sequences`."""

    start: int
    stop: int
    sequences: tuple[bool, ...]


class ScheduledRows(PolicyState):
    def __init__(self, schedule: RowSchedule) -> None:
        self._schedule = schedule

    def rows(self, step: Step) -> Pass:
        schedule, length = self._schedule, step.canvas.length
        of_prompt, of_answer = self.due(step)
        next_block = schedule.next_block_interval
        beyond = next_block is not None and step.number > 0 and step.number % next_block == 0
        # A block that begins without a refresh begins with the finished block.
        between = schedule.refresh_blocks is not None and step.number == 0
        renews = any(of_prompt) or any(of_answer) or beyond or between or step.remasked
        if schedule.rows == "answer":
            of_answer = step.active
        if of_prompt == of_answer == step.active:
            return step.over(0, length, StepKind.REFRESH)
        # A family that predicts a token from the row before it needs the row before the answer.
        start = step.canvas.prompt_length - (step.start - step.first_row)
        spans = [Span(0, start, of_prompt), Span(start, length, of_answer)]
        if step.remasked:
            spans.append(Span(0, step.start, step.active))
        if between:
            spans.append(Span(step.first_row - (step.stop - step.start), step.first_row, step.active))
        mask = next_commits = None
        if of_answer != step.active:
            match schedule.rows:
                case "block":
                    stop = step.stop + beyond * (step.stop - step.start)
                    spans.append(Span(step.first_row, min(stop, length), step.active))
                case "suffix":
                    spans.append(Span(step.first_row, length, step.active))
                case "undecided":
                    mask = self.undecided(step, schedule.delay)
                case "next_commits":
                    assert step.next_commits is not None, "the runtime rejects rules that need the logits"
                    next_commits = step.next_commits > 0
                    dates = step.canvas.committed_at
                    fresh = (dates == clock(step) - 1) & (dates != PROMPT)
                    mask = self.around(step, fresh, schedule.window)
        rows = rows_of(step, spans, mask, StepKind.UPDATE if renews else StepKind.STEP, next_commits)
        refreshed = tuple(first and second for first, second in zip(of_prompt, of_answer, strict=True))
        return replace(rows, refreshed=refreshed)

    def due(self, step: Step) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """True for sequences that refresh their prompts' rows in this step; and the same for the rows behind."""
        schedule = self._schedule
        if schedule.rows == "all":
            return step.active, step.active
        interval, blocks = schedule.refresh_interval, schedule.refresh_blocks
        if blocks is None:
            every = step.due(interval)
            return every if schedule.prompt_interval == "refresh" else step.due(schedule.prompt_interval), every
        assert blocks != "auto", "decided before a call"
        begins = step.number % interval == 0 if interval else step.number == 0
        refreshes = begins and (step.remasked or step.block % blocks == 0)
        every = tuple(refreshes and here for here in step.active)
        return every, every

    def undecided(self, step: Step, delay: int) -> Bool[Tensor, "batch length"]:
        """Rows of tokens that are pending, or were committed in the last `delay` forwards of their sequence. With a
        prediction shift, a row also counts for the token that it predicts; the last row predicts none."""
        dates = step.canvas.committed_at
        own = (dates >= clock(step) - delay) & (dates != PROMPT)
        shift = step.start - step.first_row
        return own | torch.cat([own[:, shift:], own[:, -shift:]], dim=1) if shift else own

    def around(self, step: Step, fresh: Bool[Tensor, "batch length"], window: int) -> Bool[Tensor, "batch length"]:
        """The rows that the last step committed (`fresh`), and the `window` nearest rows of each, half on either
        side."""
        reach = window // 2
        return F.max_pool1d(fresh.float()[:, None], 2 * reach + 1, stride=1, padding=reach)[:, 0] > 0


def rows_of(
    step: Step,
    spans: Sequence[Span],
    mask: Bool[Tensor, "batch length"] | None,
    kind: StepKind,
    candidates: Bool[Tensor, "batch block"] | None = None,
) -> Pass:
    """The rows of all `spans`, those of `mask`, and those that predict `candidates` (None for pending columns). A span
    that all active sequences share stays a span, without a gather."""
    shared = [span for span in spans if span.sequences == step.active]
    if mask is None and (whole := _union(shared)) is not None and all(_within(span, whole) for span in spans):
        return step.over(*whole, kind)
    wanted = torch.zeros_like(step.canvas.committed_at, dtype=torch.bool) if mask is None else mask.clone()
    for span in spans:
        wanted[:, span.start : span.stop] |= _flags(span.sequences, wanted)
    predicting = torch.zeros_like(wanted)
    candidates = step.canvas.pending(step.start, step.stop) if candidates is None else candidates
    predicting[:, step.first_row : step.last_row] = candidates
    # Rows of padding are never read.
    needed = (step.canvas.rows.index >= step.canvas.pads[:, None]) & _flags(step.active, wanted)
    rows, counts = rows_where(predicting & needed, wanted & needed)
    return step.of_rows(rows, slice(0, counts[0]), kind)


def clock(step: Step) -> Tensor:
    """Forwards of each sequence so far, [batch, 1]."""
    return on_device(step.forwards, step.canvas.committed_at.device)[:, None]


def _flags(sequences: tuple[bool, ...], like: Tensor) -> Bool[Tensor, "batch 1"]:
    return on_device(sequences, like.device)[:, None]


def _union(spans: Sequence[Span]) -> tuple[int, int] | None:
    found = sorted((span.start, span.stop) for span in spans if span.start < span.stop)
    if not found:
        return None
    start, stop = found[0]
    for first, last in found[1:]:
        if first > stop:
            return None
        stop = max(stop, last)
    return start, stop


def _within(span: Span, whole: tuple[int, int]) -> bool:
    empty = not any(span.sequences) or span.start >= span.stop
    return empty or whole[0] <= span.start <= span.stop <= whole[1]
