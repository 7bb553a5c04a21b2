"""Attention of a block's rows: launches of the programs in attention_programs.py."""

from math import gcd
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int64, UInt8
from torch import Tensor

from tiered.kernels.attention_parts import CODES, Form
from tiered.kernels.attention_programs import attend_split, merge_splits
from tiered.kernels.attention_splits import (
    bucket,
    elements,
    merged_tile,
    shared_splits,
    splits,
    tile_of,
    turning_elements,
)
from tiered.kernels.block_attention_ref import checked_code
from tiered.kernels.coded_rows import CodedRows, Heads, KeyValue
from tiered.kernels.keys_of_values import Keys, KeysOfValues
from tiered.kernels.launch import VECTOR, launch
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.row_code import WORD, RowCode
from tiered.kernels.store_table import StoreTable


def block_attention(
    queries: Heads,
    keys: Keys,
    values: KeyValue | None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    sink_values: Float[Tensor, "heads sinks head_dim"] | None = None,
    key_mask: Bool[Tensor, "batch length"] | None = None,
    start: Int[Tensor, " batch #rows"] | None = None,
    stop: Int[Tensor, " batch #rows"] | None = None,
) -> tuple[Heads, LogSumExp]:
    """As in block_attention_ref.py. In products of 16-bit tensors the weights have 16 bits too. If keys are made of
    values, so have elements of keys that turn, and queries times the weights of the others."""
    code = checked_code(queries, keys, values)
    made = keys if isinstance(keys, KeysOfValues) else None
    keys = keys.stored if isinstance(keys, KeysOfValues) else keys
    if values is None:  # the result is unused, and the keys are in the cache
        values, sink_values = keys, sink_keys
    batch, _, rows, _ = queries.shape
    (key_memory, *key_strides), (value_memory, *value_strides) = _memory(keys), _memory(values)
    stored = _Stored(
        (key_memory, value_memory),
        (*key_strides, *value_strides),
        code=code,
        aligned=min(_alignment(keys), _alignment(values)),
        sequences=batch,
        most_rows=rows,
        kv_heads=keys.shape[1],
        length=keys.shape[2],
        made=made,
    )
    limits = _Limits(
        None if key_mask is None else key_mask.view(torch.uint8),
        None if start is None else start.expand(batch, rows),
        None if stop is None else stop.expand(batch, rows),
    )
    sinks = None if sink_keys is None or sink_values is None else (sink_keys, sink_values)
    return _attended(queries, stored, limits, scale, soft_cap, sinks)


def attention_apart(
    queries: Heads,
    table: StoreTable,
    layer: int,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    sink_values: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Heads:
    """As in block_attention_ref.py, in one launch, or two if columns are split. Calls of equal buckets launch alike."""
    keys, code, rows = table.calls[0].keys, table.code, table.rows
    of_heads = queries.shape[1], keys.shape[2], table.head_dim
    *_, column, element = keys.stride()
    column = column * keys.element_size() // WORD if code else column
    stored = _Stored(
        (keys.view(torch.uint8),) * 2 if code else (keys,) * 2,
        (0, 0, column, element) * 2,
        code=code,
        aligned=table.aligned,
        sequences=table.sequences.shape[1],
        most_rows=table.most_rows,
        kv_heads=keys.shape[2],
        length=bucket(table.most_columns)[1],
        splits=shared_splits(table.sizes, *of_heads, element_bytes=queries.element_size(), code=code),
        table=table.sequences[layer],
    )
    limits = _Limits(None, rows[None, :, 2] if table.starts else None, rows[None, :, 3])
    sinks = None if sink_keys is None or sink_values is None else (sink_keys, sink_values)
    return _attended(queries, stored, limits, scale, soft_cap, sinks)[0]


class _Stored(NamedTuple):
    """Memory of keys and values, and their strides.

    Attributes:
        sequences: with stored rows.
        most_rows: most rows of a sequence that attend to them.
        length: columns; at least as many as any row attends to.
        splits: number of splits of the columns; None to choose it by `length`.
        made: how keys are made of values; None if they are stored.
        table: addresses of each sequence in the layer, as in `StoreTable`. Memory and strides of batch and head then
            have no meaning. None for one memory of all sequences.
    """

    memory: tuple[Tensor, Tensor]
    strides: tuple[int, ...]
    code: RowCode | None
    aligned: int
    sequences: int
    most_rows: int
    kv_heads: int
    length: int
    splits: int | None = None
    made: KeysOfValues | None = None
    table: Int64[Tensor, "sequences fields"] | None = None


class _Limits(NamedTuple):
    """`key_mask` as bytes, and `start` and `stop` of each row; None for no limit."""

    mask: UInt8[Tensor, "batch length"] | None
    starts: Int[Tensor, "batch rows"] | None
    stops: Int[Tensor, "batch rows"] | None


def _attended(
    queries: Heads,
    stored: _Stored,
    limits: _Limits,
    scale: float | None,
    soft_cap: float | None,
    sinks: tuple[Float[Tensor, "heads sinks head_dim"], Float[Tensor, "heads sinks head_dim"]] | None,
) -> tuple[Heads, LogSumExp]:
    batch, heads, rows, head_dim = queries.shape
    code, made, kv_heads, length = stored.code, stored.made, stored.kv_heads, stored.length
    scale, group = head_dim**-0.5 if scale is None else scale, heads // kv_heads
    mixed = queries.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    whole = LogSumExp(*torch.empty(2, batch, heads, rows, dtype=torch.float32, device=queries.device))
    if mixed.numel() == 0:
        return mixed, whole
    folded, element_bytes = group * stored.most_rows, queries.element_size()
    tile = tile_of(folded, head_dim=head_dim, element_bytes=element_bytes, code=code, made=made is not None)
    tiles = -(-folded // tile.rows)
    count = stored.splits or splits(tiles * stored.sequences * kv_heads, length)
    parts, sums = mixed[None], whole
    if count > 1:
        parts = torch.empty(count, *mixed.shape, dtype=torch.float32, device=queries.device)
        sums = LogSumExp(*parts.new_empty(2, count, batch, heads, rows))
    # Without a mask, sinks or a weight the kernel reads none of them, so any pointer serves.
    mask, starts, stops = (queries if limit is None else limit for limit in limits)
    of_sinks = (queries, queries) if sinks is None else (sink.contiguous() for sink in sinks)
    making = (queries, queries, queries) if made is None else (made.weight, made.cos, made.sin)
    results = parts, sums.peak, sums.mass
    tensors = queries, *stored.memory, *of_sinks, mask, starts, stops, *making, stored.table, *results
    tables = (0, 0) if made is None else (made.cos.stride(0) * (len(made.cos) > 1), made.cos.stride(2))
    limited = *mask.stride()[:2], *starts.stride()[:2], *stops.stride()[:2], *tables
    strides = *queries.stride(), *stored.strides, *limited, *parts.stride()[:4]
    turning = (-1,) if made is None else (made.cos.shape[3], turning_elements(made.cos.shape[3], code))
    span = -(-length // (count * tile.columns)) * tile.columns
    sizes = kv_heads, group, rows, length, span, 0 if sinks is None else sinks[0].shape[1]
    options = {
        "CAPPED": soft_cap is not None,
        "MASKED": limits.mask is not None,
        "STARTS": limits.starts is not None,
        "STOPS": limits.stops is not None,
        "UPCAST": not queries.is_cuda or (code is None and queries.dtype != stored.memory[0].dtype),
        "ALIGNED": stored.aligned,
        "FORM": Form(CODES[code], head_dim, tile.rows, tile.columns, elements(head_dim, code), *turning),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    grid = tiles, count, stored.sequences * kv_heads
    launch(attend_split, grid, *tensors, *strides, *sizes, scale, soft_cap or 0.0, **options, on=queries)
    if count > 1:
        merged, places = merged_tile(head_dim), batch * heads * rows
        arguments = parts, sums.peak, sums.mass, mixed, whole.peak, whole.mass, places, heads, rows, count
        launch(merge_splits, (-(-places // merged.rows),), *arguments, HEAD_DIM=head_dim, TILE=merged, on=queries)
    return mixed, whole


def _memory(rows: Tensor | CodedRows) -> tuple[Tensor, int, int, int, int]:
    """Their memory and strides. Of coded rows: bytes, and the stride between columns in words."""
    if isinstance(rows, Tensor):
        return rows, *rows.stride()
    batch, head, column, byte = rows.bytes.stride()
    if byte != 1 or any(number % WORD for number in (rows.bytes.data_ptr(), batch, head, column)):
        raise ValueError(f"rows in {rows.code} must begin at multiples of {WORD} bytes, and have no gaps")
    return rows.bytes, batch, head, column // WORD, byte


def _alignment(rows: Tensor | CodedRows) -> int:
    """Bytes of which each row's address is a multiple: a whole vector, unless the head or a slice has an odd size.
    Coded rows begin at whole words, whatever their number, so one kernel serves all calls."""
    if isinstance(rows, CodedRows):
        return WORD
    return gcd(VECTOR, rows.data_ptr(), *(number * rows.element_size() for number in rows.stride()[:3]))
