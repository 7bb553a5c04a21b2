"""Which sequences of a pass recompute every row, and the rows that join in the layer where they begin to."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.costs import part_rows
from tiered.forward.forward import Flow, Forward
from tiered.policies.elastic_cache.step_rows import StepRows


class Widening:
    """The rows of a pass under way: those of the step in front, all others behind them once any sequence needs them.

    Attributes:
        full: sequences that recompute every row.
        settled: whether all that take part do; nothing is left to find out then.
        place: where each column stands among the valid rows; −1 where it does not.
    """

    def __init__(self, step: StepRows, flow: Flow, length: int) -> None:
        """`flow`: as the pass begins; with guidance it goes over the batch twice. `length`: columns of the canvas."""
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
        for part in behind.parts(part_rows(len(hidden))):
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
