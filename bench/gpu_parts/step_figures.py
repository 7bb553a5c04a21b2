"""The figures of a call as its row has them: each kind of forward beside its floor, and what was copied."""

from typing import Any

import numpy as np
from cost_card import Rates

from gpu_parts.policy_calls import Measured, PolicyCall
from gpu_parts.step_floors import floors
from tiered.models.shape import ModelShape
from tiered.offload.lane import Lane
from tiered.policies.base import StepKind
from tiered.tiers.stats import TierStats, WayStats


def by_kind(shape: ModelShape, call: PolicyCall, first: Measured, last: Measured, rates: Rates) -> dict[str, Any]:
    """By kind of forward: times, and how they stand to the floor. `again_share`: how far the medians of two equal calls
    lie apart."""
    lowest, before = floors(shape, call.positions, last.out, last.kinds), first.milliseconds()
    found = {}
    for kind, milliseconds in last.milliseconds().items():
        row = times(milliseconds) | lowest[kind].figures(rates)
        row["over_floor"] = row["median_ms"] / row["floor_ms"]
        if first is not last:
            row["again_share"] = abs(times(before[kind])["median_ms"] / row["median_ms"] - 1)
        found[kind.value] = row
    if {StepKind.STEP, StepKind.UPDATE} <= set(lowest) and lowest[StepKind.UPDATE].renewed_rows:
        step, update = lowest[StepKind.STEP].figures(rates), found["update"]
        # What takes the renewed rows through each layer together with the block's may stay below this sum.
        in_turn = step["floor_ms"] + 1000 * (
            (lowest[StepKind.UPDATE].flops - lowest[StepKind.STEP].flops) / rates.flops_per_second
        )
        update |= {"in_turn_floor_ms": in_turn, "over_in_turn_floor": update["median_ms"] / in_turn}
    return found


def copies(stats: TierStats | None) -> dict[str, Any] | None:
    """Copies each way: bytes, their time, and what of it compute stood still for; of fetches, the layer that waited
    longest as well. None where nothing moves."""
    if stats is None:
        return None
    found: dict[str, Any] = {
        way.value: _copied(of_way) for way in (Lane.FETCH, Lane.STORE) if (of_way := stats.ways[way]).jobs
    }
    fetches = {layer: ways[Lane.FETCH] for layer, ways in stats.layers.items() if ways[Lane.FETCH].busy_ns}
    if fetches:
        worst = max(fetches, key=lambda layer: fetches[layer].exposed_ns)
        found["fetch"] |= {
            "layers": len(fetches),
            "most_exposed_layer": worst,
            "most_exposed_ms": fetches[worst].exposed_ns / 1e6,
            "least_hidden_share": min(of.hidden_ns / of.busy_ns for of in fetches.values()),
        }
    return found


def times(milliseconds: list[float]) -> dict[str, float]:
    """Median and the span that three fifths lie in."""
    low, middle, high = np.percentile(milliseconds, (20, 50, 80)).tolist()
    return {"forwards": len(milliseconds), "median_ms": middle, "p20_ms": low, "p80_ms": high}


def _copied(way: WayStats) -> dict[str, Any]:
    return {
        "jobs": way.jobs,
        "bytes": way.nbytes,
        "copy_ms": way.busy_ns / 1e6,
        "exposed_ms": way.exposed_ns / 1e6,
        "hidden_share": way.hidden_ns / way.busy_ns if way.busy_ns else None,
        "gb_per_s": way.gigabytes_per_second,
    }
