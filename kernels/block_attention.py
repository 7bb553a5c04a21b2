"""Attention of a block's rows in Triton: columns are split between programs, and a second kernel merges the splits."""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int, Int64, UInt8
from torch import Tensor

from tiered.kernels.attention_parts import CODES, Form, of_values, rows_at, soft_capped, with_turned
from tiered.kernels.attention_splits import elements, merged_tile, splits, tile_of, turning_elements
from tiered.kernels.block_attention_ref import checked_code
from tiered.kernels.coded_rows import CodedRows, Heads, KeyValue
from tiered.kernels.keys_of_values import Keys, KeysOfValues
from tiered.kernels.launch import VECTOR, launch
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.row_code import WORD, RowCode
from tiered.kernels.store_table import SEQUENCE_FIELDS, StoreTable

_NVFP4, _FIELDS = tl.constexpr(CODES[RowCode.NVFP4]), tl.constexpr(SEQUENCE_FIELDS)


# Arguments that vary between calls are not specialised: Triton would recompile for 1 and for multiples of 16.
@triton.jit(
    do_not_specialize=[
        *("rows", "length", "span", "sinks"),
        *("key_batch", "key_head", "key_column", "value_batch", "value_head", "value_column"),
        *("mask_batch", "start_batch", "start_row", "stop_batch", "stop_row", "table_batch"),
    ],
    do_not_specialize_on_alignment=["keys", "values", "key_mask", "starts", "stops", "stores"],
)
def _block_attention(
    queries, keys, values, sink_keys, sink_values, key_mask, starts, stops, key_weight, cos, sin, stores,
    mixed, peaks, masses,
    query_batch, query_head, query_row, query_element,
    key_batch, key_head, key_column, key_element,
    value_batch, value_head, value_column, value_element,
    mask_batch, mask_column, start_batch, start_row, stop_batch, stop_row, table_batch, table_column,
    mixed_split, mixed_batch, mixed_head, mixed_row,
    kv_heads, group, rows, length, span, sinks, scale, soft_cap,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, STARTS: tl.constexpr, STOPS: tl.constexpr,
    UPCAST: tl.constexpr, ALIGNED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    # Rows of all heads that share a key head are one matrix, so each tile of keys and values is read once.
    folded = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    split = tl.program_id(1).to(tl.int64)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    own_rows = rows
    if stores is not None:
        fields = stores + batch * _FIELDS
        own_rows = tl.load(fields + 4).to(tl.int32)
    there = folded < group * own_rows
    head = kv_head * group + folded // own_rows
    row = folded % own_rows
    if stores is not None:  # rows of all sequences are one behind the other, as those of one sequence
        row += tl.load(fields + 3).to(tl.int32)
        batch *= 0
    # In NVFP4 even and odd elements are separate parts, as its bytes unpack; otherwise there is one part.
    parts: tl.constexpr = 2 if FORM.code == _NVFP4 else 1
    element = tl.arange(0, FORM.elements) * parts
    filled = element < FORM.head_dim
    own = there[:, None] & filled[None, :]
    row_at = (batch * query_batch + head * query_head + row * query_row)[:, None]
    query_at = row_at + (element * query_element)[None, :]
    query = tl.load(queries + query_at, own, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    total = tl.full([FORM.rows, FORM.elements], 0, tl.float32)
    if FORM.code == _NVFP4:
        odd_query = tl.load(queries + query_at + query_element, own, other=0.0)
        if UPCAST:
            odd_query = odd_query.to(tl.float32)
        odd_total = tl.full([FORM.rows, FORM.elements], 0, tl.float32)
    peak = tl.full([FORM.rows], -float("inf"), tl.float32)
    mass = tl.full([FORM.rows], 0, tl.float32)
    for sink in range(tl.where(split == 0, sinks, 0)):
        sink_at = ((head * sinks + sink) * FORM.head_dim)[:, None] + element[None, :]
        products = query.to(tl.float32) * tl.load(sink_keys + sink_at, own, other=0.0).to(tl.float32)
        if FORM.code == _NVFP4:
            products += odd_query.to(tl.float32) * tl.load(sink_keys + sink_at + 1, own, other=0.0).to(tl.float32)
        score = tl.sum(products, 1) * scale
        if CAPPED:
            score = soft_capped(score, soft_cap)
        grown = tl.maximum(peak, score)
        faded, weight = tl.exp(peak - grown), tl.exp(score - grown)
        peak, mass = grown, mass * faded + weight
        value = tl.load(sink_values + sink_at, own, other=0.0).to(tl.float32)
        total = total * faded[:, None] + weight[:, None] * value
        if FORM.code == _NVFP4:
            value = tl.load(sink_values + sink_at + 1, own, other=0.0).to(tl.float32)
            odd_total = odd_total * faded[:, None] + weight[:, None] * value
    if FORM.pairs >= 0:  # elements that turn have products of their own
        pair = tl.arange(0, FORM.turning) * parts
        left_at = row_at + (pair * query_element)[None, :]
        right_at = left_at + FORM.head_dim // 2 * query_element
        turns = there[:, None] & (pair < FORM.pairs)[None, :]
        left_query = tl.load(queries + left_at, turns, other=0.0).to(query.dtype)
        right_query = tl.load(queries + right_at, turns, other=0.0).to(query.dtype)
        query = of_values(query, key_weight, element, FORM)
        if FORM.code == _NVFP4:
            turns = there[:, None] & (pair + 1 < FORM.pairs)[None, :]
            odd_left_query = tl.load(queries + left_at + query_element, turns, other=0.0).to(query.dtype)
            odd_right_query = tl.load(queries + right_at + query_element, turns, other=0.0).to(query.dtype)
            odd_query = of_values(odd_query, key_weight, element + 1, FORM)
    start = tl.program_id(1) * span
    stop = tl.minimum(start + span, length)
    begin = tl.full([FORM.rows], 0, tl.int32)
    if STARTS:
        begin = tl.load(starts + batch * start_batch + row * start_row, there, other=length).to(tl.int32)
        start = tl.maximum(start, tl.min(begin, 0))
    limit = tl.full([FORM.rows], 0, tl.int32)
    if STOPS:
        limit = tl.load(stops + batch * stop_batch + row * stop_row, there, other=0).to(tl.int32)
        stop = tl.minimum(stop, tl.max(limit, 0))
    if stores is not None:
        of_head = kv_head * tl.load(fields + 2)
        key_start = (tl.load(fields) + of_head).to(tl.pointer_type(keys.dtype.element_ty), bitcast=True)
        value_start = (tl.load(fields + 1) + of_head).to(tl.pointer_type(values.dtype.element_ty), bitcast=True)
    else:
        key_start = keys + batch * key_batch + kv_head * key_head
        value_start = values + batch * value_batch + kv_head * value_head
    for tile in range(start, stop, FORM.keys):
        column = tile + tl.arange(0, FORM.keys)
        seen = column < stop
        if MASKED:
            seen &= tl.load(key_mask + batch * mask_batch + column * mask_column, seen, other=0) != 0
        scores = tl.full([FORM.rows, FORM.keys], 0, tl.float32)
        if FORM.pairs >= 0:
            left, odd_left = rows_at(
                key_start, column, key_column, key_element, seen, ALIGNED, FORM, 0, FORM.pairs, FORM.turning
            )
            right, odd_right = rows_at(
                key_start, column, key_column, key_element, seen, ALIGNED, FORM,
                FORM.head_dim // 2, FORM.pairs, FORM.turning,
            )  # fmt: skip
            angle_at = batch * table_batch + column.to(tl.int64) * table_column
            angles = key_weight, cos + angle_at, sin + angle_at
            scores = with_turned(scores, left_query, right_query, left, right, *angles, pair, seen, FORM)
            if FORM.code == _NVFP4:
                odd = odd_left_query, odd_right_query, odd_left, odd_right
                scores = with_turned(scores, *odd, *angles, pair + 1, seen, FORM)
        key, odd_key = rows_at(
            key_start, column, key_column, key_element, seen, ALIGNED, FORM, 0, FORM.head_dim, FORM.elements
        )
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), scores, input_precision="ieee")
        if FORM.code == _NVFP4:
            scores = tl.dot(odd_query, tl.trans(odd_key.to(query.dtype)), scores, input_precision="ieee")
        scores *= scale
        if CAPPED:
            scores = soft_capped(scores, soft_cap)
        shown = there[:, None] & seen[None, :]
        if STARTS:
            shown &= column[None, :] >= begin[:, None]
        if STOPS:
            shown &= column[None, :] < limit[:, None]
        scores = tl.where(shown, scores, -float("inf"))
        grown = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(grown == -float("inf"), 0.0, grown)
        faded, weights = tl.exp(peak - base), tl.exp(scores - base[:, None])
        peak, mass = grown, mass * faded + tl.sum(weights, 1)
        if FORM.pairs < 0:
            value, odd_value = rows_at(
                value_start, column, value_column, value_element, seen, ALIGNED, FORM, 0, FORM.head_dim, FORM.elements
            )
        else:  # each row is read once
            value, odd_value = key, odd_key
        weights = weights.to(query.dtype)
        total = tl.dot(weights, value.to(query.dtype), total * faded[:, None], input_precision="ieee")
        if FORM.code == _NVFP4:
            odd_total = tl.dot(weights, odd_value.to(query.dtype), odd_total * faded[:, None], input_precision="ieee")
    whole = tl.where(mass > 0, mass, 1.0)[:, None]
    mixed_at = split * mixed_split + batch * mixed_batch + head * mixed_head + row * mixed_row
    target = mixed + mixed_at[:, None] + element[None, :]
    tl.store(target, (total / whole).to(mixed.dtype.element_ty), own)
    if FORM.code == _NVFP4:
        tl.store(target + 1, (odd_total / whole).to(mixed.dtype.element_ty), own)
    if stores is not None:
        sum_at = (split * kv_heads * group + head) * rows + row
    else:
        sum_at = ((split * (tl.num_programs(2) // kv_heads) + batch) * kv_heads * group + head) * rows + row
    there = folded // own_rows < group  # anew, so that the loop keeps no register for it
    tl.store(peaks + sum_at, peak, there)
    tl.store(masses + sum_at, mass, there)


@triton.jit(do_not_specialize=["sums", "rows", "splits"])
def _merge_splits(
    totals, peaks, masses, mixed, peak, mass, sums, heads, rows, splits, HEAD_DIM: tl.constexpr, TILE: tl.constexpr
):
    """totals [splits, sums, HEAD_DIM] with `sums` = batch · heads · rows → mixed [batch, rows, heads, HEAD_DIM]."""
    place = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    there = place < sums
    element = tl.arange(0, TILE.elements)
    own = there[:, None] & (element < HEAD_DIM)[None, :]
    whole = tl.full([TILE.rows], -float("inf"), tl.float32)
    count = tl.full([TILE.rows], 0, tl.float32)
    total = tl.full([TILE.rows, TILE.elements], 0, tl.float32)
    for split in range(splits):
        at = split * sums + place
        of_split = tl.load(peaks + at, there, other=-float("inf"))
        grown = tl.maximum(whole, of_split)
        base = tl.where(grown == -float("inf"), 0.0, grown)
        faded, weight = tl.exp(whole - base), tl.load(masses + at, there, other=0.0) * tl.exp(of_split - base)
        part = tl.load(totals + at[:, None] * HEAD_DIM + element[None, :], own, other=0.0)
        whole, count = grown, count * faded + weight
        total = total * faded[:, None] + weight[:, None] * part
    total /= tl.where(count > 0, count, 1.0)[:, None]
    batch = place // (heads * rows)
    mixed_at = ((batch * rows + place % rows) * heads + place // rows % heads) * HEAD_DIM
    tl.store(mixed + mixed_at[:, None] + element[None, :], total.to(mixed.dtype.element_ty), own)
    tl.store(peak + place, whole, there)
    tl.store(mass + place, count, there)


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
    """As in block_attention_ref.py, in one launch, or two if columns are split."""
    keys, code, rows = table.calls[0].keys, table.code, table.rows
    _, batch, head, column, element = keys.stride()
    column = column * keys.element_size() // WORD if code else column
    stored = _Stored(
        (keys.view(torch.uint8),) * 2 if code else (keys,) * 2,
        (batch, head, column, element) * 2,
        code=code,
        aligned=table.aligned,
        sequences=table.sequences.shape[1],
        most_rows=table.most_rows,
        kv_heads=keys.shape[2],
        length=table.most_columns,
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
        length: columns.
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
    count = splits(tiles * stored.sequences * kv_heads, length)
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
    launch(_block_attention, grid, *tensors, *strides, *sizes, scale, soft_cap or 0.0, **options, on=queries)
    if count > 1:
        merged, places = merged_tile(head_dim), batch * heads * rows
        arguments = parts, sums.peak, sums.mass, mixed, whole.peak, whole.mass, places, heads, rows, count
        launch(_merge_splits, (-(-places // merged.rows),), *arguments, HEAD_DIM=head_dim, TILE=merged, on=queries)
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
