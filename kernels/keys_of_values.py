"""Keys that are their values times a weight, rotated: of layers that keep only values."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows, Columns, KeyValue


@dataclass(frozen=True, slots=True)
class KeysOfValues:
    """Keys with the interface of a tensor of keys: its shape, slices, and their values. A key is made where it is read,
    in float32 from the value as it is stored; a stored key is rounded to the dtype of the model instead. A kernel with
    16-bit queries rounds elements that turn, and queries times the weights of the others, to their dtype.

    Attributes:
        stored: values of the columns, coded or not.
        weight: factor of each element of a head.
        cos, sin: of the angles of every column: of the pairs of elements i and i + half that turn, the first ones. One
            table for all sequences, or one for each.
    """

    stored: KeyValue
    weight: Float[Tensor, " head_dim"]
    cos: Float32[Tensor, "tables 1 length pairs"]
    sin: Float32[Tensor, "tables 1 length pairs"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> "KeysOfValues":
        """The keys of some sequences and heads, and of some columns or all."""
        sequences, _, columns = (*part, slice(None))[:3]
        tables = sequences if len(self.cos) > 1 else slice(None)
        cos, sin = (table[tables, :, columns] for table in (self.cos, self.sin))
        return replace(self, stored=self.stored[part], cos=cos, sin=sin)

    def values(self) -> Float32[Tensor, "batch kv_heads length head_dim"]:
        stored, weight, pairs = self.stored, self.weight.float(), self.cos.shape[-1]
        if isinstance(stored, CodedRows):
            keys = replace(stored, dtype=torch.float32).values().mul_(weight)
        else:
            keys = stored * weight
        # As kernels/rotate_ref.py rounds, but in place: temporaries are no larger than the keys.
        left, right = (half[..., :pairs] for half in keys.chunk(2, dim=-1))
        before = left.clone()
        left.mul_(self.cos).sub_(right * self.sin)
        right.mul_(self.cos).add_(before.mul_(self.sin))
        return keys

    def are_of(self, values: KeyValue) -> bool:
        """Whether they are made of these values, and not of a copy."""
        one, other = (rows.bytes if isinstance(rows, CodedRows) else rows for rows in (self.stored, values))
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


# What queries are multiplied with: keys as they are stored, or as they are made of values.
Keys = Columns | CodedRows | KeysOfValues
