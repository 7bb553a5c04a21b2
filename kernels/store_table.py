"""Keys and values of several calls, each in memory of its own, for kernels that serve all calls in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows, KeyValue
from tiered.kernels.host_values import on_device
from tiered.kernels.launch import VECTOR
from tiered.kernels.row_code import WORD, RowCode

SEQUENCE_FIELDS, ROW_FIELDS = 5, 4

# Stored rows of all layers, of coded ones their bytes, in elements of the model's dtype.
Memory = Float[Tensor, "layers batch kv_heads length stored"]
# Rows as they are stored; of coded ones their bytes, as words, because copies of floats may change the bits of NaN.
Stored = Shaped[Tensor, "1 kv_heads all stored"]


def table_numbers(sequences: int, rows: int, layers: int) -> int:
    """Numbers of a table."""
    return SEQUENCE_FIELDS * layers * sequences + ROW_FIELDS * rows


class OwnRows(NamedTuple):
    """Rows of one call, and the memory that they are stored in.

    Attributes:
        keys, values: memory of equal shape and strides.
        columns: columns of the rows, of every sequence of the call.
        reads: the first column that each row attends to, and the column behind its last.
    """

    keys: Memory
    values: Memory
    columns: range
    reads: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class StoreTable:
    """Rows of several calls, one call behind the other, and the addresses of their stores.

    Attributes:
        calls: the rows of each call; those of its sequences are one behind the other.
        code: of keys and values; None for no code.
        head_dim: elements of a head.
        sequences: by layer and sequence of any call: the addresses of its keys and values, the bytes from head to head,
            its first row and its number of rows.
        rows: by row: its sequence, its column, the first column that it attends to, and the column behind its last.
    """

    calls: Sequence[OwnRows]
    code: RowCode | None
    head_dim: int
    sequences: Int64[Tensor, "layers sequences fields"]
    rows: Int64[Tensor, "all fields"]

    @classmethod
    def of(cls, calls: Sequence[OwnRows], code: RowCode | None, head_dim: int) -> "StoreTable":
        """The table, on the device of the memory, sent without a wait and in one copy."""
        sequences, rows, steps = list[list[int]](), list[list[int]](), list[list[int]]()
        for call in calls:
            layer, own, head = (number * call.keys.element_size() for number in call.keys.stride()[:3])
            for number in range(call.keys.shape[1]):
                at = [of.data_ptr() + number * own for of in (call.keys, call.values)]
                sequences.append([*at, head, len(rows), len(call.columns)])
                steps.append([layer, layer, 0, 0, 0])
                read = zip(call.columns, call.reads, strict=True)
                rows += [[len(sequences) - 1, column, *bounds] for column, bounds in read]
        layers = torch.arange(len(calls[0].keys))[:, None, None]
        both = torch.tensor(sequences) + layers * torch.tensor(steps), torch.tensor(rows)
        sent = on_device(torch.cat([each.flatten() for each in both]), calls[0].keys.device)
        of_sequences, of_rows = sent.split([each.numel() for each in both])
        return cls(calls, code, head_dim, of_sequences.view_as(both[0]), of_rows.view_as(both[1]))

    @cached_property
    def most_rows(self) -> int:
        """Rows of the sequence that has most."""
        return max(rows for _, rows, _ in self.sizes)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """The sequences of each call, the rows of one, and the column behind the last that any row attends to."""
        return tuple(
            (call.keys.shape[1], len(call.columns), max(stop for _, stop in call.reads)) for call in self.calls
        )

    @cached_property
    def most_columns(self) -> int:
        """The column behind the last that any row attends to."""
        return max(columns for *_, columns in self.sizes)

    @cached_property
    def starts(self) -> bool:
        """Whether a row attends not from the first column on."""
        return any(start for call in self.calls for start, _ in call.reads)

    @cached_property
    def aligned(self) -> int:
        """Bytes of which the address of each row is a multiple; as `alignment` in scatter_rows.py."""
        if self.code is not None:
            return WORD
        strides = [number * call.keys.element_size() for call in self.calls for number in call.keys.stride()[:4]]
        return gcd(VECTOR, *strides, *(of.data_ptr() for call in self.calls for of in (call.keys, call.values)))

    def coded(self, rows: Float[Tensor, "1 kv_heads all head_dim"]) -> Stored:
        """Keys or values of all rows, as they are stored."""
        return rows if self.code is None else self.words(CodedRows.of(rows, self.code).bytes)

    def words(self, memory: Shaped[Tensor, "*rows stored"]) -> Shaped[Tensor, "*rows stored"]:
        """Stored rows in elements that are copied."""
        return memory if self.code is None else memory.view(torch.int32)

    def stored(self, layer: int) -> list[tuple[KeyValue, KeyValue]]:
        """Keys and values of each sequence."""
        return [
            (self._rows(call.keys[layer, number, None]), self._rows(call.values[layer, number, None]))
            for call in self.calls
            for number in range(call.keys.shape[1])
        ]

    def _rows(self, memory: Float[Tensor, "1 kv_heads length stored"]) -> KeyValue:
        if self.code is None:
            return memory
        return CodedRows(memory.view(torch.uint8), self.code, self.head_dim, memory.dtype)
