"""Outputs of experts in Triton, in three launches and without a host read, and their weighted sum in one more.

1. Pairs of a row and one of its experts are sorted by expert, and cut into tiles of 16 rows of one expert. The grid has
   room for the most tiles possible; programs without a tile end at once.
2. The gate of each tile, 3. its output, which goes to its pair. Every matrix is read at its address, once for a tile.

A row's output takes the same operations at any place of any tile, so its bits depend on no other row. Its outputs are
summed in the order of its experts, in float32 and without atomics.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.expert_outputs_ref import Picks
from tiered.kernels.expert_table import TILE_ROWS, ExpertTable, Matrix, scratch_numbers
from tiered.kernels.gate_mul import gated
from tiered.kernels.gate_mul_ref import Activation
from tiered.kernels.launch import launch
from tiered.kernels.row_code import RowLayout
from tiered.kernels.tile_product import tile_product
from tiered.kernels.weight_product import tile_of, warps_of

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_CHUNK = 1024  # pairs that a program reads at once, and elements that it adds at once
_SUM_WARPS = 8  # of a program that adds: four would spill registers on sm_100


# Tables in one allocation are not specialised, because their alignment varies with the rows.
@triton.jit(do_not_specialize=["order", "tiles", "pairs"])
def _align(experts, addresses, order, tiles, pairs, CHUNK: tl.constexpr):
    """The place of each pair: pairs are sorted by expert.

    `order` gets the pair at each place. `tiles` gets three numbers of each tile: the program of its expert, its first
    place, and the place behind its last. The tiles of program n start at number n + (pairs of lower experts) / 16, so
    no two tiles have the same number if programs have ascending experts.
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
    """The rows of one tile times the matrix `which` of its expert. With an ACTIVATION they are rows of the model, the
    matrix is a gate of `out` rows followed by as many others, and `product` has a row for each place. Without one
    `rows` has a row for each place, and `product` for each pair."""
    tile = tiles + tl.program_id(0) * 3
    number = tl.load(tile)
    if number >= 0:
        place = tl.load(tile + 1) + tl.arange(0, TILE.rows)
        given = place < tl.load(tile + 2)
        output = (tl.program_id(1) * TILE.out + tl.arange(0, TILE.out)).to(tl.int64)
        there = output < out
        pair = tl.load(order + place, given, other=0)
        row, target = place, pair
        if ACTIVATION is not None:
            row, target = pair // picked, place
        row_start = rows + row.to(tl.int64) * ROW.elements
        address = tl.load(addresses + number * 3 + 1 + which)
        weight = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
        dtype: tl.constexpr = product.dtype.element_ty
        found = tile_product(row_start, given, weight, output, there, 0, ROW.elements, ROW, UPCAST, TILE)
        if ACTIVATION is not None:
            up = tile_product(row_start, given, weight, output + out, there, 0, ROW.elements, ROW, UPCAST, TILE)
            answer = gated(found.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
        else:
            answer = found.to(dtype)
        into = product + target.to(tl.int64)[None, :] * out + output[:, None]
        tl.store(into, answer, there[:, None] & given[None, :])


@triton.jit(do_not_specialize=["picked"])
def _sum(total, outputs, weights, picked, width, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < width
    found = tl.zeros([CHUNK], tl.float32)
    for pick in range(picked):
        pair = row * picked + pick
        output = tl.load(outputs + pair * width + column, inside, other=0.0).to(tl.float32)
        found += output * tl.load(weights + pair)
    tl.store(total + row * width + column, found.to(total.dtype.element_ty), inside)


def expert_outputs(
    outputs: Float[Tensor, "rows picked width"],
    rows: Float[Tensor, "rows width"],
    picks: Picks,
    table: ExpertTable,
    only: Sequence[int],
    activation: Activation = "silu",
) -> None:
    """As in expert_outputs_ref.py."""
    if not len(only) or not rows.numel():
        return
    only = sorted(only)
    width, picked, pairs = rows.shape[1], picks.experts.shape[1], picks.experts.numel()
    rows, experts = rows.contiguous(), picks.experts.contiguous()
    # Unused tiles, and places of pairs with other experts, stay −1.
    sizes = scratch_numbers(pairs, len(only))
    order, tiles = torch.full((sum(sizes),), -1, dtype=torch.int32, device=rows.device).split(sizes)
    addresses = table.addresses(only, rows.device)
    launch(_align, (len(only),), experts, addresses, order, tiles, pairs, CHUNK=_CHUNK, on=rows)

    tile = tile_of(TILE_ROWS, rows.element_size())
    gate_up, down = table.matrices(only[0])
    inner = down.shape[1]
    gates = rows.new_empty(pairs, inner)
    shared = {"UPCAST": not rows.is_cuda, "TILE": tile, "num_warps": warps_of(tile), "on": rows}
    for which, matrix, source, product, out, by in (
        (0, gate_up, rows, gates, inner, activation),
        (1, down, gates, outputs, width, None),
    ):
        grid = len(tiles) // 3, -(-out // tile.out)
        arguments = source, order, tiles, addresses, product, picked, which, out
        launch(_expert_product, grid, *arguments, ACTIVATION=by, ROW=_layout(matrix), **shared)


def sum_outputs(
    outputs: Float[Tensor, "rows picked width"], weights: Float32[Tensor, "rows picked"]
) -> Float[Tensor, "rows width"]:
    """As in expert_outputs_ref.py."""
    rows, picked, width = outputs.shape
    total = outputs.new_empty(rows, width)
    if total.numel():
        grid = rows, -(-width // _CHUNK)
        # Each product is rounded, as in the reference.
        options = {"CHUNK": _CHUNK, "enable_fp_fusion": False, "num_warps": _SUM_WARPS}
        launch(_sum, grid, total, outputs.contiguous(), weights.contiguous(), picked, width, **options, on=outputs)
    return total


def _layout(matrix: Matrix) -> RowLayout:
    if isinstance(matrix, CodedRows):
        return RowLayout.of(matrix.code, matrix.elements)
    return RowLayout.raw(matrix.shape[1], matrix.element_size())
