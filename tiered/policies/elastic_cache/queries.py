"""Queries of single tokens in a layer that a pass is in, from its own rows or from stored hidden states."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.policies.elastic_cache.attention import attention_weights


@dataclass(frozen=True, slots=True)
class LayerQueries:
    """With classifier-free guidance all of it is of the first half of the sequences, which see their prompts.

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
        """Of any columns, as the last pass over them had them."""
        rows, batch = Rows.at(columns.clamp_min(0)), len(columns)
        if self.layer == 0:
            assert self.forward.ids is not None, "a pass is under way"
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
    forward: Forward, layer: int, queries: Float[Tensor, "batch heads n head_dim"], columns: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch heads n length"]:
    """Attention weights of the rows at `columns`, with these queries, over the keys that the layer's store holds now;
    without meaning where there is no column."""
    return attention_weights(
        queries,
        forward.keys(layer)[: len(queries)],
        readable(forward, len(queries)),
        soft_cap=forward.model.shape.soft_cap,
        sink_keys=forward.model.sink_keys(layer),
        visible=forward.visible(columns),
    )
