"""Causes of waits of a GPU: launches, Python time, host reads, narrow loads, and copies behind large ones.

Counted and timed on a CPU; no figure is a GPU's. Parts:

    launches    operations of a layer that CUDA would launch: a plain step by --family, and every kind of forward by
                --policy (bench/workloads/launches.py)
    seconds     Python time of a plain layer by --family whose kernels are not started, over as many bare launchers
                (`host_time` in bench/workloads/plain_layers.py)
    waits       host reads in a round of a scheduler with --requests, block-causal and bidirectional, and launches of a
                layer of their forwards
    loads       loads of one byte in the compiled attention kernel, by code of keys and values
    copies      time of a small copy beside a streamed layer's, which moves whole or in pieces, on a simulated link

The last line of stdout says, beside the counts, each null as long as its rows are missing,

    plain_launches_per_layer        of a plain step of LLaDA
    refresh_launches_per_layer      of a refresh of `polestar`
    host_us_per_layer               of a plain step of LLaDA
    host_over_bare_launches         that time over the one of as many bare launchers, in the same round
    waits_per_served_round          the larger median of both kinds
    served_launches_per_layer       the larger mean of both kinds
    byte_loads_in_attention         in the kernels of all codes
    small_copy_wait_over_whole      99th percentile beside a layer in pieces, over that beside a whole layer
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from gpu_parts.kernel_case import interpret
from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads import attention_loads, copy_waits, plain_layers, served_reads
from workloads.launches import count
from workloads.plain_layers import CONFIGS

from tiered.core.checks import unknown_name
from tiered.policies.registry import make_policy

PARTS = ["launches", "seconds", "waits", "loads", "copies"]
POLICIES = ["fast_dllm_dual", "attended", "dkv_pd", "dllm_cache", "elastic_cache", "polestar"]
# The family of served requests, and its policy.
SERVED = {"block-causal": ("sdar", "block_causal"), "bidirectional": ("llada", "fast_dllm_dual")}
AXES: Axes = {
    "part": PARTS,
    "family": [*CONFIGS],
    "policy": POLICIES,
    "rounds": [200],
    "requests": [8],
    "copies": [500],
}
QUICK: Axes = {"family": ["llada"], "policy": POLICIES[:1], "rounds": [20], "requests": [2], "copies": [10]}
OF = ("kind", "code", "way")
TIMED = ("layer_us", "bare_us", "over_bare", "p50_ms", "p99_ms", "p99_over_layer")


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Part by part."""
    for family in axes["family"]:
        if family not in CONFIGS:
            raise unknown_name("family", family, CONFIGS)
    for policy in axes["policy"]:
        make_policy(policy)
    for part in axes["part"]:
        if part == "launches":
            yield from ({"part": part, "family": family} for family in axes["family"])
            yield from ({"part": part, "policy": policy} for policy in axes["policy"])
        elif part == "seconds":
            for family, rounds in product(axes["family"], axes["rounds"]):
                yield {"part": part, "family": family, "rounds": rounds}
        elif part == "waits":
            for requests, served in product(axes["requests"], SERVED):
                yield {"part": part, "served": served, "requests": requests}
        elif part == "loads":
            yield {"part": part, "architecture": attention_loads.ARCHITECTURE}
        elif part == "copies":
            yield from ({"part": part, "copies": copies} for copies in axes["copies"])
        else:
            raise unknown_name("part", part, PARTS)


def measure(settings: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a part."""
    interpret(torch.device("cpu"))
    part = settings["part"]
    if part == "launches" and "policy" in settings:
        yield from (row for row in count(settings["policy"], {}) if "op" not in row)
    elif part == "launches":
        layers, reads = plain_layers.launches(settings["family"])
        yield {"kind": "step", "launches": layers[0], "outside": layers[None], "reads": reads}
    elif part == "seconds":
        yield plain_layers.host_time(settings["family"], rounds=settings["rounds"])
    elif part == "waits":
        yield served_reads.measure(*SERVED[settings["served"]], requests=settings["requests"])
    elif part == "loads":
        yield from attention_loads.measure()
    else:
        yield from copy_waits.measure(copies=settings["copies"], seed=settings["seed"])


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A table for each part."""
    every = [_named(row) for row in merged(rows, of=OF, timed=TIMED)]
    columns: dict[str, dict[str, str]] = {
        "launches": {
            "launches a layer": "{launches:.0f}",
            "outside of layers": "{outside:.0f}",
            "host reads in layers": "{reads:.0f}",
        },
        "seconds": {
            "launches": "{launches:.0f}",
            "µs a layer": "{layer_us:.0f}",
            "bare launchers, µs": "{bare_us:.0f}",
            "over them": "{over_bare:.2f}",
        },
        "waits": {
            "forwards of a round": "{forwards:.1f}",
            "host reads of a round, median": "{reads:g}",
            "at most": "{most_reads}",
            "launches of a layer": "{launches:.1f}",
            "of which": "{by_read}",
        },
        "loads": {
            "of one byte": "{byte_loads}",
            "loads by bytes": "{by_load}",
            "copies by bytes": "{by_copy}",
        },
        "copies": {
            "a small copy, p50, ms": "{p50_ms:.2f}",
            "p99, ms": "{p99_ms:.2f}",
            "p99 over a layer": "{p99_over_layer:.3f}",
        },
    }
    return {f"host_{part}": rows_table("{name}", columns[part], _of(every, part=part)) for part in PARTS}


def last_line(rows: Sequence[Row]) -> dict[str, float | None]:
    """The figures of the last line."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]

    def figure(name: str, **like: Any) -> float | None:
        return next((round(row[name], 3) for row in _of(good, **like)), None)

    waits, launches = ([row[of] for row in _of(good, part="waits") if of in row] for of in ("reads", "launches"))
    loads = [row["byte_loads"] for row in _of(good, part="loads")]
    ways = [figure("p99_ms", part="copies", way=way) for way in (copy_waits.PIECES, copy_waits.WHOLE)]
    return {
        "plain_launches_per_layer": figure("launches", part="launches", family="llada"),
        "refresh_launches_per_layer": figure("launches", part="launches", policy="polestar", kind="refresh"),
        "host_us_per_layer": figure("layer_us", part="seconds", family="llada"),
        "host_over_bare_launches": figure("over_bare", part="seconds", family="llada"),
        "waits_per_served_round": max(waits, default=None),
        "served_launches_per_layer": round(max(launches), 1) if launches else None,
        "byte_loads_in_attention": sum(loads) if loads else None,
        "small_copy_wait_over_whole": round(ways[0] / ways[1], 4) if ways[0] and ways[1] else None,
    }


def _of(rows: Sequence[Row], **like: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in like.items())]


def _named(row: Row) -> Row:
    """The row with its name, and with a cell for each of its counts by name."""
    names = [str(row[of]) for of in ("family", "policy", "served", "code", "way", "kind") if of in row] or [row["part"]]
    names += [f"{row['requests']} requests"] if "requests" in row else []
    cells = {
        f"by_{of}": ", ".join(f"{what}: {number:g}" for what, number in row[of].items())
        for of in ("read", "load", "copy")
        if of in row
    }
    return row | {"name": ", ".join(names)} | cells
