"""One step over some rows: the only path through the layers, whatever the policy.

Within a layer the rows go in parts, three times over: keys and values to the store (`write`), attention to the whole
store (`attend`), and the MLP (`mlp`); branches are added to the residual stream in place. So a full refresh of a long
canvas takes one hidden state of it and the temporaries of one part, and no N×N tensor exists.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.modes import safe_point
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span, spanned
from tiered.forward.feature_store import FeatureStore
from tiered.forward.flow import (
    AttentionProbe,
    Between,
    BranchKeeper,
    Flow,
    LayerProgram,
    LayerWeights,
    RowsProbe,
    add_branch,
)
from tiered.forward.forward_bytes import part_rows
from tiered.forward.forward_work import RowFlops
from tiered.forward.sight import Clean, Sight
from tiered.models.base import DiffusionModel, head
from tiered.models.rope import Rotary


class Forward:
    """The layers of `model` over one call's store.

    Attributes:
        length: columns of the canvas.
        tiers: records of hidden states; None if the policy keeps none.
        ids: what the step under way reads.
        sight: what rows see of the columns.
        most_rows: rows of a sequence that a forward of the call has room for; all of them, unless the call sets it.
        clean: columns in front of which tokens are final, of all sequences or of each. In a family with a noise mask
            they see each other alone; where contexts are causal, each sees those in front of it alone.
        rows_computed: rows of each sequence that went through a layer in the last step, on average over layers.
        attention_probe: called with the inputs of the last layer's attention; None for no call.
        rows_probe: called in every layer with the rows whose keys and values are computed; None for no call.
        between: called after each piece of a layer with its share of a row's work; what it runs must use another store.
            None for no call.

    `dense` is the layer of a plain step. A policy's layer program may call its pieces over other rows.
    """

    def __init__(
        self,
        model: DiffusionModel,
        store: FeatureStore,
        positions: Int[Tensor, "batch length"],
        key_mask: Bool[Tensor, "batch length"] | None = None,
        tiers: Any = None,
        first: Int[Tensor, " batch"] | None = None,
        sight: Sight | None = None,
        weights: LayerWeights | None = None,
    ) -> None:
        """
        Args:
            positions: RoPE position of every column; one row if all sequences share them.
            key_mask: False at columns that no row may attend to; None for no such column.
            tiers: the `TierManager` of a policy that keeps hidden states; the forward only hands it on.
            first: columns in front of which `key_mask` is False, if it is False nowhere else.
            sight: what rows see; None for the whole canvas.
            weights: what brings the weights of each layer; None if all are on the device.
        """
        self.model = model
        self.store = store
        self.length = positions.shape[1]
        self.sight = sight or Sight(model.shape, self.length)
        self.most_rows = self.length
        self.tiers = tiers
        self.ids: Int[Tensor, "batch length"] | None = None
        self.clean: Clean = 0
        self.rows_computed = 0.0
        self._weights, self._layer = weights, 0
        self._rotary = model.rotary(positions)
        self._key_mask, self._first = None if key_mask is None else key_mask[:, None, None, :], first
        self._sequences: int | None = None  # that the step under way goes over, the first ones; None: all
        self.attention_probe: AttentionProbe | None = None
        self.rows_probe: RowsProbe | None = None
        self.between: Between | None = None
        self._flops = RowFlops.of(model.shape, self.length)

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences alone (ascending)."""
        self._sequences = None
        self.store.keep(sequences)
        self._key_mask = None if self._key_mask is None else self._key_mask[sequences]
        self._first = None if self._first is None else self._first[sequences]
        self._rotary = self._rotary.of_sequences(sequences)

    def logits(
        self,
        ids: Int[Tensor, "batch length"],
        rows: Rows,
        output: slice,
        program: LayerProgram | None = None,
        clean: Clean = 0,
    ) -> Float[Tensor, "batch output vocab"]:
        """float32 logits of `rows[output]` after all layers, NaN at rows without a finite norm. A layer is `program`;
        None for `dense`. A step over the first sequences leaves the cache of the others as it is."""
        flow = self._through(ids, rows, output, program, clean)
        return head(self.model, flow.hidden[:, flow.output])

    def write_rows(self, ids: Int[Tensor, "batch length"], rows: Rows, clean: Clean = 0) -> None:
        """Keys and values of `rows` in all layers; no row has logits."""
        self._through(ids, rows, slice(0, 0), None, clean)

    def _through(
        self, ids: Int[Tensor, "batch length"], rows: Rows, output: slice, program: LayerProgram | None, clean: Clean
    ) -> Flow:
        self.begin(ids, clean)
        flow = Flow(rows, self.model.embed(rows.columns(ids)), output)
        layers, computed = self.model.shape.layers, 0
        for layer in range(layers):
            entered = flow.rows.count
            self.enter(layer)
            with span(Op.LAYER, layer):
                flow = program(self, layer, flow) if program else self.dense(layer, flow)
            computed += entered if flow.computed is None else flow.computed
        self.rows_computed = computed / layers
        return flow

    def begin(self, ids: Int[Tensor, "batch length"], clean: Clean = 0) -> None:
        self.ids, self.clean, self._sequences = ids, clean, len(ids)
        self.store.narrow(len(ids))

    def enter(self, layer: int) -> None:
        """Make the weights of `layer` usable, and of no other layer. Raises `RecordLostError` or `TransferError` for a
        copy between the tiers that failed."""
        safe_point()
        self._layer = layer
        if self._weights is not None:
            self._weights.enter(layer)

    def dense(self, layer: int, flow: Flow) -> Flow:
        """A plain layer: write keys and values of all rows, then attention and MLP of all rows (in the last layer, of
        the output rows)."""
        rows, hidden, output = flow.rows, flow.hidden, flow.output
        normed = self.write(layer, rows, hidden)
        if layer == self.model.shape.layers - 1:
            normed = None if normed is None else normed[:, output]
            rows, hidden, output = rows[output], hidden[:, output], slice(0, rows[output].count)
        self.attend(layer, rows, hidden, normed=normed)
        del normed  # not held while the MLP runs: it is as large as the residual stream of the part
        self.mlp(layer, hidden)
        return Flow(rows, hidden, output)

    def write(
        self, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"] | None:
        """Store keys and values of `rows`, whose residual stream is `hidden`. Returns their norm where they are one
        part: `attend` can use it. Of several parts, computing it again is cheaper than keeping them all."""
        parts, normed = self.parts(rows.count, len(hidden)), None
        for part in parts:
            normed = self.model.attention_norm(layer, hidden[:, part])
            self.write_keys_values(layer, rows[part], normed)
            self._passed(part, len(hidden), self._flops.write)
        return normed if len(parts) == 1 else None

    def attend(
        self,
        layer: int,
        rows: Rows,
        hidden: Float[Tensor, "batch rows width"],
        *,
        normed: Float[Tensor, "batch rows width"] | None = None,
        queries: Float[Tensor, "batch heads rows head_dim"] | None = None,
        keep: BranchKeeper | None = None,
    ) -> None:
        """Add the attention branch of `rows` to `hidden`, in place, and show it to `keep`.

        `normed`, `queries`: of all rows, where they are at hand."""
        for part in self.parts(rows.count, len(hidden)):
            if queries is None:
                of_part = self.model.attention_norm(layer, hidden[:, part]) if normed is None else normed[:, part]
                branch = self.attention(layer, rows[part], of_part)
                del of_part
            else:
                mixed = self.attended(layer, rows[part], queries[:, :, part])
                branch = self.model.attention_out(layer, mixed)
                del mixed
            if keep is not None:
                keep(Feature.ATTN_OUT, part, branch)
            add_branch(hidden, part, branch)
            del branch  # not held while the next part's is made
            self._passed(part, len(hidden), self._flops.attend)

    def mlp(self, layer: int, hidden: Float[Tensor, "batch rows width"], *, keep: BranchKeeper | None = None) -> None:
        """Add the branch of the MLP to `hidden`, in place, and show it to `keep`."""
        for part in self.parts(hidden.shape[1], len(hidden)):
            branch = self.model.feed_forward(layer, hidden[:, part])
            if keep is not None:
                keep(Feature.FFN_OUT, part, branch)
            add_branch(hidden, part, branch)
            del branch
            self._passed(part, len(hidden), self._flops.mlp)

    def _passed(self, part: slice, batch: int, flops: int) -> None:
        safe_point()
        if self.between is not None:
            self.between((part.stop - part.start) * batch * flops / self._flops.layer)
            self.enter(self._layer)  # others may have entered theirs

    def parts(self, rows: int, batch: int) -> list[slice]:
        """Slices of `rows` rows of each of `batch` sequences that pass a layer at a time."""
        return Rows.span(0, rows).parts(min(part_rows(batch), self.length))

    @spanned(Op.QKV)
    def write_keys_values(self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]) -> None:
        """Project `normed` to keys and values, and store them at `rows`."""
        self.store_keys_values(layer, rows, *self.model.keys_values(layer, normed, self.rotary.at(rows)))

    def store_keys_values(
        self,
        layer: int,
        rows: Rows,
        keys: Float[Tensor, "batch kv_heads rows head_dim"],
        values: Float[Tensor, "batch kv_heads rows head_dim"],
    ) -> None:
        """Store `keys`, rotated, and `values` at `rows`."""
        if self.rows_probe is not None:
            self.rows_probe(rows, len(keys))
        self.store.write(Feature.KEY, layer, rows, keys)
        self.store.write(Feature.VALUE, layer, rows, values)

    def attention(
        self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        """`ATTN_OUT` of `rows` over everything that the layer's store holds."""
        return self.model.attention_out(layer, self.mixed(layer, rows, self.queries(layer, rows, normed)))

    def mixed(
        self, layer: int, rows: Rows, queries: Float[Tensor, "batch heads rows head_dim"]
    ) -> Float[Tensor, "batch rows heads_width"]:
        """`attended`, which the probe sees in the last layer."""
        if self.attention_probe is not None and layer == self.model.shape.layers - 1:
            self.attention_probe(rows, queries, self.keys(layer), self._mask)
        return self.attended(layer, rows, queries)

    @spanned(Op.ATTENTION)
    def attended(
        self, layer: int, rows: Rows, queries: Float[Tensor, "batch heads rows head_dim"]
    ) -> Float[Tensor, "batch rows heads_width"]:
        """What the `queries` of `rows` find in the layer's store, heads concatenated. With a noise mask final rows find
        final ones alone."""
        keys, values = self.store.stored(Feature.KEY, layer), self.store.stored(Feature.VALUE, layer)
        mask, batch = self._mask, len(queries)
        first = None if self._first is None else self._first[: self._sequences]
        window = self.model.shape.window(layer)
        mixed = []
        for part in self.sight.of_rows(rows, self.clean, window):
            visible = since = None
            if part.by_row:
                columns = rows[part.rows].positions(batch, queries.device)
                visible, since = self.sight.limits(columns, self.clean, window)
            some, begin = slice(part.start, part.stop), first
            if part.start:
                visible, since, begin = (None if at is None else at - part.start for at in (visible, since, first))
            front = None if mask is None else mask[..., some]
            stored = queries[:, :, part.rows], keys[:, :, some], values[:, :, some]
            mixed.append(self.model.attend(layer, *stored, front, visible, begin, since))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)

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
        """False at columns that no row may attend to; None for no such column."""
        return None if self._mask is None else self._mask[:, 0, 0]

    @property
    def rotary(self) -> Rotary:
        """RoPE angles of every column; one row where all sequences share them."""
        count = self._sequences
        return self._rotary if count is None else self._rotary.of_sequences(slice(count))

    @property
    def _mask(self) -> Bool[Tensor, "batch 1 1 length"] | None:
        return None if self._key_mask is None else self._key_mask[: self._sequences]
