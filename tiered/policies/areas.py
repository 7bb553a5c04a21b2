"""Which rows a step recomputes, put together from areas of the canvas."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from tiered.core.canvas import PROMPT
from tiered.core.rows import rows_where
from tiered.kernels.host_values import on_device
from tiered.policies.base import Step, StepKind, StepRows


@dataclass(frozen=True, slots=True)
class Area:
    """Columns `start` to `stop` (exclusive) of the sequences that are True in `sequences`."""

    start: int
    stop: int
    sequences: tuple[bool, ...]


def prompt(step: Step, sequences: tuple[bool, ...]) -> Area:
    """All rows in front of the answer's."""
    return Area(0, _answer_start(step), sequences)


def answer(step: Step, sequences: tuple[bool, ...]) -> Area:
    """All rows that predict the answer, and those behind."""
    return Area(_answer_start(step), step.canvas.length, sequences)


def block(step: Step, blocks_behind: int = 0) -> Area:
    """The rows of the current block, with the one in front where that predicts, and of the next `blocks_behind`, of
    every active sequence."""
    stop = step.stop + blocks_behind * (step.stop - step.start)
    return Area(step.first_row, min(stop, step.canvas.length), step.active)


def suffix(step: Step) -> Area:
    """The rows of the current block and all behind it, of every active sequence."""
    return Area(step.first_row, step.canvas.length, step.active)


def undecided(step: Step, delay: int) -> Bool[Tensor, "batch length"]:
    """Rows of tokens that are pending, or were committed in the last `delay` forwards of their sequence.

    Where a row predicts the token behind its own, both tokens count. The last row predicts nothing; its own counts.
    """
    dates = step.canvas.committed_at
    own = (dates >= clock(step) - delay) & (dates != PROMPT)
    shift = step.start - step.first_row
    return own | torch.cat([own[:, shift:], own[:, -shift:]], dim=1) if shift else own


def just_committed(step: Step) -> Bool[Tensor, "batch length"]:
    """Rows of the tokens that the last forward of their sequence committed."""
    dates = step.canvas.committed_at
    return (dates == clock(step) - 1) & (dates != PROMPT)


def around(rows: Bool[Tensor, "batch length"], window: int) -> Bool[Tensor, "batch length"]:
    """`rows` and the `window` nearest ones of each, half of them on either side."""
    reach = window // 2
    return F.max_pool1d(rows.float()[:, None], 2 * reach + 1, stride=1, padding=reach)[:, 0] > 0


def rows_of(
    step: Step,
    areas: Sequence[Area],
    mask: Bool[Tensor, "batch length"] | None,
    kind: StepKind,
    candidates: Bool[Tensor, "batch block"] | None = None,
) -> StepRows:
    """The rows of all `areas`, those of `mask`, and those that predict `candidates` (None: what is
    pending).

    One span that all active sequences share stays a span, which costs no gathering.
    """
    shared = [area for area in areas if area.sequences == step.active]
    if mask is None and (span := _union(shared)) is not None and all(_within(area, span) for area in areas):
        return StepRows.of_span(*span, step, kind)
    wanted = torch.zeros_like(step.canvas.committed_at, dtype=torch.bool) if mask is None else mask.clone()
    for area in areas:
        wanted[:, area.start : area.stop] |= _flags(area.sequences, wanted)
    predicting = torch.zeros_like(wanted)
    candidates = step.canvas.pending(step.start, step.stop) if candidates is None else candidates
    predicting[:, step.first_row : step.last_row] = candidates
    # What the prompt's padding holds is never read.
    needed = torch.arange(step.canvas.length, device=wanted.device) >= step.canvas.pads[:, None]
    needed = needed & _flags(step.active, wanted)
    rows, counts = rows_where(predicting & needed, wanted & needed)
    return StepRows(rows, slice(0, counts[0]), kind)


def _answer_start(step: Step) -> int:
    # A family that predicts position p from row p − 1 needs the row in front of the answer.
    return step.canvas.prompt_length - (step.start - step.first_row)


def clock(step: Step) -> Tensor:
    """Forwards that each sequence has taken part in, as a column."""
    return on_device(step.forwards, step.canvas.committed_at.device)[:, None]


def _flags(sequences: tuple[bool, ...], like: Tensor) -> Bool[Tensor, "batch 1"]:
    return on_device(sequences, like.device)[:, None]


def _union(areas: Sequence[Area]) -> tuple[int, int] | None:
    """The span that `areas` cover together; None where they leave gaps, or there are none."""
    spans = sorted((area.start, area.stop) for area in areas if area.start < area.stop)
    if not spans:
        return None
    start, stop = spans[0]
    for first, last in spans[1:]:
        if first > stop:
            return None
        stop = max(stop, last)
    return start, stop


def _within(area: Area, span: tuple[int, int]) -> bool:
    return not any(area.sequences) or area.start >= area.stop or span[0] <= area.start <= area.stop <= span[1]
