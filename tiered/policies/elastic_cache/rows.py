"""The rows of a step of Elastic-Cache, and those that join them where a sequence begins to recompute all of its own.

    rows of a step   | predicting | window, just committed | tracked tokens | all others of the sequences that are due |
    numbered up to   0         output                     near            count                             rows.count

The window is the first masked columns of each sequence; those that are candidates are predicted by the first rows. The
others come with the step where a sequence is due, or join it on its way (`Widening`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.canvas import PENDING, PROMPT
from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows, rows_where
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.host_values import on_device
from tiered.policies.base import Step
from tiered.policies.elastic_cache.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Window:
    """The first masked columns of each sequence; `there` is False where there are fewer."""

    columns: Int[Tensor, "batch window"]
    there: Bool[Tensor, "batch window"]


@dataclass(frozen=True, slots=True)
class WindowRows:
    """What a step begins with.

    Attributes:
        rows, output, near, count: as drawn above; filler stands behind in sequences that have fewer of a kind.
        others: those behind the step's, of every sequence; None where none is due.
        window: whose attention is summed up.
        committed: columns that hold a token.
        active, due: sequences that take part; those of them that recompute every row.
        all_active, all_due: whether all sequences take part; whether all that do recompute every row.
    """

    rows: Rows
    output: slice
    near: int
    count: int
    others: Rows | None
    window: Window
    committed: Bool[Tensor, "batch length"]
    active: Bool[Tensor, " batch"]
    due: Bool[Tensor, " batch"]
    all_active: bool
    all_due: bool


def step_rows(step: Step, window: int, tracked: Tracked, due: tuple[bool, ...]) -> WindowRows:
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
    return WindowRows(
        rows=rows,
        output=slice(0, counts[0]),
        near=near,
        count=count,
        others=others,
        window=Window(columns, first.gather(1, columns)),
        committed=~masked if key_mask is None else ~masked & key_mask,
        active=active,
        due=is_due,
        all_active=all(step.active),
        all_due=all_due,
    )


class Widening:
    """The rows of a step under way: its own in front, all others behind them once any sequence needs them.

    Attributes:
        full: sequences that recompute every row.
        settled: whether all that take part do; nothing is left to find out then.
        place: where each column stands among the valid rows; −1 where it does not.
    """

    def __init__(self, step: WindowRows, flow: Flow, length: int) -> None:
        """`flow`: as the step begins; with guidance it goes over the batch twice. `length`: columns of the canvas."""
        self.full, self.settled = step.due.clone(), step.all_due
        self._step, self._others = step, step.others
        self._twice = len(flow.hidden) > len(step.due)
        self._length = length
        self.place = self._places(flow.rows)

    def others(self) -> Int[Tensor, ""]:
        """How many rows a sequence has beside those of the step, at most; 0 once they are there."""
        if self._others is not None:
            return self.place.new_zeros(())
        return ((self.place < 0) & self._step.active[:, None]).sum(dim=1).amax()

    @spanned(Op.GATHER)
    def widened(self, forward: Forward, layer: int, flow: Flow, moved: Bool[Tensor, " batch"], others: int) -> Flow:
        """`flow` with all rows of the sequences in `full`. Those in `moved` begin with `layer`, from the hidden states
        that are stored of it; `others` as `others()` has it."""
        count, hidden = self._step.count, flow.hidden
        if self._others is None:
            self._others = self._beside(others)
            hidden = hidden.new_empty(len(hidden), count + others, hidden.shape[2])
            hidden[:, :count] = flow.hidden
        behind = self._others.doubled() if self._twice else self._others
        begin, full = self._both(moved)[:, None, None], self._both(self.full)
        stored = forward.store.view(Feature.HIDDEN, layer)
        for part in forward.parts(behind.count, len(hidden)):
            values, target = behind[part].take(stored)[:, 0], hidden[:, count:][:, part]
            if hidden is flow.hidden:
                torch.where(begin, values, target, out=target)
            else:
                target.copy_(values)
        rows = _joined(flow.rows[:count], behind.only(full))
        self.place = self._places(rows)
        return Flow(rows, hidden, flow.output)

    def _beside(self, count: int) -> Rows:
        """The columns that are not among the rows of the step."""
        beside = self.place < 0
        index = beside.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        valid = torch.arange(count, device=index.device) < beside.sum(dim=1, keepdim=True)
        return Rows.at(index, valid & self._step.active[:, None])

    def _places(self, rows: Rows) -> Int[Tensor, "batch length"]:
        assert rows.index is not None and rows.valid is not None, "rows of a step are scattered"
        index, valid = rows.index[: len(self.full)], rows.valid[: len(self.full)]
        numbers = torch.arange(rows.count, device=index.device).expand_as(index)
        # One column more, for the rows that do not count.
        place = index.new_full((len(index), self._length + 1), -1)
        return place.scatter_(1, index.where(valid, self._length), numbers)[:, : self._length]

    def _both(self, mask: Bool[Tensor, " batch"]) -> Bool[Tensor, " sequences"]:
        return torch.cat([mask, mask]) if self._twice else mask


def _joined(front: Rows, behind: Rows) -> Rows:
    assert front.index is not None and front.valid is not None, "rows of a step are scattered"
    assert behind.index is not None and behind.valid is not None, "so are all others"
    return Rows.at(torch.cat([front.index, behind.index], dim=1), torch.cat([front.valid, behind.valid], dim=1))
