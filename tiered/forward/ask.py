"""What calls want of a model next, and the layers that several of them go through together.

Norms, projections, the MLP and the head are of all rows at once, so each weight is read once for all calls. Attention
and the store are each call's own. On the CPU a row's result does not depend on the other rows: within `FEW_ROWS` the
library sums the products of a row in one order, however many rows there are. Calls with fewer or more rows go alone.
On CUDA libraries choose kernels by the number of rows, so the last bits of a row can differ; not measured on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span
from tiered.forward.flow import LayerProgram, add_branch
from tiered.forward.forward import Forward
from tiered.forward.sizes import CallShape
from tiered.models.base import head
from tiered.models.projection import FEW_ROWS
from tiered.models.rope import Rotary

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A forward that a call wants now: the arguments of `Forward.logits`, and over what."""

    forward: Forward
    ids: Int[Tensor, "sequences length"]
    rows: Rows
    output: slice
    program: LayerProgram | None = None
    clean: int | Int[Tensor, " batch"] = 0

    @property
    def count(self) -> int:
        """Rows of all sequences."""
        return len(self.ids) * self.rows.count

    @property
    def shareable(self) -> bool:
        """Whether it may go through the layers beside others'. Queries that are scaled by position go alone."""
        outputs = len(self.ids) * self.rows[self.output].count
        scaled = self.forward.rotary.query_scale is not None
        return self.program is None and not scaled and self.count in FEW_ROWS and outputs in FEW_ROWS

    def logits(self) -> Float[Tensor, "sequences output vocab"]:
        """What it asks for, of it alone."""
        if not self.rows[self.output].count:
            self.forward.write_rows(self.ids, self.rows, self.clean)
            return torch.empty(len(self.ids), 0, self.forward.model.shape.vocab_size, device=self.ids.device)
        return self.forward.logits(self.ids, self.rows, self.output, self.program, self.clean)


def shared_bytes(sizes: CallShape) -> int:
    """Of a call whose rows go beside others': the angles of these rows once more, and of the last layer's."""
    rows = min(FEW_ROWS[-1], sizes.sequences * sizes.context)
    return 2 * rows * sizes.shape.head_dim * _FLOAT32


def groups_of(asks: Sequence[Ask]) -> list[list[int]]:
    """The numbers of `asks`, which are shareable, in groups of no more than `FEW_ROWS`, in order."""
    groups: list[list[int]] = []
    room = 0
    for number, ask in enumerate(asks):
        if ask.count > room:
            groups.append([])
            room = FEW_ROWS[-1]
        groups[-1].append(number)
        room -= ask.count
    return groups


def logits_together(asks: Sequence[Ask]) -> list[Float[Tensor, "sequences output vocab"]]:
    """float32 logits for each of `asks`, which are shareable and of one model: to the bit those of `Ask.logits` on a
    CPU. What this takes is no more than what each of the calls has booked for itself, and `shared_bytes`."""
    if len(asks) == 1:
        return [asks[0].logits()]
    model = asks[0].forward.model
    for ask in asks:
        ask.forward.begin(ask.ids, ask.clean)
        ask.forward.rows_computed = ask.rows.count
    together = _Together(asks, [ask.rows for ask in asks])
    hidden = model.embed(torch.cat([ask.rows.columns(ask.ids).flatten() for ask in asks])[None])
    last = model.shape.layers - 1
    for layer in range(last + 1):
        asks[0].forward.enter(layer)
        with span(Op.LAYER, layer):
            normed = model.attention_norm(layer, hidden)
            together.store(layer, *model.keys_values(layer, normed, together.rotary))
            if layer == last:
                normed, hidden = together.chosen(normed), together.chosen(hidden)
                together = _Together(asks, [ask.rows[ask.output] for ask in asks])
            queries = together.heads(model.queries(layer, normed, together.rotary))
            del normed
            mixed = [
                ask.forward.mixed(layer, rows, own).flatten(0, 1)
                for ask, rows, own in zip(asks, together.rows, queries, strict=True)
            ]
            del queries
            every = slice(0, hidden.shape[1])
            add_branch(hidden, every, model.attention_out(layer, torch.cat(mixed)[None]))
            del mixed
            add_branch(hidden, every, model.feed_forward(layer, hidden))
    return together.apart(head(model, hidden))


class _Together:
    """Rows of several calls side by side, as one sequence."""

    def __init__(self, asks: Sequence[Ask], rows: Sequence[Rows]) -> None:
        self.rows = rows
        self._asks, self._batches = asks, [len(ask.ids) for ask in asks]
        self._counts = [batch * each.count for batch, each in zip(self._batches, rows, strict=True)]
        angles = [
            [each.take(part).expand(batch, -1, -1, -1).flatten(0, 2) for part in (whole.cos, whole.sin)]
            for whole, each, batch in zip((ask.forward.rotary for ask in asks), rows, self._batches, strict=True)
        ]
        cos, sin = (torch.cat(parts)[None, None] for parts in zip(*angles, strict=True))
        self.rotary = Rotary(cos, sin)

    def store(
        self,
        layer: int,
        keys: Float[Tensor, "1 kv_heads all head_dim"],
        values: Float[Tensor, "1 kv_heads all head_dim"],
    ) -> None:
        """Store each call's in its own store."""
        for ask, rows, *own in zip(self._asks, self.rows, self.heads(keys), self.heads(values), strict=True):
            ask.forward.store_keys_values(layer, rows, *own)

    def heads(
        self, projected: Float[Tensor, "1 heads all head_dim"]
    ) -> list[Float[Tensor, "batch heads rows head_dim"]]:
        """Each call's, as views."""
        return [
            part.unflatten(1, (batch, -1)).transpose(0, 1)
            for part, batch in zip(projected[0].split(self._counts, dim=1), self._batches, strict=True)
        ]

    def apart(self, logits: Float[Tensor, "1 all vocab"]) -> list[Float[Tensor, "batch rows vocab"]]:
        """Each call's, as views."""
        return [
            part.unflatten(0, (batch, -1))
            for part, batch in zip(logits[0].split(self._counts), self._batches, strict=True)
        ]

    def chosen(self, hidden: Float[Tensor, "1 all width"]) -> Float[Tensor, "1 outputs width"]:
        """Those of the output rows."""
        if all(ask.rows[ask.output].count == ask.rows.count for ask in self._asks):
            return hidden
        parts = zip(hidden[0].split(self._counts), self._asks, self._batches, strict=True)
        return torch.cat([part.unflatten(0, (batch, -1))[:, ask.output].flatten(0, 1) for part, ask, batch in parts])[
            None
        ]
