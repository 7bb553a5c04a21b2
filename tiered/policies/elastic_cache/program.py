"""A step of Elastic-Cache (arXiv 2510.14973) over its own rows, and over all rows from the layer in which attention
moved.

Every layer except the last compares the attention of its tracked tokens with that of the last step. If it has moved in
a sequence, the step widens: that sequence recomputes every row from the next layer up. Rows new to the step begin with
stored hidden states.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.core.buffers import dtype_name
from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.attention_received import attention_received
from tiered.forward.attention_weights import attention_exponentials
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.kernels.host_values import AsyncRead
from tiered.policies.elastic_cache.rows import NONE, Tracked, Widening, WindowRows
from tiered.policies.elastic_cache.window_bytes import window_chunk


class ElasticStep:
    """Layer program of a step. With classifier-free guidance, the conditional half decides for both."""

    def __init__(self, tracked: Tracked, step: WindowRows, threshold: float, *, apart: bool) -> None:
        """`threshold`: similarity below which a sequence widens. `apart`: see `Storing`."""
        self._tracked, self._step, self._threshold, self._apart = tracked, step, threshold, apart

    def __call__(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        if layer == 0:
            self._begin(forward, pass_)
        last = layer == forward.model.shape.layers - 1
        return forward.dense(layer, pass_) if last else self._watched(forward, layer, pass_)

    def _begin(self, forward: Forward, pass_: Pass) -> None:
        length, window, shape = forward.length, self._step.window.shape[1], forward.model.shape
        self._tracked.begin(shape, len(self._step.due), length, pass_.hidden)
        self._widening, self._masked = Widening(self._step, pass_, length), ~self._step.committed
        self._storing = Storing(self._step, pass_.rows, length, apart=self._apart)
        dtype = dtype_name(pass_.hidden.dtype)
        sizes = CallShape(shape=shape, batch=len(pass_.hidden), context=length, block_length=window, dtype=dtype)
        self._chunk = window_chunk(sizes, window=window, tracked=self._tracked.count)

    def _watched(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        rows, hidden, widening = pass_.rows, pass_.hidden, self._widening
        complete, past = widening.settled and self._step.all_active, None
        if not widening.settled:  # the store still holds the last step's keys
            tracked = self._tracked
            past = weights_of(forward, layer, tracked.queries(layer), tracked.columns(layer), forward.keys(layer))
        normed, queries = forward.write(layer, rows, hidden, asks=True)
        if queries is None and normed is not None:
            queries = forward.queries(layer, rows, normed)
        del normed
        watched = self._watch(LayerQueries(forward, layer, pass_, widening.place, queries), past)
        del past
        forward.attend(layer, rows, hidden, queries=queries, waits=True)
        del queries
        forward.mlp(layer, hidden)
        # In front of the write: a streamed store has few slots, and this may read inputs of the layer itself.
        moved, others = (None, 0) if watched is None else self._decided(watched)
        self._storing.write(forward, layer + 1, pass_, widening, complete=complete)
        return pass_ if moved is None else widening.widened(forward, layer + 1, pass_, moved, others)

    @spanned(Op.WATCH)
    def _watch(
        self, asked: "LayerQueries", past: Float[Tensor, "batch heads tracked length"] | None
    ) -> "Watched | None":
        """Compare the attention of the layer's tracked tokens, and mark sequences whose attention has moved as full.
        Then track the tokens that the window attends to most.

        Args:
            asked: queries in the layer, after its keys were written.
            past: attention of the tracked tokens in the last step; None if all sequences recompute every row. Then
                nothing is compared.
        """
        forward, layer = asked.forward, asked.layer
        tracked, step, widening = self._tracked, self._step, self._widening
        columns, keys = tracked.columns(layer), forward.keys(layer)
        moved = None
        if past is not None:
            known, now = columns != NONE, weights_of(forward, layer, asked.at(columns.clamp_min(0)), columns, keys)
            alike = similarity(past, now).where(known, 0.0)
            del now
            # Without tracked tokens the mean is NaN, which is not below the threshold.
            moved = widening.narrow & (alike.sum(dim=1) / known.sum(dim=1) < self._threshold)
        # A noise mask hides no column from the window, which is masked.
        mass = attention_received(
            asked.at(step.window),
            step.in_window,
            keys[: len(columns)],
            forward.limits.of(slice(len(columns))).key_mask,
            self._chunk,
            soft_cap=forward.model.shape.soft_cap,
            sink_keys=forward.model.sink_keys(layer),
        )
        most, chosen = mass.masked_fill_(self._masked, -1.0).topk(columns.shape[1], dim=1)
        held, found = most >= 0, asked.at(chosen)
        tracked.put(layer, chosen.where(held, NONE), found, step.active[:, None])
        if moved is None:
            return None
        absent = held & (widening.place.gather(1, chosen) < 0) & step.active[:, None]
        widening.widen(moved)
        read = torch.stack([moved.any(), absent.any(), widening.narrow.any(), widening.others()])
        return Watched(replace(asked, of_rows=None), moved, chosen, absent, AsyncRead(read))

    @spanned(Op.WATCH)
    def _decided(self, watched: "Watched") -> tuple[Bool[Tensor, " batch"] | None, int]:
        """Sequences that widen from the next layer on, None for no sequence; and the most rows that join one of them.
        Reads from the device once."""
        any_moved, any_absent, any_narrow, others = watched.read.tolist()
        asked, widening = watched.asked, self._widening
        widening.settled = not any_narrow
        if any_absent:
            self._tracked.put_queries(asked.layer, asked.stored(watched.chosen), watched.absent)
        return watched.moved if any_moved else None, others


@dataclass(frozen=True, slots=True)
class Watched:
    """The result of a layer's watch.

    Attributes:
        asked: queries in the layer; only stored ones.
        moved: sequences that widen from the next layer on.
        chosen: columns of the tokens that are tracked.
        absent: tokens among them without a row in the step; their queries are the stored ones.
        read: whether any sequence moved, any token is absent, and any sequence is narrow still; and the most rows that
            join a sequence. It goes to the host while attention and MLP are computed.
    """

    asked: "LayerQueries"
    moved: Bool[Tensor, " batch"]
    chosen: Int[Tensor, "batch tracked"]
    absent: Bool[Tensor, "batch tracked"]
    read: AsyncRead


class Storing:
    """Stores a layer's output as the next layer's input, in pieces that each touch few columns.

    A streamed store fetches every chunk between the first and the last column of a write. A step's rows are a window
    and a few tracked tokens far from it, so a single write would fetch nearly the whole layer.
    """

    def __init__(self, step: WindowRows, rows: Rows, length: int, *, apart: bool) -> None:
        """`rows`: rows at the step's beginning. `apart`: write every tracked token by itself, which needs one device
        read."""
        self._step, self._length = step, length
        self._ends = AsyncRead(_ends(rows[slice(step.count)])) if apart and not step.all_due else None

    @cached_property
    def pieces(self) -> list[tuple[slice, range]]:
        """Parts of the step's rows, each with its range of columns; an empty range if the store must find it."""
        step = self._step
        if self._ends is None:
            return [(slice(0, step.count), range(0))]
        ends = self._ends.tolist()
        groups = [slice(0, step.near), *(slice(row, row + 1) for row in range(step.near, step.count))]
        groups = [group for group in groups if group.start < group.stop]
        return [(group, range(min(ends[0][group]), max(ends[1][group]) + 1)) for group in groups]

    @spanned(Op.WRITE)
    def write(self, forward: Forward, layer: int, pass_: Pass, widening: Widening, *, complete: bool) -> None:
        """Store `pass_` as the input of `layer`. `complete`: whether it has every row of every sequence."""
        hidden, step = pass_.hidden, self._step
        if complete:
            # Written as spans, because no stored row is needed any more.
            place = torch.cat([widening.place] * (len(hidden) // len(step.due)))
            for part in forward.parts(self._length, len(hidden)):
                chosen = place[:, part, None].expand(-1, -1, hidden.shape[2])
                forward.store.write(Feature.HIDDEN, layer, forward.rows[part], hidden.gather(1, chosen)[:, None])
            return
        for piece, within in self.pieces:
            rows = replace(pass_.rows[piece], within=within)
            forward.store.write(Feature.HIDDEN, layer, rows, hidden[:, None, piece])
        behind = pass_.rows[step.count :]
        for part in forward.parts(behind.count, len(hidden)):
            values = hidden[:, None, step.count :][:, :, part]
            forward.store.write(Feature.HIDDEN, layer, replace(behind[part], within=range(self._length)), values)


def _ends(rows: Rows) -> Int[Tensor, "2 rows"]:
    """The first and the last column of each row, among the sequences in which it is valid."""
    first = rows.index.where(rows.flags, torch.iinfo(rows.index.dtype).max).amin(dim=0)
    return torch.stack([first, rows.index.where(rows.flags, -1).amax(dim=0)])


@dataclass(frozen=True, slots=True)
class LayerQueries:
    """Queries of single tokens in a layer, from the step's rows or from stored hidden states. With classifier-free
    guidance, they are of the conditional half.

    Attributes:
        pass_: input of the layer.
        place: number of each column's row; −1 for no row.
        of_rows: queries of all rows; None if there are several parts, to project single rows on demand.
    """

    forward: Forward
    layer: int
    pass_: Pass
    place: Int[Tensor, "batch length"]
    of_rows: Float[Tensor, "sequences heads rows head_dim"] | None

    def at(self, columns: Int[Tensor, "batch n"]) -> Float[Tensor, "batch heads n head_dim"]:
        """Queries of columns that have a row; undefined for other columns."""
        batch = len(self.place)
        place = self.place.gather(1, columns).clamp_min(0)
        if self.of_rows is None:
            hidden = self.pass_.hidden[:batch]
            return self._projected(columns, hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2])))
        heads, head_dim = self.of_rows.shape[1], self.of_rows.shape[3]
        return self.of_rows[:batch].gather(2, place[:, None, :, None].expand(-1, heads, -1, head_dim))

    def stored(self, columns: Int[Tensor, "batch n"]) -> Float[Tensor, "batch heads n head_dim"]:
        """Queries of any columns, from the last step that computed them."""
        rows, batch = Rows.at(columns), len(columns)
        if self.layer == 0:
            return self._projected(columns, self.forward.model.embed(rows.columns(self.pass_.ids[:batch])))
        return self._projected(columns, rows.take(self.forward.store.view(Feature.HIDDEN, self.layer)[:batch])[:, 0])

    def _projected(self, columns: Tensor, hidden: Float[Tensor, "batch n width"]) -> Tensor:
        normed = self.forward.model.attention_norm(self.layer, hidden)
        return self.forward.queries(self.layer, Rows.at(columns), normed)


@spanned(Op.WATCH)
def weights_of(
    forward: Forward,
    layer: int,
    queries: Float[Tensor, "batch heads n head_dim"],
    columns: Int[Tensor, "batch n"],
    keys: Float[Tensor, "sequences kv_heads length head_dim"],
) -> Float[Tensor, "batch heads n length"]:
    """Attention weights of the rows at `columns`, with these queries, over all `keys` of the layer; undefined for
    `NONE`. They are not divided by their sum with the sinks, because `similarity` is the same for all multiples."""
    return attention_exponentials(
        queries,
        keys[: len(queries)],
        forward.limits.of(slice(len(queries))).key_mask,
        soft_cap=forward.model.shape.soft_cap,
        stop=forward.limits.stop(columns),
        exact=False,
    )[0]


def similarity(
    past: Float32[Tensor, "batch heads rows length"], now: Float32[Tensor, "batch heads rows length"]
) -> Float32[Tensor, "batch rows"]:
    """Cosine similarity of two sets of attention weights, or of multiples of them, over the keys; mean over heads."""
    norms = torch.linalg.vector_norm(past, dim=-1).mul_(torch.linalg.vector_norm(now, dim=-1))
    return ((past * now).sum(dim=-1) / norms).mean(dim=1)
