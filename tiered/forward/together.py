"""Passes of several calls that go through the layers together.

Norms, projections, the MLP and the head take all rows at once, so calls share one read of each weight. Each call has a
store of its own. Kernels write and read all stores by a table of addresses, in as many launches as for one call. On the
CPU a row's result does not depend on the other rows in the batch. There the library sums the products of a row in one
order, for the row counts in `ONE_ORDER`, which names a condition. Calls with other row counts go alone. On CUDA the
fewest rows, such as a block of four, gain most from sharing a read. There libraries choose kernels by the number of
rows, so the last bits of a row can differ; not measured on a GPU.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.buffers import FLOAT32, INT64
from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span
from tiered.forward.forward import AskedPass, Forward, Logits, add_branch
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import Heads
from tiered.kernels.projection import FEW_ROWS, ONE_ORDER
from tiered.kernels.store_rows_ref import store_rows
from tiered.kernels.store_table import OwnRows, StoreTable, table_numbers
from tiered.models.base import DiffusionModel, head
from tiered.models.logit_tiles import LogitTiles
from tiered.models.rope import Rotary
from tiered.models.router import picked_experts


def shareable(forward: Forward, pass_: Pass) -> bool:
    """Whether a pass may be batched with other passes."""
    if forward.model.shape.conditioned:
        return False
    outputs = pass_.outputs
    if forward.model.shape.tiles_logits(outputs):
        return False
    few = ONE_ORDER if pass_.ids.is_cpu else range(1, FEW_ROWS.stop)
    return pass_.program is None and not pass_.reads and pass_.count in few and (not outputs or outputs in few)


def shared_bytes(sizes: CallShape) -> int:
    """Bytes of a call that is batched with others: a copy of its rows' angles, and of the last layer's, and its part of
    two tables of stores."""
    rows = min(FEW_ROWS[-1], sizes.sequences * sizes.context)
    table = table_numbers(sizes.sequences, rows, sizes.shape.layers)
    return 2 * (rows * sizes.shape.head_dim * FLOAT32 + table * INT64)


def groups_of(passes: Sequence[Pass]) -> list[list[int]]:
    """Indices of the shareable `passes` in groups of at most `FEW_ROWS` rows, in order."""
    groups: list[list[int]] = []
    room = 0
    for number, pass_ in enumerate(passes):
        if pass_.count > room:
            groups.append([])
            room = FEW_ROWS[-1]
        groups[-1].append(number)
        room -= pass_.count
    return groups


def logits_together(asked: Sequence[AskedPass]) -> Sequence[Logits | LogitTiles]:
    """`Forward.answer` of each pass; several are all shareable and of one model. On a CPU they equal those of
    `Forward.logits` bit for bit. Memory stays within the bookings of all calls and `shared_bytes`."""
    if len(asked) == 1:
        return [forward.answer(pass_) for forward, pass_ in asked]
    batch = Batch(asked)
    return batch.apart(batch.logits())


class Batch:
    """Passes of several calls that go through the layers as one.

    With tables of addresses, `logits` reads of the calls only `inputs`. So its operations are those of any other batch
    with as many rows of each call whose stores have as many columns, rounded up (`bucket` of attention_splits.py). A
    recorded batch, such as a CUDA graph, serves all of these: it takes their inputs in place of its own.
    """

    def __init__(self, asked: Sequence[AskedPass]) -> None:
        for forward, pass_ in asked:
            forward.begin(pass_)
            forward.rows_computed = pass_.rows.count
        self._asked, self._model = asked, asked[0][0].model
        self._slices = [pass_.output for _, pass_ in asked]
        outputs = [pass_.rows[pass_.output] for _, pass_ in asked]
        self._rows = self._outputs = _BatchRows(asked, [pass_.rows for _, pass_ in asked], by_table=True)
        self._drops = any(few.count < pass_.rows.count for few, (_, pass_) in zip(outputs, asked, strict=True))
        if (watched := any(forward.watched for forward, _ in asked)) or self._drops:
            self._outputs = _BatchRows(asked, outputs, by_table=not watched)
        self._ids = torch.cat([pass_.rows.columns(pass_.ids).flatten() for _, pass_ in asked])[None]

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors on the device that differ between batches."""
        return [self._ids, *self._rows.inputs, *(self._outputs.inputs if self._drops else [])]

    def logits(self) -> Float[Tensor, "1 all vocab"]:
        """float32 logits of all output rows."""
        model, rows, branch = self._model, self._rows, None
        hidden, last = model.embed(self._ids), model.shape.layers - 1
        for layer in range(last + 1):
            self._asked[0][0].enter(layer)
            with span(Op.LAYER, layer):
                normed = model.attention_norm(layer, hidden, branch)
                branch = None
                with span(Op.QKV):
                    found = None if layer == last else model.queries_keys_values(layer, normed, rows.rotary)
                    queries, keys, values = found or (None, *model.keys_values(layer, normed, rows.rotary))
                rows.store(layer, keys, values)
                del found, keys, values
                if layer == last:
                    normed, hidden, rows = self._chosen(normed), self._chosen(hidden), self._outputs
                if queries is None:
                    with span(Op.QKV):
                        queries = model.queries(layer, normed, rows.rotary)
                del normed
                if not queries.numel():  # the last layer of passes without logits is for their keys and values
                    break
                mixed = rows.attended(model, layer, queries)
                del queries
                normed = model.mlp_norm(layer, hidden, model.attention_out(layer, mixed))
                del mixed
                branch = model.feed_forward(layer, hidden, rows.note_picks, normed)
                del normed
                if layer == last:
                    add_branch(hidden, slice(None), branch)
        return head(model, hidden)

    def apart(self, logits: Float[Tensor, "1 all vocab"]) -> list[Float[Tensor, "batch rows vocab"]]:
        """Views of each call's logits."""
        return self._outputs.apart(logits)

    def _chosen(self, hidden: Float[Tensor, "1 all width"]) -> Float[Tensor, "1 outputs width"]:
        """The rows whose logits are computed."""
        if not self._drops:
            return hidden
        parts = zip(self._rows.apart(hidden), self._slices, strict=True)
        return torch.cat([part[:, output].flatten(0, 1) for part, output in parts])[None]


class _BatchRows:
    """Rows of several calls, concatenated into one sequence."""

    def __init__(self, asked: Sequence[AskedPass], rows: Sequence[Rows], *, by_table: bool) -> None:
        """`by_table`: one launch may store all rows, and one compute their attention."""
        self._table = store_table(asked, rows) if by_table else None
        self._asked, self._each, self._batches = asked, rows, [len(pass_.ids) for _, pass_ in asked]
        self._counts = [batch * each.count for batch, each in zip(self._batches, rows, strict=True)]
        rotaries = [forward.rotary[0] for forward, _ in asked]
        angles = [
            [each.take(part).expand(batch, -1, -1, -1).flatten(0, 2) for part in _parts(whole)]
            for whole, each, batch in zip(rotaries, rows, self._batches, strict=True)
        ]
        cos, sin, *scale = (torch.cat(parts)[None, None] for parts in zip(*angles, strict=True))
        self.rotary = Rotary(cos, sin, query_scale=scale[0] if scale else None)

    @property
    def inputs(self) -> list[Tensor]:
        """Angles, and addresses if there is a table."""
        return _parts(self.rotary) + ([] if self._table is None else [self._table.sequences, self._table.rows])

    def store(
        self,
        layer: int,
        keys: Float[Tensor, "1 kv_heads all head_dim"],
        values: Float[Tensor, "1 kv_heads all head_dim"],
    ) -> None:
        """Write the keys and values of each call to its own store."""
        if (table := self._table) is not None:
            with span(Op.WRITE):
                for_device(store_rows, keys.device)(table.coded(keys), table.coded(values), table, layer)
            return
        for (forward, _), rows, *own in zip(
            self._asked, self._each, self._heads(keys), self._heads(values), strict=True
        ):
            forward.store_keys_values(layer, rows, *own)

    def attended(
        self, model: DiffusionModel, layer: int, queries: Float[Tensor, "1 heads all head_dim"]
    ) -> Float[Tensor, "1 all heads_width"]:
        """Attention of each call's rows over its own store, heads concatenated."""
        if self._table is not None:
            with span(Op.ATTENTION):
                return model.attend_apart(layer, queries, self._table)
        calls = zip(self._asked, self._each, self._heads(queries), strict=True)
        mixed = [forward.attended(layer, rows, own).flatten(0, 1) for (forward, _), rows, own in calls if rows.count]
        return torch.cat(mixed)[None]

    def note_picks(self, layer: int, experts: Int[Tensor, "all picked"], picked: list[int]) -> None:
        """Record the experts of each call's rows in its forward."""
        for (forward, _), own in zip(self._asked, experts.split(self._counts), strict=True):
            forward.note_picks(layer, own, picked_experts(own))

    def apart(self, rows: Float[Tensor, "1 all width"]) -> list[Float[Tensor, "batch rows width"]]:
        """Views of each call's rows."""
        return [
            part.unflatten(0, (batch, each.count))
            for part, batch, each in zip(rows[0].split(self._counts), self._batches, self._each, strict=True)
        ]

    def _heads(self, projected: Float[Tensor, "1 heads all head_dim"]) -> list[Heads]:
        """Views of each call's heads."""
        return [
            part.unflatten(1, (batch, rows.count)).transpose(0, 1)
            for part, batch, rows in zip(
                projected[0].split(self._counts, dim=1), self._batches, self._each, strict=True
            )
        ]


def store_table(asked: Sequence[AskedPass], rows: Sequence[Rows]) -> StoreTable | None:
    """The addresses at which the calls store `rows`, and the columns that these read. None without kernels, and for a
    call whose columns only the device knows, whose store is not all on the device, or whose rows a probe counts."""
    if for_device(store_rows, rows[0].index.device) is store_rows:
        return None
    calls, first = list[OwnRows](), asked[0][0]
    for (forward, pass_), own in zip(asked, rows, strict=True):
        keys, values = (forward.store.memory(feature) for feature in (Feature.KEY, Feature.VALUE))
        reads = forward.limits.on_host(own) if own.count and own.valid is None else None
        if forward.rows_probe is not None or keys is None or values is None or keys.stride() != values.stride():
            return None
        if not own.count:
            continue
        if reads is None:
            return None
        calls.append(OwnRows(keys[:, : len(pass_.ids)], values[:, : len(pass_.ids)], own.within, reads))
    return StoreTable.of(calls, first.store.code, first.model.shape.head_dim) if calls else None


def _parts(rotary: Rotary) -> list[Tensor]:
    return [each for each in (rotary.cos, rotary.sin, rotary.query_scale) if each is not None]
