"""A pass of Elastic-Cache (arXiv 2510.14973): rows of a step, and all rows from the layer on where attention has moved.

In every layer but the last the attention of its tracked tokens is compared with that of the pass before. Where it has
moved, in one sequence or more, the pass widens: from the next layer up these sequences recompute every row, those that
the step has not come with from the hidden states that the last pass over them stored.
"""

from tiered.forward.costs import part_rows
from tiered.forward.forward import Flow, Forward, add_branch
from tiered.policies.elastic_cache.costs import window_chunk
from tiered.policies.elastic_cache.queries import LayerQueries, weights_of
from tiered.policies.elastic_cache.step_rows import StepRows
from tiered.policies.elastic_cache.storing import Storing
from tiered.policies.elastic_cache.tracked import Tracked
from tiered.policies.elastic_cache.watching import watch
from tiered.policies.elastic_cache.widening import Widening


class ElasticPass:
    """Layer program. With classifier-free guidance the halves that see their prompts decide for both."""

    def __init__(self, tracked: Tracked, step: StepRows, threshold: float, *, apart: bool) -> None:
        """`tracked`: as the last pass left it; `threshold`: similarity below which a sequence widens; `apart`: as in
        `Storing`."""
        self._tracked, self._step, self._threshold, self._apart = tracked, step, threshold, apart

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        if layer == 0:
            self._begin(forward, flow)
        # Behind the last layer there is nothing to widen, so nothing is tracked in it.
        return (
            forward.dense(layer, flow)
            if layer == forward.model.shape.layers - 1
            else self._watched(forward, layer, flow)
        )

    def _begin(self, forward: Forward, flow: Flow) -> None:
        self._length = length = forward.length
        self._tracked.begin(forward.model.shape, len(self._step.due), length, flow.hidden)
        self._widening = Widening(self._step, flow, length)
        self._storing = Storing(self._step, flow.rows, length, apart=self._apart)
        self._chunk = window_chunk(
            forward.model.shape,
            batch=len(flow.hidden),
            window=self._step.window.shape[1],
            tracked=self._tracked.count,
            context=length,
            dtype=str(flow.hidden.dtype).removeprefix("torch."),
        )

    def _watched(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        """`Forward.dense`, with a look at the layer between the keys and the attention, and what comes out stored."""
        rows, hidden, widening = flow.rows, flow.hidden, self._widening
        # Rows of a ragged batch can be more than the canvas has columns, which a part's room is booked for.
        parts = rows.parts(min(part_rows(len(hidden)), self._length))
        # The store still holds the keys of the pass before.
        complete = widening.settled and self._step.all_active
        past = None
        if not widening.settled:
            past = weights_of(forward, layer, self._tracked.queries(layer), self._tracked.columns(layer))
        queries = None
        for part in parts:
            normed = forward.model.attention_norm(layer, hidden[:, part])
            forward.write_keys_values(layer, rows[part], normed)
            queries = forward.queries(layer, rows, normed) if len(parts) == 1 else None
            del normed
        asked = LayerQueries(forward, layer, flow, widening.place, queries)
        seen = watch(asked, self._tracked, self._step, widening, past, self._threshold, self._chunk)
        del asked, past
        for part in parts:
            if queries is None:
                queries = forward.queries(layer, rows[part], forward.model.attention_norm(layer, hidden[:, part]))
            mixed = forward.attended(layer, rows[part], queries)
            add_branch(hidden, part, forward.model.attention_out(layer, mixed))
            del mixed
            queries = None
            add_branch(hidden, part, forward.model.feed_forward(layer, hidden[:, part]))
        self._storing.write(forward, layer + 1, flow, widening, complete=complete)
        return flow if seen.moved is None else widening.widened(forward, layer + 1, flow, seen.moved, seen.others)
