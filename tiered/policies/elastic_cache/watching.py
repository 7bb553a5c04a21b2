"""What a layer's attention tells: whether that of its tracked tokens has moved, and which tokens to track next.

No map over all rows exists: what is asked of the window is a sum by column, made of a bounded part of it at a time.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.attention_weights import attention_weights, chunks
from tiered.forward.forward import Flow, Forward
from tiered.policies.elastic_cache.rows import Widening, WindowRows
from tiered.policies.elastic_cache.tracked import NONE, Tracked
from tiered.policies.elastic_cache.window_bytes import WindowChunk


@dataclass(frozen=True, slots=True)
class LayerQueries:
    """Queries of single tokens in a layer that a step is in, from its own rows or from stored hidden states. With
    classifier-free guidance all of it is of the first half of the sequences, which see their prompts.

    Attributes:
        flow: what goes into the layer.
        place: where each column stands in its rows; −1 where it does not.
        of_rows: queries of all rows, where they go in one part; None: they are projected where they are asked for.
    """

    forward: Forward
    layer: int
    flow: Flow
    place: Int[Tensor, "batch length"]
    of_rows: Float[Tensor, "sequences heads rows head_dim"] | None

    def at(self, columns: Int[Tensor, "batch n"]) -> Float[Tensor, "batch heads n head_dim"]:
        """Of columns that are among the rows; without meaning elsewhere."""
        batch = len(self.place)
        place = self.place.gather(1, columns.clamp_min(0)).clamp_min(0)
        if self.of_rows is None:
            hidden = self.flow.hidden[:batch]
            return self._projected(columns, hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2])))
        heads, head_dim = self.of_rows.shape[1], self.of_rows.shape[3]
        return self.of_rows[:batch].gather(2, place[:, None, :, None].expand(-1, heads, -1, head_dim))

    def stored(self, columns: Int[Tensor, "batch n"]) -> Float[Tensor, "batch heads n head_dim"]:
        """Of any columns, as the last step over them had them."""
        rows, batch = Rows.at(columns.clamp_min(0)), len(columns)
        if self.layer == 0:
            assert self.forward.ids is not None, "a step is under way"
            return self._projected(columns, self.forward.model.embed(rows.columns(self.forward.ids[:batch])))
        return self._projected(columns, rows.take(self.forward.store.view(Feature.HIDDEN, self.layer)[:batch])[:, 0])

    def _projected(self, columns: Tensor, hidden: Float[Tensor, "batch n width"]) -> Tensor:
        normed = self.forward.model.attention_norm(self.layer, hidden)
        return self.forward.queries(self.layer, Rows.at(columns.clamp_min(0)), normed)


def readable(forward: Forward, batch: int) -> Bool[Tensor, "batch length"] | None:
    """The key mask of the first `batch` sequences."""
    mask = forward.key_mask
    return None if mask is None else mask[:batch]


@spanned(Op.WATCH)
def weights_of(
    forward: Forward,
    layer: int,
    queries: Float[Tensor, "batch heads n head_dim"],
    columns: Int[Tensor, "batch n"],
    keys: Float[Tensor, "sequences kv_heads length head_dim"],
) -> Float[Tensor, "batch heads n length"]:
    """Attention weights of the rows at `columns`, with these queries, over all `keys` of the layer; without meaning
    where there is no column."""
    return attention_weights(
        queries,
        keys[: len(queries)],
        readable(forward, len(queries)),
        soft_cap=forward.model.shape.soft_cap,
        sink_keys=forward.model.sink_keys(layer),
        visible=forward.visible(columns),
        exact=False,
    )[0]


@spanned(Op.WATCH)
def watch(
    asked: LayerQueries,
    tracked: Tracked,
    step: WindowRows,
    widening: Widening,
    past: Float[Tensor, "batch heads tracked length"] | None,
    threshold: float,
    chunk: WindowChunk,
) -> tuple[Bool[Tensor, " batch"] | None, int]:
    """Compare the attention of the layer's tracked tokens, mark sequences where it has moved as full, and track those
    tokens that the window attends to most. Reads from the device once, unless `past` is None.

    Returns the sequences that widen from the next layer on (None: none does), and how many rows join each of them at
    most, where they are not there yet.

    Args:
        asked: queries in the layer, its keys written.
        tracked: as the last step left it.
        past: the attention of the tracked tokens as it was; None where all sequences recompute every row anyway.
        threshold: cosine similarity below which attention has moved.
        chunk: what of the window is summed up at a time.
    """
    forward, layer = asked.forward, asked.layer
    columns, keys = tracked.columns(layer), forward.keys(layer)
    moved = torch.zeros_like(widening.full)
    if past is not None:
        known = columns != NONE
        alike = similarity(past, weights_of(forward, layer, asked.at(columns), columns, keys)).where(known, 0.0)
        # Where nothing is tracked the mean is NaN, which is below no threshold.
        moved = step.active & ~widening.full & (alike.sum(dim=1) / known.sum(dim=1) < threshold)
    # The window is masked, so nothing is hidden from it.
    mass = attention_received(
        asked.at(step.window.columns),
        step.window.there,
        keys[: len(columns)],
        readable(forward, len(columns)),
        chunk,
        soft_cap=forward.model.shape.soft_cap,
        sink_keys=forward.model.sink_keys(layer),
    )
    most, chosen = mass.masked_fill_(~step.committed, -1.0).topk(columns.shape[1], dim=1)
    chosen = chosen.where(most >= 0, NONE)
    found = asked.at(chosen)
    widen, others = None, 0
    if past is not None:
        absent = (chosen != NONE) & (widening.place.gather(1, chosen.clamp_min(0)) < 0) & step.active[:, None]
        widening.full |= moved
        settled = (widening.full | ~step.active).all()
        read = torch.stack([moved.any(), absent.any(), settled, widening.others()]).tolist()
        widen, others, widening.settled = moved if read[0] else None, read[3], bool(read[2])
        if read[1]:
            found = found.where(~absent[:, None, :, None], asked.stored(chosen))
    tracked.put(layer, chosen, found, step.active)
    return widen, others


def attention_received(
    queries: Float[Tensor, "batch heads window head_dim"],
    counts: Bool[Tensor, "batch window"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    chunk: WindowChunk,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float32[Tensor, "batch length"]:
    """Sum over all heads and over the rows that count of the weight that each column gets; `chunk` goes at a time."""
    (batch, heads, window, _), kv_heads = queries.shape, keys.shape[1]
    at_once = {"sequences": chunk.sequences, "heads_at_once": chunk.key_heads * (heads // kv_heads)}
    received = queries.new_zeros(batch, keys.shape[2], dtype=torch.float32)
    for some, of_heads, of_keys, rows in chunks(batch, heads, kv_heads, window, rows_at_once=chunk.rows, **at_once):
        weights, _ = attention_weights(
            queries[some, of_heads, rows],
            keys[some, of_keys],
            None if key_mask is None else key_mask[some],
            soft_cap=soft_cap,
            sink_keys=None if sink_keys is None else sink_keys[of_heads],
            exact=False,
        )
        received[some] += weights.mul_(counts[some, None, rows, None]).sum(dim=(1, 2))
        del weights  # else the next chunk's would stand beside them
    return received


def similarity(
    past: Float32[Tensor, "batch heads rows length"], now: Float32[Tensor, "batch heads rows length"]
) -> Float32[Tensor, "batch rows"]:
    """Cosine of two sets of attention weights, over the keys, mean over the heads."""
    norms = torch.linalg.vector_norm(past, dim=-1).mul_(torch.linalg.vector_norm(now, dim=-1))
    return ((past * now).sum(dim=-1) / norms).mean(dim=1)
