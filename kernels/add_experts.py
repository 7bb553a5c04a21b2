"""Weighted sum of expert outputs in Triton, in four launches and without a host read.

1. Pairs of a row and one of its experts are sorted by expert, and cut into tiles of 16 rows of one expert. The grid has
   room for the most tiles possible; programs without a tile end at once.
2. The gate of each tile, 3. its output. Every matrix is read at its address, once for a tile.
4. The sum of each row over its experts, ascending, in float32 and without atomics.

A row's output takes the same operations at any place of any tile, so its bits depend on no other row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.add_experts_ref import Picks
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.expert_table import TILE_ROWS, ExpertTable, Matrix, scratch_numbers
from tiered.kernels.gate_mul import gated
from tiered.kernels.gate_mul_ref import Activation
from tiered.kernels.launch import launch
from tiered.kernels.row_code import RowLayout
from tiered.kernels.tile_product import tile_product
from tiered.kernels.weight_product import tile_of, warps_of

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_CHUNK = 1024  # pairs that a program reads at once, and elements that it adds at once


# Tables in one allocation are not specialised, because their alignment varies with the rows.
@triton.jit(do_not_specialize=["order", "places", "tiles", "pairs"])
def _align(experts, addresses, order, places, tiles, pairs, CHUNK: tl.constexpr):
    """The place of each pair: pairs are sorted by expert.

    `order` gets the pair at each place, and `places` the place of each pair. `tiles` gets three numbers of each tile:
    the program of its expert, its first place, and the place behind its last. The tiles of program n start at number
    n + (pairs of earlier experts) / 16, so no two tiles have the same number.
    """
    number = tl.program_id(0)
    expert = tl.load(addresses + number * 3)
    lane = tl.arange(0, CHUNK)
    begin = 0
    for first in range(0, pairs, CHUNK):
        begin += tl.sum((tl.load(experts + first + lane, first + lane < pairs, other=expert) < expert).to(tl.int32))
    end = begin
    for first in range(0, pairs, CHUNK):
        pair = first + lane
        own = tl.load(experts + pair, pair < pairs, other=-1) == expert
        place = end + tl.cumsum(own.to(tl.int32)) - 1
        tl.store(order + place, pair, own)
        tl.store(places + pair, place, own)
        end += tl.sum(own.to(tl.int32))
    for several in range(0, pairs // _TILE_ROWS + 1, CHUNK):
        start = begin + (several + lane) * _TILE_ROWS
        tile = tiles + (number + begin // _TILE_ROWS + several + lane) * 3
        tl.store(tile, tl.zeros_like(lane) + number, start < end)
        tl.store(tile + 1, start, start < end)
        tl.store(tile + 2, tl.zeros_like(lane) + end, start < end)


@triton.jit(do_not_specialize=["order", "tiles", "picked", "which"])
def _expert_product(
    rows, order, tiles, addresses, product, picked, which, out,
    ACTIVATION: tl.constexpr, ROW: tl.constexpr, UPCAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of one tile times the matrix `which` of its expert. With an ACTIVATION they are rows of the model, and
    the matrix is a gate of `out` rows followed by as many others. Without one `rows` has one for each place."""
    tile = tiles + tl.program_id(0) * 3
    number = tl.load(tile)
    if number >= 0:
        place = tl.load(tile + 1) + tl.arange(0, TILE.rows)
        given = place < tl.load(tile + 2)
        output = (tl.program_id(1) * TILE.out + tl.arange(0, TILE.out)).to(tl.int64)
        there = output < out
        row = place
        if ACTIVATION is not None:
            row = tl.load(order + place, given, other=0) // picked
        row_start = rows + row.to(tl.int64) * ROW.elements
        address = tl.load(addresses + number * 3 + 1 + which)
        weight = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
        dtype: tl.constexpr = product.dtype.element_ty
        found = tile_product(row_start, given, weight, output, there, ROW, UPCAST, TILE)
        if ACTIVATION is not None:
            up = tile_product(row_start, given, weight, output + out, there, ROW, UPCAST, TILE)
            answer = gated(found.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
        else:
            answer = found.to(dtype)
        target = product + place.to(tl.int64)[None, :] * out + output[:, None]
        tl.store(target, answer, there[:, None] & given[None, :])


@triton.jit(do_not_specialize=["places", "picked"])
def _sum(total, answers, places, weights, picked, width, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < width
    target = total + row * width + column
    found = tl.load(target, inside, other=0.0)
    for pick in range(picked):
        pair = row * picked + pick
        place = tl.load(places + pair)
        if place >= 0:
            answer = tl.load(answers + place.to(tl.int64) * width + column, inside, other=0.0).to(tl.float32)
            found += answer * tl.load(weights + pair)
    tl.store(target, found, inside)


def add_experts(
    total: Float32[Tensor, "rows width"],
    rows: Float[Tensor, "rows width"],
    picks: Picks,
    table: ExpertTable,
    only: Sequence[int],
    activation: Activation = "silu",
) -> None:
    """As in add_experts_ref.py. `total` has no gaps."""
    if not len(only) or not rows.numel():
        return
    (count, width), picked = rows.shape, picks.experts.shape[1]
    pairs = count * picked
    rows, experts, weights = (each.contiguous() for each in (rows, *picks))
    # Unused tiles, and the places of pairs with other experts, stay −1.
    sizes = scratch_numbers(pairs, len(only))
    order, places, tiles = torch.full((sum(sizes),), -1, dtype=torch.int32, device=rows.device).split(sizes)
    addresses = table.addresses(only, rows.device)
    launch(_align, (len(only),), experts, addresses, order, places, tiles, pairs, CHUNK=_CHUNK, on=rows)

    tile = tile_of(TILE_ROWS, rows.element_size())
    gate_up, down = table.matrices(only[0])
    inner = down.shape[1]
    gates, answers = rows.new_empty(pairs, inner), rows.new_empty(pairs, width)
    shared = {"UPCAST": not rows.is_cuda, "TILE": tile, "num_warps": warps_of(tile), "on": rows}
    for which, matrix, source, product, by in (
        (0, gate_up, rows, gates, activation),
        (1, down, gates, answers, None),
    ):
        out = product.shape[1]
        grid = len(tiles) // 3, -(-out // tile.out)
        arguments = source, order, tiles, addresses, product, picked, which, out
        launch(_expert_product, grid, *arguments, ACTIVATION=by, ROW=_layout(matrix), **shared)
    grid = count, -(-width // _CHUNK)
    options = {"CHUNK": _CHUNK, "enable_fp_fusion": False}  # the same bits wherever a sum begins
    launch(_sum, grid, total, answers, places, weights, picked, width, **options, on=rows)


def _layout(matrix: Matrix) -> RowLayout:
    if isinstance(matrix, CodedRows):
        return RowLayout.of(matrix.code, matrix.elements)
    return RowLayout.raw(matrix.shape[1], matrix.element_size())
