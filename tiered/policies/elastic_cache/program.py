"""A step of Elastic-Cache (arXiv 2510.14973): its rows, and all rows from the layer on where attention has moved.

In every layer but the last the attention of its tracked tokens is compared with that of the step before. Where it has
moved, in one sequence or more, the step widens: from the next layer up these sequences recompute every row, those that
the step has not come with from the hidden states that the last step over them stored.
"""

from dataclasses import replace

import torch

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.forward.sizes import CallSizes
from tiered.policies.elastic_cache.rows import Widening, WindowRows
from tiered.policies.elastic_cache.tracked import Tracked
from tiered.policies.elastic_cache.watching import LayerQueries, watch, weights_of
from tiered.policies.elastic_cache.window_bytes import window_chunk


class ElasticStep:
    """Layer program. With classifier-free guidance the halves that see their prompts decide for both."""

    def __init__(self, tracked: Tracked, step: WindowRows, threshold: float, *, apart: bool) -> None:
        """`tracked`: as the last step left it; `threshold`: similarity below which a sequence widens; `apart`: as in
        `Storing`."""
        self._tracked, self._step, self._threshold, self._apart = tracked, step, threshold, apart

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        if layer == 0:
            self._begin(forward, flow)
        # Behind the last layer there is nothing to widen, so nothing is tracked in it.
        last = layer == forward.model.shape.layers - 1
        return forward.dense(layer, flow) if last else self._watched(forward, layer, flow)

    def _begin(self, forward: Forward, flow: Flow) -> None:
        length = forward.length
        self._tracked.begin(forward.model.shape, len(self._step.due), length, flow.hidden)
        self._widening = Widening(self._step, flow, length)
        self._storing = Storing(self._step, flow.rows, length, apart=self._apart)
        window = self._step.window.columns.shape[1]
        sizes = CallSizes(
            shape=forward.model.shape,
            batch=len(flow.hidden),
            context=length,
            block_length=window,
            dtype=str(flow.hidden.dtype).removeprefix("torch."),
        )
        self._chunk = window_chunk(sizes, window=window, tracked=self._tracked.count)

    def _watched(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        """`Forward.dense`, with a look at the layer between the keys and the attention, and what comes out stored."""
        rows, hidden, widening = flow.rows, flow.hidden, self._widening
        complete, past = widening.settled and self._step.all_active, None
        if not widening.settled:  # the store still holds the keys of the step before
            tracked = self._tracked
            past = weights_of(forward, layer, tracked.queries(layer), tracked.columns(layer), forward.keys(layer))
        normed = forward.write(layer, rows, hidden)
        queries = None if normed is None else forward.queries(layer, rows, normed)
        del normed
        asked = LayerQueries(forward, layer, flow, widening.place, queries)
        moved, others = watch(asked, self._tracked, self._step, widening, past, self._threshold, self._chunk)
        del asked, past
        forward.attend(layer, rows, hidden, queries=queries)
        del queries
        forward.mlp(layer, hidden)
        self._storing.write(forward, layer + 1, flow, widening, complete=complete)
        return flow if moved is None else widening.widened(forward, layer + 1, flow, moved, others)


class Storing:
    """Stores what comes out of a layer as the next one's input, in pieces that each touch few columns.

    A store that streams its layers has to have every page between the first and the last column of a write. The rows of
    a step are a window and, far from it, a few tracked tokens: written at once they would bring in nearly the whole
    layer.

    Attributes:
        pieces: of the rows of the step, with the columns that each is within; None: the store has to find out.
    """

    def __init__(self, step: WindowRows, rows: Rows, length: int, *, apart: bool) -> None:
        """`rows`: as the step begins; `length`: columns of the canvas. `apart`: write every tracked token by itself, at
        the price of reading from the device once."""
        self._step, self._length = step, length
        self.pieces: list[tuple[slice, tuple[int, int] | None]] = [(slice(0, step.count), None)]
        if apart and not step.all_due:
            self.pieces = _pieces(step, rows)

    @spanned(Op.WRITE)
    def write(self, forward: Forward, layer: int, flow: Flow, widening: Widening, *, complete: bool) -> None:
        """Store `flow` as the input of `layer`; `complete`: it has every row of every sequence."""
        hidden, step = flow.hidden, self._step
        if complete:
            # Spans, of which nothing that was stored is needed any more.
            place = torch.cat([widening.place] * (len(hidden) // len(step.due)))
            for part in forward.parts(self._length, len(hidden)):
                chosen = place[:, part, None].expand(-1, -1, hidden.shape[2])
                rows = Rows.span(part.start, part.stop)
                forward.store.write(Feature.HIDDEN, layer, rows, hidden.gather(1, chosen)[:, None])
            return
        for piece, within in self.pieces:
            rows = replace(flow.rows[piece], within=within)
            forward.store.write(Feature.HIDDEN, layer, rows, hidden[:, None, piece])
        behind = flow.rows[step.count :]
        for part in forward.parts(behind.count, len(hidden)):
            values = hidden[:, None, step.count :][:, :, part]
            forward.store.write(Feature.HIDDEN, layer, replace(behind[part], within=(0, self._length)), values)


def _pieces(step: WindowRows, rows: Rows) -> list[tuple[slice, tuple[int, int] | None]]:
    """The rows near the window, and each tracked token, with the columns that they are within."""
    assert rows.index is not None and rows.valid is not None, "rows of a step are scattered"
    index, valid = rows.index[:, : step.count], rows.valid[:, : step.count]
    first = index.where(valid, torch.iinfo(index.dtype).max).amin(dim=0)
    last = index.where(valid, -1).amax(dim=0)
    ends = torch.stack([first, last]).tolist()
    groups = [slice(0, step.near), *(slice(row, row + 1) for row in range(step.near, step.count))]
    spans = [(min(ends[0][group]), max(ends[1][group]) + 1) for group in groups if group.start < group.stop]
    return list(zip((group for group in groups if group.start < group.stop), spans, strict=True))
