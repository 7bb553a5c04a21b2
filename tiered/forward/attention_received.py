"""The attention that columns receive from some rows, and its bytes.

It is summed in parts that fit the room of a full refresh. That adds temporaries only if a single row of one key head
exceeds the room.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from tiered.core.buffers import FLOAT32
from tiered.forward.attention_weights import attention_weights, chunks
from tiered.forward.forward_bytes import part_bytes
from tiered.forward.sizes import CallShape


@dataclass(frozen=True, slots=True)
class SummedChunk:
    """A part of the sums: numbers of sequences, of key heads, and of rows of the query heads that share a key head."""

    sequences: int
    key_heads: int
    rows: int

    def nbytes(self, sizes: CallShape) -> int:
        """Bytes of its attention weights."""
        shared = sizes.shape.heads // sizes.shape.kv_heads
        return shared * self.sequences * self.key_heads * self.rows * weights_bytes(sizes)


def summed_chunk(sizes: CallShape, *, rows: int, held: int) -> SummedChunk:
    """The largest part of the sums over `rows` rows of each sequence that fits beside `held` bytes."""
    shape = sizes.shape
    row = shape.heads // shape.kv_heads * weights_bytes(sizes)  # of one key head
    most = max(1, (part_bytes(sizes) - held) // row)
    together = min(rows, most)
    key_heads = min(shape.kv_heads, most // together)
    sequences = min(sizes.sequences, most // (together * key_heads)) if key_heads == shape.kv_heads else 1
    return SummedChunk(sequences, key_heads, together)


def weights_bytes(sizes: CallShape) -> int:
    """Bytes of one row's attention weights in one head, in float32 and in the model's dtype; with sinks, also of its
    query."""
    query = sizes.shape.head_dim * FLOAT32 if sizes.shape.sink_tokens else 0
    return query + sizes.context * (FLOAT32 + (0 if sizes.dtype == "float32" else sizes.element))


def attention_received(
    queries: Float[Tensor, "batch heads rows head_dim"],
    counts: Bool[Tensor, "batch rows"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None,
    chunk: SummedChunk,
    *,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float32[Tensor, "batch length"]:
    """Attention weight of each column, summed over all heads and over the rows in `counts`, by parts of `chunk`."""
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
        received[some].add_(weights.mul_(counts[some, None, rows, None]).sum(dim=(1, 2)))
        del weights  # freed before the next chunk's are made
    return received
