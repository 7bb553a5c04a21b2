"""Programs of `block_attention` in Triton: one takes a tile of rows and a split of columns, another merges splits."""

import triton
import triton.language as tl

from tiered.kernels.attention_parts import CODES, of_values, rows_at, soft_capped, with_turned
from tiered.kernels.row_code import RowCode
from tiered.kernels.store_table import SEQUENCE_FIELDS

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
def attend_split(
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
    row = (folded % own_rows).to(tl.int64)
    if stores is not None:  # rows of all sequences are one behind the other, as those of one sequence
        row += tl.load(fields + 3)
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
def merge_splits(
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
