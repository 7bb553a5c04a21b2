"""The picks of greedy k-means++ among projected rows, in Triton: two launches a pick, however many rows are drawn.

A program of `_measure` has a tile of rows: their distances to the rows that were drawn, and the sums of what is left.
`_draw` has one program a group. It finds the best of these draws, and draws the next rows: it first looks for the tile
of each by the tiles' sums, then for the row in it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from tiered.kernels.greedy_picks_ref import AS_GOOD, FARTHER_THAN_ANY
from tiered.kernels.launch import launch, power_of_2

ROWS = 64  # of a tile, and tiles that `_draw` looks at together
INNER = 32  # columns of a product at a time


class PickTile(NamedTuple):
    """Draws of a pick (a power of 2, at least 16), rows of a tile, and columns of a product at a time."""

    trials: int
    rows: int
    inner: int


@triton.jit(do_not_specialize=["number", "rows", "tiles", "trials"])
def _measure(
    sketch, usable, drawn, best, left, left_then, masses,
    number, rows, tiles, trials, width, same, farthest, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    row = tile * TILE.rows + tl.arange(0, TILE.rows)
    trial = tl.arange(0, TILE.trials)
    inside, there = row < rows, trial < trials
    if number == 0:
        flags = tl.load(usable + group * rows + row, inside, other=0)
        then = tl.full([TILE.trials, TILE.rows], 0.0, tl.float32) + tl.where(flags != 0, farthest, 0.0)[None, :]
    else:
        own = sketch + group * rows * width
        point = own + tl.load(drawn + group * trials + trial, there, other=0) * width
        start = own + row.to(tl.int64) * width
        products = tl.full([TILE.trials, TILE.rows], 0.0, tl.float32)
        norms = tl.full([TILE.rows], 0.0, tl.float32)
        point_norms = tl.full([TILE.trials], 0.0, tl.float32)
        for first in range(0, width, TILE.inner):
            column = first + tl.arange(0, TILE.inner)
            known = (column < width)[None, :]
            values = tl.load(start[:, None] + column[None, :], inside[:, None] & known, other=0.0)
            points = tl.load(point[:, None] + column[None, :], there[:, None] & known, other=0.0)
            products = tl.dot(points, tl.trans(values), products, input_precision="ieee")
            norms += tl.sum(values * values, 1)
            point_norms += tl.sum(points * points, 1)
        distance = norms[None, :] + point_norms[:, None] - 2 * products
        nearest = tl.load(left + (group * trials + tl.load(best + group)) * rows + row, inside, other=0.0)
        then = tl.minimum(tl.where(distance > same, distance, 0.0), nearest[None, :])
    keep = there[:, None] & inside[None, :]
    draw = group * trials + trial
    tl.store(left_then + draw[:, None] * rows + row[None, :], then, keep)
    tl.store(masses + draw * tiles + tile, tl.sum(tl.where(keep, then, 0.0).to(tl.float64), 1), there)


@triton.jit(do_not_specialize=["number", "clusters", "rows", "tiles", "trials"])
def _draw(
    draws, left, masses, drawn, best, picks, number, clusters, rows, tiles, trials, as_good, TILE: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    trial = tl.arange(0, TILE.trials)
    there = trial < trials
    item = tl.arange(0, TILE.rows)
    totals = tl.full([TILE.trials], 0.0, tl.float64)
    for first in range(0, tiles, TILE.rows):
        tile = first + item
        at = masses + (group * trials + trial[:, None]) * tiles + tile[None, :]
        totals += tl.sum(tl.load(at, there[:, None] & (tile < tiles)[None, :], other=0.0), 1)
    least = tl.min(tl.where(there, totals, float("inf")), 0)
    chosen = tl.min(tl.where(there & (totals <= as_good * least), trial, TILE.trials - 1), 0)
    tl.store(best + group, chosen)
    own = group * trials + chosen
    if number > 0:
        tl.store(picks + group * clusters + number - 1, tl.load(drawn + own))
    tl.debug_barrier()  # what was drawn is written anew below
    if number < clusters:
        total = tl.sum(tl.where(trial == chosen, totals, 0.0), 0)
        target = tl.load(draws + number * trials + trial, there, other=0.0) * total
        before = tl.full([TILE.trials], 0.0, tl.float64)
        passed = tl.full([TILE.trials], 0, tl.int32)
        carried = tl.sum(before, 0)
        last_tile = tl.sum(passed, 0)
        for first in range(0, tiles, TILE.rows):
            tile = first + item
            mass = tl.load(masses + own * tiles + tile, tile < tiles, other=0.0)
            reached = carried + tl.cumsum(mass, 0)
            behind = (reached[None, :] <= target[:, None]) & (tile < tiles)[None, :]
            passed += tl.sum(behind.to(tl.int32), 1)
            before = tl.maximum(before, tl.max(tl.where(behind, reached[None, :], 0.0), 1))
            carried += tl.sum(mass, 0)
            last_tile = tl.maximum(last_tile, tl.max(tl.where(mass > 0, tile, 0), 0))
        # A draw near 1 may be behind all sums by rounding.
        first_row = tl.minimum(passed, last_tile) * TILE.rows
        row = first_row[:, None] + item[None, :]
        mass = tl.load(left + own * rows + row, row < rows, other=0.0).to(tl.float64)
        behind = before[:, None] + tl.cumsum(mass, 1) <= target[:, None]
        last = tl.max(tl.where(mass > 0, item[None, :], 0), 1)
        found = first_row + tl.minimum(tl.sum(behind.to(tl.int32), 1), last)
        tl.store(drawn + group * trials + trial, tl.where(total > 0, found, rows - 1).to(tl.int64), there)


def greedy_picks(
    sketch: Float32[Tensor, "groups n sketch"],
    usable: Bool[Tensor, "groups n"],
    draws: Float64[Tensor, "clusters trials"],
    apart: float,
) -> Int64[Tensor, "groups clusters"]:
    """As in greedy_picks_ref.py."""
    groups, rows, width = sketch.shape
    clusters, trials = draws.shape
    tile, tiles = tile_of(trials), -(-rows // ROWS)
    picks, drawn, best = (draws.new_empty(groups, count, dtype=torch.int64) for count in (clusters, trials, 1))
    # What is left after each draw, and before: one program reads what another one would write.
    left, left_then = (sketch.new_empty(groups, trials, rows) for _ in range(2))
    masses = draws.new_empty(groups, trials, tiles)
    sketch, flags, draws = sketch.contiguous(), usable.contiguous().view(torch.uint8), draws.contiguous()
    counts, options = (rows, tiles, trials), {"TILE": tile, "num_warps": warps_of(tile)}
    for number in range(clusters + 1):
        given = sketch, flags, drawn, best, left, left_then, masses, number, *counts, width, 2 * apart, FARTHER_THAN_ANY
        launch(_measure, (tiles, groups), *given, **options, on=sketch)
        left, left_then = left_then, left
        given = draws, left, masses, drawn, best, picks, number, clusters, *counts, 1 + AS_GOOD
        launch(_draw, (groups,), *given, **options, on=sketch)
    return picks


def tile_of(trials: int) -> PickTile:
    return PickTile(max(16, power_of_2(trials)), ROWS, INNER)


def warps_of(tile: PickTile) -> int:
    """Warps of a program, one for four draws: more sums of a thread would not fit its registers."""
    return tile.trials // 4
