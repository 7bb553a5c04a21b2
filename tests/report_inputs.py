"""Tables of measurements for tests of the report: a small one of every study that it draws."""

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from measuring.table import Row, write_table

MIB = 2**20
REFUSED = "weights take 7 MiB | the budget is <b>4</b> MiB"
OF = {  # of each study: columns that tell the rows of a point apart
    **dict.fromkeys(("regimes", "throughput"), ()),
    **dict.fromkeys(("compare", "sweep", "frontier"), ("task", "size")),
    "memory": ("about", "forward", "tier", "account", "layer", "what"),
    **{"overlap": ("layer",), "ops": ("op",)},
}


def row(settings: Row, figures: Row, *, run: int = 0) -> Row:
    """As the store has it: the point is its settings."""
    head = {"point": str(sorted(settings.items())), "run": run, "stamp": "a", "took_s": 1.0, "status": "ok"}
    return head | settings | figures


def regimes() -> Iterator[Row]:
    """`none` wins short calls, `fast_dllm_dual` long ones; with two blocks they are alike; no policy takes 4096. Under
    a link `polestar` alone was measured, the only one that moves anything."""
    seconds = {"none": (1.0, 4.0), "none-again": (1.02, 4.0), "fast_dllm_dual": (2.0, 2.0), "polestar": (3.0, 3.0)}
    for policy, blocks, (number, context) in product(seconds, (1, 2), enumerate((256, 1024))):
        settings = {"policy": policy, "context": context, "blocks": blocks, "steps": 4, "width": 64}
        took = {"none": 2.01, "none-again": 2.05}.get(policy, 3.0) if blocks == 2 else seconds[policy][number]
        took = 2.0 if blocks == 2 and policy == "fast_dllm_dual" else took
        sizes = {"device_bytes": (1 if "none" in policy else 2) * MIB, "host_bytes": 0, "rows_computed": 9}
        figures = {"seconds": took, "moved_bytes": 7 if policy == "polestar" else 0} | sizes
        yield row(settings, figures)
        if policy == "polestar" and blocks == 1:
            yield row(settings | {"link": 10}, figures | {"seconds": 1.5})
        if blocks == 1:
            yield row(settings | {"context": 4096}, {"status": "refused", "why": REFUSED})


def answers(**settings: Any) -> Iterator[Row]:
    """Two tasks, the lookup with the long prompts; two runs."""
    right, speed, size = settings.pop("right"), settings.pop("speed"), settings.pop("size")
    for run, task in product((0, 1), ("sort", "lookup")):
        of = {"task": task, "examples": 50, "correct": right} | ({"size": 512} if task == "lookup" else {})
        fast = {"tokens_per_second": (speed + run) * (9 if task == "sort" else 1), "seconds": 2.0, "nfe": 16.0}
        yield row(settings, of | fast | {"device_bytes": size * MIB, "host_bytes": 0, "bytes": "booked"}, run=run)


def sweep() -> Iterator[Row]:
    """Three C by two T; one point is refused, one has failed."""
    for number, (clusters, threshold) in enumerate(product(("auto", 4, 16), (0, 8))):
        knobs = {"policy": "polestar", "clusters": clusters, "top_m": 1, "update_threshold": threshold}
        if number in (2, 5):
            yield row(
                knobs, {"status": "refused" if number == 2 else "failed", "why": REFUSED if number == 2 else "died"}
            )
        else:
            yield from answers(**knobs, right=50 - 5 * number, speed=10 + number, size=20 + number)
    yield from answers(policy="none", right=50, speed=5, size=10)


def frontier() -> Iterator[Row]:
    """One cell with `none`, and two settings of each of two policies, of which one is near: that of `polestar` has
    fewer rows."""
    right = "1" * 180 + "0" * 20
    for policy, options, lost, rows, seconds in (
        ("none", {}, 0, 2000.0, 4.0),
        ("dllm_cache", {"prompt_interval": 50}, 60, 200.0, 1.0),
        ("dllm_cache", {"prompt_interval": 2}, 1, 1000.0, 3.0),
        ("polestar", {"update_threshold": 4, "top_m": 4}, 30, 300.0, 1.2),
        ("polestar", {"update_threshold": 0, "top_m": 4}, 2, 400.0, 1.5),
    ):
        settings = {"model": "embedded", "split": "validation", "rule": "one a step", "policy": policy}
        answers = {"task": "merge", "size": 1024, "examples": 200, "right": "0" * lost + right[lost:]}
        cost = {"nfe": 100.0, "rows_per_forward": rows / 100, "seconds": 200 * seconds}
        sizes = {"device_bytes": 9 * MIB, "host_bytes": 0, "correct": 180 - lost, "tokens_per_second": 9.0}
        yield row(settings | {"options": options}, answers | cost | sizes)


def compare() -> Iterator[Row]:
    """The smallest; one that is larger and faster; one that is faster still and wrong; one whose bytes are counted."""
    for policy, right, speed, size in (("none", 50, 5, 10), ("polestar", 49, 9, 20), ("dllm_cache", 30, 40, 20)):
        yield from answers(policy=policy, rule="one", right=right, speed=speed, size=size)
    for each in answers(policy="transformers, cache", rule="one", right=50, speed=50, size=9):
        yield each | {"bytes": "counted"}


def memory() -> Iterator[Row]:
    """A call of three forwards, with checks, copies and drift."""
    settings = {"call": "polestar & <co>", "policy": "polestar"}
    for forward, kind in ((-1, ""), (0, "refresh"), (1, "step")):
        at = {"about": "bytes", "forward": forward, "block": 0, "pass": kind}
        for tier, account, size in (("device", "weights", 7), ("device", "key", 1 + forward), ("host", "hidden", 2)):
            yield row(settings, at | {"tier": tier, "account": account, "bytes": size * MIB})
    yield row(settings, {"about": "check", "tier": "host", "what": "kept", "agrees": True})
    yield row(
        settings, {"about": "check", "tier": "device", "what": "kept", "agrees": False, "status": "failed", "why": "?"}
    )
    for layer in (1, 2):
        yield row(settings, {"about": "copies", "layer": layer, "busy_ms": 4.0, "exposed_ms": 1.0, "bytes": 300})
        for forward in (0, 2):
            yield row(
                settings, {"about": "drift", "forward": forward, "layer": layer, "mean": 10.0**-layer, "largest": 1.0}
            )


def overlap() -> Iterator[Row]:
    """Two links; layer -1 is all of them."""
    for number, layer in product((4, 5), (-1, 1, 2)):
        figures = {"layer": layer, "copy_ms": 40.0, "exposed_ms": 8.0 - 7 * (number - 4), "hidden_share": 0.8}
        yield row({"link": f"PCIe {number}"}, figures)


def ops() -> Iterator[Row]:
    """Ten operations, more than there are colours."""
    for policy, number in product(("none", "polestar"), range(10)):
        of = {"op": f"op{number}", "ms": 10.0 - number, "share": (10 - number) / 60, "count": 3}
        yield row({"policy": policy, "model": "random"}, of | {"wall_ms": 60.0, "covered": 0.97, "forwards": 2})


def throughput() -> Iterator[Row]:
    """Two policies at two contexts, in two rounds."""
    for policy, context, run in product(("none", "polestar"), (64, 512), (0, 1)):
        speed = (90.0 if policy == "none" else 30.0) * 64 / context + run
        yield row(
            {"policy": policy, "context": context, "batch": 1}, {"tokens_per_second": speed, "nfe": 32.0}, run=run
        )


STUDIES = {each.__name__: each for each in (regimes, compare, frontier, sweep, memory, overlap, ops, throughput)}


def write(folder: Path, study: str, rows: Iterable[Row]) -> None:
    """The table of a study."""
    (folder / study).mkdir(parents=True)
    about = {"study": study, "command": "", "stamps": {"a": {"revision": "0123abc", "processor": "test processor"}}}
    write_table(folder / study / "rows.parquet", list(rows), about)
