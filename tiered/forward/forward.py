"""One forward pass over the rows of a step: the only path through the layers, whatever the policy.

A pass goes over all rows layer by layer and, within a layer, twice over parts of the rows: first keys and values go to
the store, then each part attends to the whole store and adds its branches to the residual stream in place. So a full
refresh of a long canvas takes one hidden state of it and the temporaries of one part, and no N×N tensor exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span, spanned
from tiered.forward.costs import part_rows
from tiered.forward.feature_store import FeatureStore
from tiered.models.base import DiffusionModel
from tiered.models.rope import Rotary

if TYPE_CHECKING:
    from tiered.tiers.manager import TierManager


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes from layer to layer.

    Attributes:
        rows: the positions of `hidden`.
        hidden: the residual stream of these rows; a layer may update it in place.
        output: the rows, by their place in `rows`, whose logits the step needs. A layer may drop all others once
            nothing reads them, so the last layer asks no query for them.
        computed: rows that the layer before has recomputed, where it passed others on as they were cached; None: all.
    """

    rows: Rows
    hidden: Float[Tensor, "batch rows width"]
    output: slice
    computed: int | None = None


LayerProgram = Callable[["Forward", int, Flow], Flow]
# Called with rows, their queries, the layer's keys, and the key mask, False at keys that nobody may read.
AttentionProbe = Callable[[Rows, Tensor, Tensor, Tensor | None], None]
# Called with rows, and of how many sequences, the first ones.
RowsProbe = Callable[[Rows, int], None]


@spanned(Op.RESIDUAL)
def add_branch(
    hidden: Float[Tensor, "batch rows width"], part: slice, branch: Float[Tensor, "batch part width"]
) -> None:
    """Add a branch of the rows in `part` to the residual stream, in place."""
    hidden[:, part].add_(branch)


class Forward:
    """The layers of `model` over one call's store.

    Attributes:
        length: columns of the canvas.
        tiers: records of hidden states; None where the policy keeps none.
        ids: what the pass under way reads.
        clean: columns in front of which tokens are final, of all sequences or of each. In a family with a noise mask
            they see each other alone.
        rows_computed: rows of each sequence that went through a layer in the last pass, on average over layers.
        attention_probe: sees what the last layer's attention is made of, whenever rows go through it; None: nobody.
        rows_probe: hears, in every layer, whose keys and values are computed anew; None: nobody.

    `dense` is the layer of a plain pass. It is built from the pieces below it, which a policy's own layer program may
    call as well, in another order or over other rows.
    """

    def __init__(
        self,
        model: DiffusionModel,
        store: FeatureStore,
        positions: Int[Tensor, "batch length"],
        key_mask: Bool[Tensor, "batch length"] | None = None,
        tiers: "TierManager | None" = None,
    ) -> None:
        """`positions`: RoPE position of every column (one row where all sequences share them); `key_mask`: False at
        columns that no row may attend to; `tiers`: where a policy that keeps hidden states has them."""
        self.model = model
        self.store = store
        self.length = positions.shape[1]
        self.tiers = tiers
        self.ids: Int[Tensor, "batch length"] | None = None
        self.clean: int | Int[Tensor, " batch"] = 0
        self.rows_computed = 0.0
        self._rotary = model.rotary(positions)
        self._key_mask = None if key_mask is None else key_mask[:, None, None, :]
        self._sequences: int | None = None  # that the pass under way goes over, the first ones; None: all
        self.attention_probe: AttentionProbe | None = None
        self.rows_probe: RowsProbe | None = None

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences alone (ascending)."""
        self._sequences = None
        self.store.keep(sequences)
        self._key_mask = None if self._key_mask is None else self._key_mask[sequences]
        if len(self._rotary.cos) > 1:
            self._rotary = Rotary(self._rotary.cos[sequences], self._rotary.sin[sequences])

    def logits(
        self,
        ids: Int[Tensor, "batch length"],
        rows: Rows,
        output: slice,
        program: LayerProgram | None = None,
        clean: int | Int[Tensor, " batch"] = 0,
    ) -> Float[Tensor, "batch output vocab"]:
        """float32 logits of `rows[output]` after all layers, NaN where a row has no finite norm; every layer goes
        through `program` (None: `dense`). A pass over the first sequences alone leaves the others' cache as it is.
        `clean`: see the attribute."""
        self.ids, self.clean = ids, clean
        self._sequences = len(ids)
        self.store.narrow(len(ids))
        flow = Flow(rows, self.model.embed(rows.columns(ids)), output)
        layers, computed = self.model.shape.layers, 0
        for layer in range(layers):
            entered = flow.rows.count
            with span(Op.LAYER, layer):
                flow = program(self, layer, flow) if program else self.dense(layer, flow)
            computed += entered if flow.computed is None else flow.computed
        self.rows_computed = computed / layers
        hidden = flow.hidden[:, flow.output]
        # The last norm would make zeros of a row whose own norm float32 cannot hold, and its logits would be equal: a
        # token like any other. Such a row is NaN from here on; to all others this adds 0.
        hidden.add_(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32).mul_(0))
        return self.model.logits(hidden)

    def dense(self, layer: int, flow: Flow) -> Flow:
        """A plain layer: write keys and values of all rows, then attention and MLP of all rows (in the last layer, of
        the output rows)."""
        rows, hidden, output = flow.rows, flow.hidden, flow.output
        parts = rows.parts(part_rows(len(hidden)))
        normed = None
        for part in parts:
            normed = self.model.attention_norm(layer, hidden[:, part])
            self.write_keys_values(layer, rows[part], normed)
        if layer == self.model.shape.layers - 1:
            normed = normed[:, output] if len(parts) == 1 and normed is not None else None
            rows, hidden = rows[output], hidden[:, output]
            output = slice(0, rows.count)
            parts = rows.parts(part_rows(len(hidden)))
        for part in parts:
            # One part: its norm is still at hand. Several: computing it again is cheaper than keeping them all.
            if len(parts) > 1 or normed is None:
                normed = self.model.attention_norm(layer, hidden[:, part])
            add_branch(hidden, part, self.attention(layer, rows[part], normed))
            normed = None  # not held while the MLP runs: it is as large as the residual stream of the part
            add_branch(hidden, part, self.model.feed_forward(layer, hidden[:, part]))
        return Flow(rows, hidden, output)

    @spanned(Op.QKV)
    def write_keys_values(self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]) -> None:
        """Project `normed` (see `DiffusionModel.attention_norm`) to keys and values, and store them at `rows`."""
        if self.rows_probe is not None:
            self.rows_probe(rows, len(normed))
        keys, values = self.model.keys_values(layer, normed, self.rotary.at(rows))
        self.store.write(Feature.KEY, layer, rows, keys)
        self.store.write(Feature.VALUE, layer, rows, values)

    def attention(
        self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        """`ATTN_OUT` of `rows` over everything that the layer's store holds."""
        queries = self.queries(layer, rows, normed)
        if self.attention_probe is not None and layer == self.model.shape.layers - 1:
            self.attention_probe(rows, queries, self.keys(layer), self._mask)
        return self.model.attention_out(layer, self.attended(layer, rows, queries))

    @spanned(Op.ATTENTION)
    def attended(
        self, layer: int, rows: Rows, queries: Float[Tensor, "batch heads rows head_dim"]
    ) -> Float[Tensor, "batch rows heads_width"]:
        """What the `queries` of `rows` find in the layer's store, heads concatenated. With a noise mask final rows find
        final ones alone."""
        keys, values, mask = self.keys(layer), self.store.view(Feature.VALUE, layer), self._mask
        clean = self.clean if self.model.shape.noise_masked else 0
        if isinstance(clean, Tensor) or rows.start is None:
            return self.model.attend(layer, queries, keys, values, mask, self._visible(rows, clean, len(queries)))
        # A span falls into rows in front of the border and behind it, which need no mask of their own.
        cut = min(max(clean - rows.start, 0), rows.count)
        parts = []
        if cut:
            front = None if mask is None else mask[..., :clean]
            parts.append(self.model.attend(layer, queries[:, :, :cut], keys[:, :, :clean], values[:, :, :clean], front))
        if cut < rows.count:
            parts.append(self.model.attend(layer, queries[:, :, cut:], keys, values, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _visible(self, rows: Rows, clean: int | Int[Tensor, " batch"], batch: int) -> Int[Tensor, "batch rows"] | None:
        """How many columns each row sees; None: all of them."""
        if isinstance(clean, int) and (not clean or (rows.within is not None and rows.within[0] >= clean)):
            return None
        return self.visible(rows.positions(batch, self._rotary.cos.device))

    def visible(self, columns: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"] | None:
        """How many columns, from the first on, the rows at `columns` of the first sequences see; None: all of them."""
        clean = self.clean if self.model.shape.noise_masked else 0
        if isinstance(clean, int) and not clean:
            return None
        clean = clean[: len(columns), None] if isinstance(clean, Tensor) else columns.new_full((1, 1), clean)
        return clean.where(columns < clean, self.length)

    @spanned(Op.QKV)
    def queries(
        self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        """Queries of `normed` as they are at `rows`."""
        return self.model.queries(layer, normed, self.rotary.at(rows))

    def keys(self, layer: int) -> Float[Tensor, "batch kv_heads length head_dim"]:
        """All keys that the layer's store holds; a view."""
        return self.store.view(Feature.KEY, layer)

    @property
    def key_mask(self) -> Bool[Tensor, "batch length"] | None:
        """False at columns that no row may attend to; None where there are none."""
        return None if self._mask is None else self._mask[:, 0, 0]

    @property
    def rotary(self) -> Rotary:
        """RoPE angles of every column; one row where all sequences share them."""
        rotary, count = self._rotary, self._sequences
        return rotary if count is None or count >= len(rotary.cos) else Rotary(rotary.cos[:count], rotary.sin[:count])

    @property
    def _mask(self) -> Bool[Tensor, "batch 1 1 length"] | None:
        return None if self._key_mask is None else self._key_mask[: self._sequences]
