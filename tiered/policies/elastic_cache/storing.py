"""What comes out of a layer, stored as the next one's input, in pieces that each touch few columns.

A store that streams its layers has to have every page between the first and the last column of a write. The rows of a
step are a window and, far from it, a few tracked tokens: written at once they would bring in nearly the whole layer.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.costs import part_rows
from tiered.forward.forward import Flow, Forward
from tiered.policies.elastic_cache.step_rows import StepRows
from tiered.policies.elastic_cache.widening import Widening


class Storing:
    """Writes `HIDDEN` in one pass.

    Attributes:
        pieces: of the rows of the step, with the columns that each is within; None: nobody has asked.
    """

    def __init__(self, step: StepRows, rows: Rows, length: int, *, apart: bool) -> None:
        """`rows`: as the pass begins; `length`: columns of the canvas. `apart`: write every tracked token by itself, at
        the price of reading from the device once."""
        self._step, self._length = step, length
        self.pieces: list[tuple[slice, tuple[int, int] | None]] = [(slice(0, step.count), None)]
        if apart and not step.all_due:
            self.pieces = _pieces(step, rows)

    @spanned(Op.WRITE)
    def write(self, forward: Forward, layer: int, flow: Flow, widening: Widening, *, complete: bool) -> None:
        """Store `flow` as the input of `layer`; `complete`: it has every row of every sequence."""
        hidden, step = flow.hidden, self._step
        size = part_rows(len(hidden))
        if complete:
            # Spans, of which nothing that was stored is needed any more.
            place = torch.cat([widening.place] * (len(hidden) // len(step.due)))
            for part in Rows.span(0, self._length).parts(size):
                chosen = place[:, part, None].expand(-1, -1, hidden.shape[2])
                forward.store.write(Feature.HIDDEN, layer, Rows.span(part.start, part.stop), _rows_of(hidden, chosen))
            return
        for piece, within in self.pieces:
            rows = replace(flow.rows[piece], within=within)
            forward.store.write(Feature.HIDDEN, layer, rows, hidden[:, None, piece])
        behind = flow.rows[step.count :]
        for part in behind.parts(size):
            values = hidden[:, None, step.count :][:, :, part]
            forward.store.write(Feature.HIDDEN, layer, replace(behind[part], within=(0, self._length)), values)


def _rows_of(hidden: Tensor, place: Tensor) -> Tensor:
    return hidden.gather(1, place)[:, None]


def _pieces(step: StepRows, rows: Rows) -> list[tuple[slice, tuple[int, int] | None]]:
    """The rows near the window, and each tracked token, with the columns that they are within."""
    assert rows.index is not None and rows.valid is not None, "rows of a step are scattered"
    index, valid = rows.index[:, : step.count], rows.valid[:, : step.count]
    first = index.where(valid, torch.iinfo(index.dtype).max).amin(dim=0)
    last = index.where(valid, -1).amax(dim=0)
    ends = torch.stack([first, last]).tolist()
    groups = [slice(0, step.near), *(slice(row, row + 1) for row in range(step.near, step.count))]
    spans = [(min(ends[0][group]), max(ends[1][group]) + 1) for group in groups if group.start < group.stop]
    return list(zip((group for group in groups if group.start < group.stop), spans, strict=True))
