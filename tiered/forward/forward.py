"""One pass through the layers: the only path through them, for every policy.

Within a layer the rows go in parts, three times: `write` stores keys and values, `attend` adds attention over the whole
store, and `mlp` adds the MLP. Branches are added to the residual stream in place. In plain layers the branch of rows
that are one part waits for the norm that reads their sum, which adds it. So a full refresh of a long canvas takes one
hidden state of the canvas and the temporaries of one part. No N×N tensor exists.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.modes import safe_point
from tiered.core.ops import Op
from tiered.core.rows import Rows, parts_of
from tiered.core.spans import span, spanned
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward_bytes import part_rows
from tiered.forward.forward_work import RowFlops
from tiered.forward.parts import CanvasLimits, Part
from tiered.forward.passes import AttentionProbe, AttentionWatch, Between, BranchKeeper, Pass, RowsProbe
from tiered.forward.streamed_weights import StreamedWeights
from tiered.kernels.coded_rows import KeyValue
from tiered.kernels.keys_of_values import Keys
from tiered.models.attention import heads_joined, merged
from tiered.models.base import DiffusionModel, RouterProbe, head
from tiered.models.logit_tiles import LogitTiles
from tiered.models.rope import Rotary
from tiered.tiers.stored_rows import StoredRows

Logits = Float[Tensor, "sequences output vocab"]
# The normed rows of a layer, and their queries.
Written = tuple[Float[Tensor, "batch rows width"] | None, Float[Tensor, "batch heads rows head_dim"] | None]


class Forward:
    """The layers of `model` over the store of one call.

    Attributes:
        length: columns of the canvas.
        rows: all columns.
        stored: rows of hidden states; None if the policy stores none.
        ids: tokens of the current pass.
        limits: columns of the canvas that rows of the pass read.
        reads: parts of keys and values that they read beside the canvas.
        rotary: RoPE angles of every column, of heads and of global heads; one row if all sequences share them.
        most_rows: rows of a sequence that a forward of the call has room for; all, unless the call sets it.
        rows_computed: rows of each sequence that went through a layer in the last step, on average over layers.
        attention_probe: called with the inputs of the last layer's attention; None for no call.
        rows_probe: called in every layer with the rows whose keys and values are computed; None for no call.
        router_probe: called in every layer with a mixture. It gets the experts of some rows, on the host, and each of
            these experts once. None for no call.
        experts_picked: experts of a layer that the last step picked, on average over layers with a mixture.
        between: called after each piece of a layer with its share of a row's work. The callee must not use this
            forward's store. None for no call.
    `dense` is the layer of a plain step. A policy's layer program may call its pieces over other rows.
    """

    def __init__(
        self,
        model: DiffusionModel,
        store: FeatureStore,
        positions: Int[Tensor, "batch length"],
        limits: CanvasLimits | None = None,
        weights: StreamedWeights | None = None,
    ) -> None:
        """
        Args:
            positions: RoPE position of every column; one row if all sequences share them.
            limits: columns that rows of all sequences read; None for the whole canvas.
            weights: fetches the weights of each layer; None if all are on the device.
        """
        self.model = model
        self.store = store
        self.length = self.most_rows = positions.shape[1]
        self.rows = Rows.span(0, self.length, positions.device)
        self.stored: StoredRows | None = None
        self.limits = self._limits = limits or CanvasLimits(model.shape, self.length)
        self.ids = positions[:0]
        self.reads: tuple[Part, ...] = ()
        self.rotary = self._rotary = [
            model.rotary(positions, bool(number)) for number in range(len(model.shape.head_dims))
        ]
        self.rows_computed = 0.0
        self._weights, self._layer = weights, 0
        self.attention_probe: AttentionProbe | None = None
        self._watch: AttentionWatch | None = None
        self.rows_probe: RowsProbe | None = None
        self.router_probe: RouterProbe | None = None
        self._picked: dict[int, set[int]] = {}
        self._waiting: Tensor | None = None  # a branch that is not yet in the residual stream
        self.between: Between | None = None
        self._flops = RowFlops.of(model.shape, self.length)

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences (ascending)."""
        self.store.keep(sequences)
        self.limits = self._limits = self._limits.of(sequences)
        self.rotary = self._rotary = [each.of_sequences(sequences) for each in self._rotary]

    def answer(self, pass_: Pass) -> "Logits | LogitTiles":
        """`logits`, or tiles of them if there are many."""
        tiled = pass_.guided is None and self.model.shape.tiles_logits(pass_.outputs)
        return LogitTiles.of(self.model, self.output(pass_)) if tiled else self.logits(pass_)

    def logits(self, pass_: Pass) -> Logits:
        """float32 logits of the output rows, NaN at rows without a finite norm."""
        hidden = self.output(pass_)
        if not hidden.shape[1]:
            return torch.empty(len(hidden), 0, self.model.shape.vocab_size, device=hidden.device)
        return head(self.model, hidden)

    def output(self, pass_: Pass) -> Float[Tensor, "sequences output width"]:
        """The last layer's output. A pass over the first sequences leaves the cache of the others unchanged."""
        self.begin(pass_)
        pass_ = replace(pass_, hidden=self.embedded(pass_))
        layers, computed = self.model.shape.layers, 0
        for layer in range(layers):
            entered = pass_.rows.count
            self.enter(layer)
            with span(Op.LAYER, layer):
                pass_ = pass_.program(self, layer, pass_) if pass_.program else self.dense(layer, pass_, waits=True)
            computed += entered if pass_.computed is None else pass_.computed
        self.rows_computed = computed / layers
        return pass_.hidden[:, pass_.output]

    def embedded(self, pass_: Pass) -> Float[Tensor, "sequences rows width"]:
        """The residual stream of a pass in front of the first layer."""
        hidden, rows, output = self.model.embed(pass_.rows.columns(pass_.ids)), pass_.rows, pass_.output
        if not self.model.shape.conditioned or (final := self.final_rows(rows)) is True:
            return hidden
        if isinstance(final, Tensor) and not (rows.is_span and isinstance(pass_.final, int)):
            return hidden.where(final, self.model.condition(hidden, None))
        first = max(0, pass_.final - rows.within.start)
        predicted = range(max(first, output.start), output.stop)  # of the others the step before computed no logits
        for some in (range(first, predicted.start), predicted, range(output.stop, rows.count)):
            for part in self.parts(len(some), len(hidden)):
                at = slice(some.start + part.start, some.start + part.stop)
                soft = None
                if some is predicted and pass_.soft is not None:
                    soft = pass_.soft[:, at.start - output.start : at.stop - output.start]
                hidden[:, at] = self.model.condition(hidden[:, at], soft)
        return hidden

    def final_rows(self, rows: Rows) -> bool | Bool[Tensor, "batch rows 1"]:
        """Whether tokens at `rows` are final: of all of them, if the host knows, or of each."""
        border = self.limits.final
        if isinstance(border, int):
            if rows.within and not rows.within.start < border < rows.within.stop:
                return rows.within.start < border
            return (rows.index < border)[..., None]
        return (rows.index < border[:, None])[..., None]

    def begin(self, pass_: Pass) -> None:
        """Set what rows read in `pass_`, whose sequences are the first ones."""
        sequences = slice(len(pass_.ids))
        self.ids, self.limits, self.reads = pass_.ids, self._limits.of(sequences, pass_.final), pass_.reads
        self.rotary = [each.of_sequences(sequences) for each in self._rotary]
        self._watch = pass_.watch
        self.store.narrow(len(pass_.ids))
        if self.model.shape.windows and pass_.rows.is_span:
            self.store.move_windows(pass_.rows)
        self._picked.clear()
        self._waiting = None

    @property
    def watched(self) -> bool:
        """Whether the last layer's attention has to call a probe or a watch."""
        return self.attention_probe is not None or self._watch is not None

    @property
    def experts_picked(self) -> float:
        return sum(map(len, self._picked.values())) / max(1, len(self._picked))

    def note_picks(self, layer: int, experts: Int[Tensor, "rows picked"], picked: list[int]) -> None:
        """Record that rows of the pass go to these `experts` of `layer`. `picked`: each of them once."""
        self._picked.setdefault(layer, set()).update(picked)
        if self.router_probe is not None:
            self.router_probe(layer, experts, picked)

    def enter(self, layer: int) -> None:
        """Make the weights of `layer` usable, and of no other layer. Raises `TransferError` if a copy between tiers
        failed."""
        safe_point()
        self._layer = layer
        if self._weights is not None:
            self._weights.enter(layer)

    def dense(self, layer: int, pass_: Pass, *, waits: bool = False) -> Pass:
        """A plain layer: write keys and values of all rows, then attention and MLP of all rows. In the last layer
        attention and MLP are of the output rows only. `waits`: whether a plain layer follows, unless this is the last;
        its norm may add the MLP branch."""
        last, output = layer == self.model.shape.layers - 1, pass_.output
        normed, queries = self.write(layer, pass_.rows, pass_.hidden, asks=not last)
        if last:
            normed, rows = None if normed is None else normed[:, output], pass_.rows[output]
            pass_ = replace(pass_, rows=rows, hidden=pass_.hidden[:, output], output=slice(0, rows.count))
        self.attend(layer, pass_.rows, pass_.hidden, normed=normed, queries=queries, waits=True)
        del normed, queries  # freed before the MLP: each is as large as the part's residual stream
        self.mlp(layer, pass_.hidden, waits=waits and not last and not self.model.shape.conditioned)
        if self.model.shape.conditioned and pass_.rows.count:
            self.model.scale_layer(layer, pass_.hidden, self.final_rows(pass_.rows))
        return pass_

    def write(
        self, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"], *, asks: bool = False
    ) -> Written:
        """Store keys and values of `rows`, whose residual stream is `hidden`. Returns the normed rows for `attend`, and
        their queries, if it `asks` and one product gives them with the keys; both None if the rows are several parts.
        Then recomputing the norm is cheaper than keeping it."""
        parts = self.parts(rows.count, hidden.shape[0])
        if len(parts) == 1:
            written = self._written(layer, rows, hidden, asks=asks)
            self._passed(parts[0], hidden, self._flops.write)
            return written
        for part in parts:
            self.write_keys_values(layer, rows[part], hidden[:, part])
            self._passed(part, hidden, self._flops.write)
        return None, None

    def attend(
        self,
        layer: int,
        rows: Rows,
        hidden: Float[Tensor, "batch rows width"],
        *,
        normed: Float[Tensor, "batch rows width"] | None = None,
        queries: Float[Tensor, "batch heads rows head_dim"] | None = None,
        keep: BranchKeeper | None = None,
        waits: bool = False,
    ) -> None:
        """Add the attention branch of `rows` to `hidden`, in place, and pass it to `keep`.

        `normed`, `queries`: of all rows, if already computed. `waits`: whether `mlp` of the same rows follows; its norm
        may add the branch."""
        for part in self.parts(rows.count, hidden.shape[0]):
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
            self._add(hidden, part, branch, waits)
            del branch  # freed before the next part's is computed
            self._passed(part, hidden, self._flops.attend)

    def mlp(
        self,
        layer: int,
        hidden: Float[Tensor, "batch rows width"],
        *,
        keep: BranchKeeper | None = None,
        waits: bool = False,
    ) -> None:
        """Add the MLP branch to `hidden`, in place, and pass it to `keep`. `waits`: as in `dense`."""
        for part in self.parts(hidden.shape[1], hidden.shape[0]):
            normed = self.model.mlp_norm(layer, hidden[:, part], self._taken())
            branch = self.model.feed_forward(layer, hidden[:, part], self.note_picks, normed)
            del normed
            if keep is not None:
                keep(Feature.FFN_OUT, part, branch)
            self._add(hidden, part, branch, waits)
            del branch
            self._passed(part, hidden, self._flops.mlp)

    def _add(
        self,
        hidden: Float[Tensor, "batch rows width"],
        part: slice,
        branch: Float[Tensor, "batch part width"],
        waits: bool,
    ) -> None:
        """Add a branch to `hidden`, in place. If it `waits` and is of all rows, the next norm adds it."""
        if waits and branch.shape[1] == hidden.shape[1]:
            self._waiting = branch
        else:
            add_branch(hidden, part, branch)

    def _taken(self) -> Float[Tensor, "batch rows width"] | None:
        """The branch that waits, which nothing else holds."""
        branch, self._waiting = self._waiting, None
        return branch

    def _passed(self, part: slice, hidden: Float[Tensor, "batch rows width"], flops: int) -> None:
        safe_point()
        if self.between is not None:
            self.between((part.stop - part.start) * len(hidden) * flops / self._flops.layer)
            self.enter(self._layer)  # `between` may have entered another layer

    def parts(self, rows: int, batch: int) -> list[slice]:
        """Slices of a sequence's `rows` that pass a layer at a time, if `batch` sequences go together."""
        return parts_of(rows, min(part_rows(batch), self.length))

    def write_keys_values(
        self, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        """Store keys and values of `rows`, whose residual stream is `hidden`. Returns the normed rows."""
        return self._written(layer, rows, hidden, asks=False)[0]

    def _written(
        self, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"], *, asks: bool
    ) -> tuple[Float[Tensor, "batch rows width"], Float[Tensor, "batch heads rows head_dim"] | None]:
        """As `write`, of rows that are one part."""
        normed = self.model.attention_norm(layer, hidden, self._taken())
        with span(Op.QKV):
            if self.model.shape.is_global(layer):
                self.store_keys_values(layer, rows, None, self.model.values(layer, normed))
                return normed, None
            rotary = self.rotary_at(layer, rows)
            found = self.model.queries_keys_values(layer, normed, rotary) if asks else None
            queries, keys, values = found or (None, *self.model.keys_values(layer, normed, rotary))
            del found
            self.store_keys_values(layer, rows, keys, values)
        return normed, queries

    def store_keys_values(
        self,
        layer: int,
        rows: Rows,
        keys: Float[Tensor, "batch kv_heads rows head_dim"] | None,
        values: Float[Tensor, "batch kv_heads rows head_dim"],
    ) -> None:
        """Store rotated `keys`, and `values`, at `rows`. `keys`: None if they are made of values."""
        if self.rows_probe is not None:
            self.rows_probe(rows, len(values))
        if keys is not None:
            self.store.write(Feature.KEY, layer, rows, keys)
        self.store.write(Feature.VALUE, layer, rows, values)

    def attention(
        self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        """`ATTN_OUT` of `rows` over all keys and values in the layer's store."""
        mixed = self.attended(layer, rows, self.queries(layer, rows, normed))
        return self.model.attention_out(layer, mixed)

    @spanned(Op.ATTENTION)
    def attended(
        self, layer: int, rows: Rows, queries: Float[Tensor, "batch heads rows head_dim"]
    ) -> Float[Tensor, "batch rows heads_width"]:
        """Attention of `rows`, heads concatenated, over the canvas in the layer's store and all other parts of the
        pass. In the last layer the probe and the watch get its inputs."""
        if layer == self.model.shape.layers - 1:
            if self.attention_probe is not None:
                self.attention_probe(rows, queries, self.keys(layer), self.limits.key_mask)
            if self._watch is not None:
                self._watch(self, rows, queries)
        keys, values = self.stored_keys_values(layer)
        kept, window = self.store.kept(layer), self.model.shape.window(layer)
        of_canvas = replace(rows, is_span=False) if self.reads else rows  # merging parts takes all rows at once
        groups = [
            (queries[:, :, some], keys[:, :, columns], values[:, :, columns], limits)
            for some, columns, limits in self.limits.of_rows(of_canvas, queries.shape[0], window, kept)
        ]
        if self.reads:
            own = self.model.attend_part(layer, *groups[0], sinks=True)
            others = (found for part in self.reads for found in part.attend(self.model, layer, rows, queries))
            return heads_joined(merged(own, others).to(queries.dtype))
        mixed = [self.model.attend(layer, *group) for group in groups]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)

    @spanned(Op.QKV)
    def queries(
        self, layer: int, rows: Rows, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        """Queries of `normed`, rotated at `rows`."""
        return self.model.queries(layer, normed, self.rotary_at(layer, rows))

    def rotary_at(self, layer: int, rows: Rows) -> Rotary:
        """RoPE angles of `rows` in `layer`."""
        return self.rotary[self.model.shape.is_global(layer)].at(rows)

    def stored_keys_values(self, layer: int) -> tuple[Keys, KeyValue]:
        """All keys and values in the layer's store. Keys that are made of values exist where they are read."""
        if self.model.shape.is_global(layer):
            values = self.store.stored(Feature.VALUE, layer)
            return self.model.keys_of_values(layer, values, self.rotary[True]), values
        return self.store.stored(Feature.KEY, layer), self.store.stored(Feature.VALUE, layer)

    def keys(self, layer: int) -> Float[Tensor, "batch kv_heads length head_dim"]:
        """All keys of the layer, as values."""
        if not self.model.shape.is_global(layer):
            return self.store.view(Feature.KEY, layer)
        keys, _ = self.stored_keys_values(layer)
        return keys if isinstance(keys, Tensor) else keys.values()


@spanned(Op.RESIDUAL)
def add_branch(
    hidden: Float[Tensor, "batch rows width"], part: slice, branch: Float[Tensor, "batch part width"]
) -> None:
    """Add a branch of the rows in `part` to the residual stream, in place."""
    hidden[:, part].add_(branch)


# A pass, and the layers that it goes through.
AskedPass = tuple[Forward, Pass]
