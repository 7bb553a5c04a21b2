"""The rows of a step: a window of masked positions, what was committed in the last forward, and the tracked tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.canvas import PENDING, PROMPT
from tiered.core.rows import Rows, rows_where
from tiered.kernels.host_values import on_device
from tiered.policies.base import Step
from tiered.policies.elastic_cache.tracked import Tracked


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a pass begins with.

    Attributes:
        rows: of the step, and behind them all others where a sequence is due.
        output: those that predict the window's columns in the block.
        count: rows of the step; the first `near` of them are in the window or close to it, the others are tracked.
        others: all rows behind them, of every sequence; None where none is due.
        window: the first masked columns, and `in_window`: which of these there are.
        committed: columns that hold a token.
        active, due: sequences that take part; those of them that recompute every row.
        all_active, all_due: whether all sequences take part; whether all that do recompute every row.
    """

    rows: Rows
    output: slice
    count: int
    near: int
    others: Rows | None
    window: Int[Tensor, "batch window"]
    in_window: Bool[Tensor, "batch window"]
    committed: Bool[Tensor, "batch length"]
    active: Bool[Tensor, " batch"]
    due: Bool[Tensor, " batch"]
    all_active: bool
    all_due: bool


def step_rows(step: Step, window: int, tracked: Tracked, due: tuple[bool, ...]) -> StepRows:
    """Rows of the first `window` masked columns of each sequence, which may lie beyond the block.

    `due`: sequences that recompute every row; those that wait count for nothing.
    """
    canvas = step.canvas
    device = canvas.tokens.device
    active, forwards = (on_device(values, device) for values in (step.active, step.forwards))
    masked = canvas.committed_at == PENDING
    first = masked & (masked.cumsum(dim=1) <= window) & active[:, None]
    candidates = first.clone()
    candidates[:, step.stop :] = False
    # Row r predicts column r + shift; a prompt is in front, so nothing goes around the edge.
    predicting = candidates.roll(step.first_row - step.start, dims=1)
    recent = (canvas.committed_at == forwards[:, None] - 1) & (canvas.committed_at > PROMPT)
    here = active[:, None].expand_as(masked)
    everything = [here] if any(due) else []
    rows, counts = rows_where(predicting, (first | recent) & here, tracked.mask(masked) & here, *everything)
    near, count = sum(counts[:2]), sum(counts[:3])
    all_due = due == step.active
    is_due = on_device(due, device) & active
    others = rows[count:] if everything else None
    if others is not None and not all_due:
        assert rows.index is not None and rows.valid is not None, "made from masks"
        behind = torch.arange(rows.count, device=device) >= count
        rows = Rows.at(rows.index, rows.valid & (~behind | is_due[:, None]))
    most = min(window, canvas.length - canvas.prompt_length)
    columns = first.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    key_mask = canvas.key_mask()
    return StepRows(
        rows=rows,
        output=slice(0, counts[0]),
        count=count,
        near=near,
        others=others,
        window=columns,
        in_window=first.gather(1, columns),
        committed=~masked if key_mask is None else ~masked & key_mask,
        active=active,
        due=is_due,
        all_active=all(step.active),
        all_due=all_due,
    )
