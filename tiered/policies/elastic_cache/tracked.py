"""The tokens whose attention tells how stale a layer is: the most attended ones, with their queries of the last step.

Kept are queries, not attention rows: with the keys that the cache still holds when a step comes to a layer, a query
gives the attention of the last step again. It takes `head_dim` numbers a head, and a row one for each column.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.models.shape import ModelShape

NONE = -1  # a column where fewer tokens are committed than tracked


class Tracked:
    """Columns and queries of the tracked tokens, by layer and sequence. The last layer tracks none: no layer is behind
    it that its drift could call for."""

    def __init__(self, count: int) -> None:
        """`count`: tokens of each layer and sequence."""
        self._count = count
        self._columns: Int[Tensor, "layers batch tracked"] | None = None
        self._queries: Float[Tensor, "layers batch heads tracked head_dim"] | None = None

    def begin(self, shape: ModelShape, batch: int, length: int, like: Tensor) -> None:
        """Make room before the first step; `like` has dtype and device of the queries."""
        if self._columns is None:
            layers, count = shape.layers - 1, min(self._count, length)
            self._columns = torch.full((layers, batch, count), NONE, device=like.device)
            self._queries = like.new_zeros(layers, batch, shape.heads, count, shape.head_dim)

    @property
    def count(self) -> int:
        """Tokens of each layer and sequence: as asked for, or all columns where the canvas has no more."""
        return self.columns(0).shape[1]

    def columns(self, layer: int) -> Int[Tensor, "batch tracked"]:
        """Columns of the tokens of `layer`; `NONE` where there are not that many."""
        assert self._columns is not None, "a step begins with `begin`"
        return self._columns[layer]

    def queries(self, layer: int) -> Float[Tensor, "batch heads tracked head_dim"]:
        """Their queries as the last step had them."""
        assert self._queries is not None, "a step begins with `begin`"
        return self._queries[layer]

    def put(
        self,
        layer: int,
        columns: Int[Tensor, "batch tracked"],
        queries: Float[Tensor, "batch heads tracked head_dim"],
        here: Bool[Tensor, " batch"],
    ) -> None:
        """Track other tokens in `layer`, in the sequences that are `here`."""
        assert self._columns is not None and self._queries is not None, "a step begins with `begin`"
        self._columns[layer] = columns.where(here[:, None], self._columns[layer])
        self._queries[layer] = queries.where(here[:, None, None, None], self._queries[layer])

    def mask(self, committed: Bool[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
        """True at the tokens that any layer tracks; `committed` gives the shape."""
        batch, length = committed.shape
        mask = committed.new_zeros(batch, length + 1)
        if self._columns is not None:
            columns = self._columns.transpose(0, 1).flatten(1)
            mask.scatter_(1, columns.where(columns != NONE, length), True)
        return mask[:, :length]

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences alone (ascending)."""
        if self._columns is not None and self._queries is not None:
            self._columns, self._queries = self._columns[:, sequences], self._queries[:, sequences]
