"""The figures of a call as its row has them: each kind of forward beside the floor of its time, and its copies.

The floor is the time of a forward's bytes at the measured bandwidth, or of its arithmetic at the measured rate,
whichever is longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any

import torch
from measuring.device_timer import device_times
from measuring.statistics import spread

from gpu_parts.moved_bytes import copy_bandwidth
from gpu_parts.policy_calls import BLOCK, Measured, PolicyCall
from gpu_parts.setting import Setting
from tiered.core.rates import Rates
from tiered.forward.forward_work import ForwardWork, forward_work
from tiered.models.shape import ModelShape
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.policies.base import StepKind
from tiered.tiers.stats import TierStats, WayStats

_SIDE, _TINY_SIDE = 8192, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least work of one kind of forward.

    Attributes:
        rows: rows of the sequence that it recomputes, on average.
        renewed_rows: rows of `rows` that an update adds to a plain step's, in a layer on average.
        nbytes: bytes that it has to read: the weights once, without the embedding's table, every key and value, and the
            records that an update fetches.
        flops: FLOPs of its matrix products, attention among them.
    """

    rows: float
    renewed_rows: float = 0.0
    nbytes: int
    flops: float

    def figures(self, rates: Rates) -> dict[str, float]:
        """Milliseconds of the bytes and of the arithmetic, and the larger one, which is the floor."""
        bytes_ms = 1000 * self.nbytes / rates.bytes_per_second
        flops_ms = 1000 * self.flops / rates.flops_per_second
        row = {"rows": self.rows, "renewed_rows": self.renewed_rows, "read_bytes": self.nbytes}
        row |= {"gflop": self.flops / 1e9, "bytes_floor_ms": bytes_ms, "flops_floor_ms": flops_ms}
        return row | {"floor_ms": max(bytes_ms, flops_ms)}


@cache
def measured_rates(setting: Setting) -> Rates:
    """Rates of the device in the model's dtype: of a product of random matrices, and of a copy in its memory, read and
    written. Measured once in a process."""
    side, dtype = (_TINY_SIDE, torch.float32) if setting.tiny else (_SIDE, torch.bfloat16)
    draws = torch.Generator(setting.on).manual_seed(setting.seed)
    left, right = (torch.randn(side, side, dtype=dtype, device=setting.on, generator=draws) for _ in range(2))
    product = torch.empty_like(left)
    seconds = device_times(lambda: torch.matmul(left, right, out=product), setting.on, rounds=5, warm_up=3, hold=True)
    return Rates(flops_per_second=2 * side**3 / min(seconds), bytes_per_second=copy_bandwidth(setting.on, setting.tiny))


def floors(
    shape: ModelShape, positions: int, out: GenerationOutput, kinds: Sequence[StepKind]
) -> dict[StepKind, Floor]:
    """The floor of each kind of forward of a call of one sequence, with the median number of rows. An update reads all
    that a plain step reads, and the records that it fetches. Its arithmetic is that of the block's rows and of the rows
    that it renews; each weight is read once for both."""
    by_forward: dict[int, list[int]] = {}
    for update in out.updates:
        by_forward.setdefault(update.forward, []).extend([sum(update.rows)] * update.layers)
    found = {}
    for kind in dict.fromkeys(kinds):
        rows = median(count for count, of in zip(out.rows_per_step, kinds, strict=True) if of is kind)
        work = work_of(shape, positions, round(rows))
        found[kind] = Floor(rows=rows, nbytes=work.read_bytes, flops=work.flops)
        if kind is StepKind.UPDATE and by_forward:
            renewed, plain = mean(map(mean, by_forward.values())), work_of(shape, positions, BLOCK)
            # FLOPs of one more row: keys and values in all layers, the rest in all but the last. The rows that a layer
            # renews have their keys and values from the layer below, so none are computed in the first.
            row = work_of(shape, positions, BLOCK + 1).flops - plain.flops - 4 * shape.width * shape.kv_width
            found[kind] = Floor(
                rows=BLOCK + renewed,
                renewed_rows=renewed,
                nbytes=plain.read_bytes + sum(update.fetched_bytes for update in out.updates) // len(by_forward),
                flops=plain.flops + renewed * row,
            )
    return found


def work_of(shape: ModelShape, positions: int, rows: int) -> ForwardWork:
    """The work of a forward over one sequence."""
    return forward_work(shape, batch=1, context=positions, rows=rows, dtype=shape.dtype, output_rows=BLOCK)


def by_kind(shape: ModelShape, call: PolicyCall, first: Measured, last: Measured, rates: Rates) -> dict[str, Any]:
    """Times by kind of forward, and their ratios to the floor. `again_share`: distance of the medians of two equal
    calls."""
    lowest, before = floors(shape, call.positions, last.out, last.kinds), first.milliseconds()
    found = {}
    for kind, milliseconds in last.milliseconds().items():
        row = times(milliseconds) | lowest[kind].figures(rates)
        row["over_floor"] = row["median_ms"] / row["floor_ms"]
        if first is not last:
            row["again_share"] = abs(times(before[kind])["median_ms"] / row["median_ms"] - 1)
        found[kind.value] = row
    if {StepKind.STEP, StepKind.UPDATE} <= set(lowest) and lowest[StepKind.UPDATE].renewed_rows:
        step, update = lowest[StepKind.STEP], lowest[StepKind.UPDATE]
        # An update that takes renewed rows through each layer together with the block's may stay below this sum.
        in_turn = step.figures(rates)["floor_ms"] + 1000 * (update.flops - step.flops) / rates.flops_per_second
        row = found["update"]
        row |= {"in_turn_floor_ms": in_turn, "over_in_turn_floor": row["median_ms"] / in_turn}
    return found


def copies(stats: TierStats | None) -> dict[str, Any] | None:
    """Copies each way: bytes, their time, and the part of it for which compute stood still. Fetches also have the layer
    that waited longest. None if nothing moves."""
    if stats is None:
        return None
    found = {way.value: _copied(of) for way in (Lane.FETCH, Lane.STORE) if (of := stats.ways[way]).jobs}
    fetches = {layer: ways[Lane.FETCH] for layer, ways in stats.layers.items() if ways[Lane.FETCH].busy_ns}
    if fetches:
        worst = max(fetches, key=lambda layer: fetches[layer].exposed_ns)
        exposed, hidden = fetches[worst].exposed_ns / 1e6, min(of.hidden_ns / of.busy_ns for of in fetches.values())
        found["fetch"] |= {"layers": len(fetches), "most_exposed_layer": worst, "most_exposed_ms": exposed}
        found["fetch"]["least_hidden_share"] = hidden
    return found


def times(milliseconds: list[float]) -> dict[str, float]:
    """Median, and 20th and 80th percentile."""
    low, middle, high = spread(milliseconds)
    return {"forwards": len(milliseconds), "median_ms": middle, "p20_ms": low, "p80_ms": high}


def _copied(way: WayStats) -> dict[str, Any]:
    row: dict[str, Any] = {"jobs": way.jobs, "bytes": way.nbytes, "copy_ms": way.busy_ns / 1e6}
    row |= {"exposed_ms": way.exposed_ns / 1e6, "gb_per_s": way.gigabytes_per_second}
    return row | {"hidden_share": way.hidden_ns / way.busy_ns if way.busy_ns else None}
