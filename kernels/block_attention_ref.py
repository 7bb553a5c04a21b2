"""Attention of some rows over keys and values, coded or not, and its log-sum-exp: the oracle, in plain torch."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.attention_scores import capped, check_attention
from tiered.kernels.coded_rows import CodedRows, Heads, KeyValue
from tiered.kernels.keys_of_values import Keys, KeysOfValues
from tiered.kernels.log_sum_exp import LogSumExp, finite
from tiered.kernels.row_code import GROUP, RowCode
from tiered.kernels.store_table import StoreTable

# 4 MiB of float32: pairs of a row and a key whose scores exist at a time, or of one head of one sequence if more.
PAIRS_AT_ONCE = 1 << 20
CODED_AT_ONCE = 1024  # columns of coded rows, or of keys that are made of values, that are decoded at a time


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
    """softmax(scores) · v over the sinks and the columns that a row may see, in float32. A score is scale · q·k.
    Returned with it is the log-sum-exp of these scores, sinks included, by batch, head and row. It allows a merge with
    attention over other columns.

    Args:
        queries, keys, values: as stored, rotated. Query head h uses key head h // (heads / kv_heads). Keys and values
            are both uncoded, or both in one code; coded ones are decoded a part at a time. Keys may be made of `values`
            (`KeysOfValues`), a part at a time as well. `values` is None if only the log-sum-exp is needed: the returned
            rows have no meaning then.
        scale: factor of q·k; None for 1 / √head_dim.
        soft_cap: c if a score s becomes c · tanh(s / c); None for no cap.
        sink_keys, sink_values: learned tokens that every row attends to, uncoded; None for no sinks.
        key_mask: False at columns that no row may attend to.
        start: the first column that each row may attend to; None for column 0.
        stop: the column behind the last that each row may attend to; None for no limit.

    Returns:
        Attention by row. The heads of a row are contiguous in memory, so concatenating them copies nothing. A row that
        may attend to no column and no sink is zero. And `LogSumExp` [batch, heads, rows].

    Raises:
        ValueError: shapes do not match, or keys and values are in different codes. Or keys are made of other values,
            or of codes whose groups cross the middle of a head.
    """
    checked_code(queries, keys, values)
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    scale, sharing = head_dim**-0.5 if scale is None else scale, heads // kv_heads
    columns = length if isinstance(keys, Tensor) else min(length, CODED_AT_ONCE)
    mixed = queries.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    whole = LogSumExp(*torch.empty(2, batch, heads, rows, device=queries.device))
    # Row counts are rounded up to a power of two, so that few sizes of a chunk have to be booked. Keys of other dtypes
    # are copied by chunk, with at most as many elements as there are pairs.
    least = 1 if isinstance(keys, Tensor) and keys.dtype == torch.float32 else -(-head_dim // sharing)
    pairs = sharing * max(1 << max(0, rows - 1).bit_length(), least) * max(1, columns)
    sequences = max(1, PAIRS_AT_ONCE // (kv_heads * pairs))
    groups = kv_heads if sequences > 1 else max(1, PAIRS_AT_ONCE // pairs)
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        masks = (None if mask is None else mask[some] for mask in (key_mask, start, stop))
        hidden = _hidden(length, queries.device, *masks)
        for group in range(0, kv_heads, groups):
            of_keys = slice(group, group + groups)
            of_heads = slice(group * sharing, (group + groups) * sharing)
            stored = keys[some, of_keys], None if values is None else values[some, of_keys]
            sinks = (None if sink is None else sink[of_heads] for sink in (sink_keys, sink_values))
            mixed[some, of_heads], whole.peak[some, of_heads], whole.mass[some, of_heads] = _mixed(
                queries[some, of_heads], *stored, *sinks, scale, soft_cap, columns, hidden
            )
    return mixed, whole


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
    """`block_attention` of rows of several calls, each over its own stores in one layer.

    Args:
        queries: [1, heads, all, head_dim], of all rows of `table`.
        layer: place of the layer in the memory of `table`.
        scale, soft_cap, sink_keys, sink_values: as in `block_attention`.

    Returns:
        Attention by row, [1, heads, all, head_dim]; the heads of a row are contiguous in memory.
    """
    softened = {"scale": scale, "soft_cap": soft_cap, "sink_keys": sink_keys, "sink_values": sink_values}
    heads, all_rows, head_dim = queries.shape[1:]
    mixed = queries.new_empty(1, all_rows, heads, head_dim).transpose(1, 2)
    for stored, fields in zip(table.stored(layer), table.sequences[layer].tolist(), strict=True):
        *_, first, count = fields
        own = slice(first, first + count)
        start, stop = (table.rows[None, own, limit] for limit in (2, 3))
        keys, values = (each[:, :, : int(stop.max())] for each in stored)  # those behind may never have been written
        mixed[:, :, own] = block_attention(queries[:, :, own], keys, values, start=start, stop=stop, **softened)[0]
    return mixed


def checked_code(queries: Heads, keys: Keys, values: KeyValue | None) -> RowCode | None:
    """The code of keys and values; None if they are uncoded. Raises as `block_attention`."""
    check_attention(queries, keys)
    if isinstance(keys, KeysOfValues):
        keys = _checked_values(keys, values)
    values = keys if values is None else values
    code, of_values = (rows.code if isinstance(rows, CodedRows) else None for rows in (keys, values))
    if code != of_values or keys.shape != values.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} in {code or 'no code'} do not fit values {tuple(values.shape)} in "
            f"{of_values or 'no code'}: both must have one shape and be in one code, or in none"
        )
    return code


def _checked_values(keys: KeysOfValues, values: KeyValue | None) -> KeyValue:
    stored, (length, head_dim) = keys.stored, keys.shape[2:]
    tables, _, columns, pairs = keys.cos.shape
    fits = tables in (1, keys.shape[0]) and columns == length and 2 * pairs <= head_dim and len(keys.weight) == head_dim
    if not fits or keys.sin.shape != keys.cos.shape or keys.sin.stride() != keys.cos.stride():
        raise ValueError(
            f"weight {tuple(keys.weight.shape)} and angles {tuple(keys.cos.shape)} and {tuple(keys.sin.shape)} do not "
            f"fit values {keys.shape}"
        )
    if values is not None and not keys.are_of(values):
        raise ValueError("keys are made of other values than those that are mixed")
    if isinstance(stored, CodedRows) and stored.code is RowCode.NVFP4 and head_dim % (2 * GROUP):
        raise ValueError(
            f"heads of {head_dim} elements in {stored.code}, whose keys are made of values; a multiple of "
            f"{2 * GROUP} is allowed"
        )
    return stored


def _mixed(
    queries: Heads,
    keys: Keys,
    values: KeyValue | None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None,
    sink_values: Float[Tensor, "heads sinks head_dim"] | None,
    scale: float,
    soft_cap: float | None,
    columns: int,
    hidden: Bool[Tensor, "batch 1 #rows length"] | None,
) -> tuple[Heads, Float32[Tensor, "batch heads rows"], Float32[Tensor, "batch heads rows"]]:
    """Over `columns` of the keys at a time, and the sinks last: the sum by row, its peak and its mass."""
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    scaled = queries.float() * scale
    # Heads that share keys are rows of one product, so no key is repeated.
    folded = scaled.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    total, mass = torch.zeros_like(scaled), torch.zeros_like(scaled[..., :1])
    peak, sinks = torch.full_like(mass, -torch.inf), None
    if sink_keys is not None and sink_keys.shape[1]:
        sinks = capped(scaled @ sink_keys.float().mT, soft_cap)
        peak = sinks.amax(-1, keepdim=True)
    for start in range(0, length, max(1, columns)):
        part = slice(start, start + columns)
        unseen = None if hidden is None else hidden[..., part]
        of_part = None if values is None else values[:, :, part]
        peak = _add_part(folded, keys[:, :, part], of_part, soft_cap, unseen, peak, mass, total)
    if sinks is not None:
        sinks.sub_(peak).exp_()
        mass.add_(sinks.sum(-1, keepdim=True))
        if sink_values is not None:
            total.add_(sinks @ sink_values.float())
    return total.div_(mass.masked_fill(mass == 0, 1.0)).to(queries.dtype), peak[..., 0], mass[..., 0]


def _add_part(
    folded: Float32[Tensor, "batch kv_heads folded head_dim"],
    keys: Keys,
    values: Float[Tensor, "batch kv_heads columns head_dim"] | CodedRows | None,
    soft_cap: float | None,
    hidden: Bool[Tensor, "batch 1 #rows columns"] | None,
    peak: Float32[Tensor, "batch heads rows 1"],
    mass: Float32[Tensor, "batch heads rows 1"],
    total: Float32[Tensor, "batch heads rows head_dim"],
) -> Float32[Tensor, "batch heads rows 1"]:
    """Add columns to `mass` and `total`, which are relative to `peak`; returns the peak that they are relative to
    afterwards."""
    scores = capped(folded @ _floats(keys).mT, soft_cap).view(*mass.shape[:3], -1)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    grown = torch.maximum(peak, scores.amax(-1, keepdim=True))
    base = finite(grown)
    faded = (peak - base).exp_()
    scores.sub_(base).exp_()
    mass.mul_(faded).add_(scores.sum(-1, keepdim=True))
    if values is None:
        return grown
    of_values = scores.view(*folded.shape[:3], -1) @ _floats(values)
    total.mul_(faded).add_(of_values.view_as(total))
    return grown


def _floats(rows: Keys) -> Float32[Tensor, "batch heads columns elements"]:
    if isinstance(rows, Tensor):
        return rows.float()
    return (replace(rows, dtype=torch.float32) if isinstance(rows, CodedRows) else rows).values()


def _hidden(
    length: int,
    device: torch.device,
    key_mask: Bool[Tensor, "batch length"] | None,
    start: Int[Tensor, " batch #rows"] | None,
    stop: Int[Tensor, " batch #rows"] | None,
) -> Bool[Tensor, "batch 1 #rows length"] | None:
    """True at the columns that a row may not see; None if every row sees all."""
    hidden = None
    if stop is not None or start is not None:
        column = torch.arange(length, device=device)
        if stop is not None:
            hidden = column >= stop[:, None, :, None]
        if start is not None:
            before = column < start[:, None, :, None]
            hidden = before if hidden is None else hidden.logical_or_(before)
    if key_mask is not None:
        masked = ~key_mask[:, None, None]
        hidden = masked if hidden is None else hidden.logical_or_(masked)
    return hidden
