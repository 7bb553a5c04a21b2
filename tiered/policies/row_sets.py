"""Sets of rows that a step recomputes: spans of the canvas, and masks over it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from tiered.core.canvas import PROMPT
from tiered.core.rows import rows_where
from tiered.kernels.host_values import on_device
from tiered.policies.base import Step, StepKind, StepRows


class Span(NamedTuple):
    """Columns `start` to `stop` (exclusive) of the sequences that are True in `sequences`."""

    start: int
    stop: int
    sequences: tuple[bool, ...]


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
    spans: Sequence[Span],
    mask: Bool[Tensor, "batch length"] | None,
    kind: StepKind,
    candidates: Bool[Tensor, "batch block"] | None = None,
) -> StepRows:
    """The rows of all `spans`, those of `mask`, and those that predict `candidates` (None for what is pending).

    One span that all active sequences share stays a span, which costs no gathering.
    """
    shared = [span for span in spans if span.sequences == step.active]
    if mask is None and (whole := _union(shared)) is not None and all(_within(span, whole) for span in spans):
        return StepRows.of_span(*whole, step, kind)
    wanted = torch.zeros_like(step.canvas.committed_at, dtype=torch.bool) if mask is None else mask.clone()
    for span in spans:
        wanted[:, span.start : span.stop] |= _flags(span.sequences, wanted)
    predicting = torch.zeros_like(wanted)
    candidates = step.canvas.pending(step.start, step.stop) if candidates is None else candidates
    predicting[:, step.first_row : step.last_row] = candidates
    # What the prompt's padding holds is never read.
    needed = torch.arange(step.canvas.length, device=wanted.device) >= step.canvas.pads[:, None]
    needed = needed & _flags(step.active, wanted)
    rows, counts = rows_where(predicting & needed, wanted & needed)
    return StepRows(rows, slice(0, counts[0]), kind)


def clock(step: Step) -> Tensor:
    """Forwards that each sequence has taken part in, as a column."""
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
