"""What a sweep would do: its points, how many are done, the time for the others, and what the largest call costs."""

from collections.abc import Sequence
from typing import Any

from cost_card import cost_card

from sweeping.grid import Grid
from sweeping.point import Point
from sweeping.processes import Job
from sweeping.progress import Expected, duration
from sweeping.store import Store
from tiered.models.config_source import read_config
from tiered.models.families import family_of
from tiered.models.shape import BYTES_PER_ELEMENT


def show_plan(
    model: str, grid: Grid, points: Sequence[Point], store: Store, jobs: Sequence[Job], *, runs: int, at_a_time: int
) -> dict[str, Any]:
    """Print the cost card, the state of every run of every point, and how long `jobs`, which are missing, will take.

    Returns the counts in plain types for JSON.
    """
    print(largest_card(model, grid), end="\n\n")
    missing = {(point.key, run) for point, run in jobs}
    failed = 0
    for point in points:
        states = []
        for run in range(runs):
            measurement = store.measurements.get((point.key, run))
            failed += measurement is not None and measurement.failed
            states.append("to do" if measurement is None or (point.key, run) in missing else measurement.status)
        print(f"{point.key}  {point}  {', '.join(states)}")
    left = Expected(points, store.measurements).seconds(jobs, at_a_time)
    done = runs * len(points) - len(jobs)
    time = "" if not jobs else "; no telling how long" if left is None else f"; about {duration(left)}"
    print(f"{len(points)} points, {runs} runs: {done} done, {len(jobs)} to do{time}")
    counts = {"points": len(points), "runs": runs, "done": done, "failed": failed, "to_do": len(jobs)}
    return counts | {"estimated_seconds": left}


def largest_card(model: str, grid: Grid) -> str:
    """The cost card of the largest call, a step over one block."""
    config = read_config(model)
    shape = family_of(config).shape(config)
    common = grid.common
    return str(
        cost_card(
            shape,
            batch=max(grid.axes["batch"]),
            context=max(grid.axes["context"]) + common.max_new_tokens,
            rows=common.block_length,
            dtype_bytes=BYTES_PER_ELEMENT[shape.dtype],
        )
    )
