"""Sweep over clusters C, top_m M, update_threshold T, policies, codecs, contexts, batches, budgets and confidences.

    python bench/sweep.py --dry-run                                     # the points, and what they will take
    python bench/sweep.py                                               # the report's grid; goes on if it was begun
    python bench/sweep.py --clusters 4,8 --update-threshold 0,2 --examples sort=4,lookup=1 --out FOLDER    # a small one
    python bench/sweep.py --filter 'policy=polestar,update_threshold=0|1' --num-runs 3

Every point of the full grid is measured in a process of its own, on the embedded model's tasks. An axis that a policy
does not have is no axis of it, so `none` is one point whatever C, M and T; a preset keeps what it sets. It may be
stopped or killed at any time: the same command goes on with what is missing. A point is known by a hash of its settings
and of the model's weights, so what was measured otherwise is never mixed in.

Writes rows.parquet (a row for every task of every run of a point) and run.json (versions, machine, revision, command)
to --out, and to its folder points/ a file for each measurement as soon as there is one. docs/benchmarks.md explains the
columns. The last line of stdout is JSON. The exit status is 1 if a point failed, 2 for a command that cannot be
followed, 130 after Ctrl-C.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from rich.console import Console
from sweeping.command_line import grid_of, parser_of
from sweeping.dry_run import show_plan
from sweeping.filter import filtered
from sweeping.grid import Grid
from sweeping.interrupts import stop_wish
from sweeping.measurement import Measurement
from sweeping.point import Point
from sweeping.processes import WORKER, Ended, Job, run_all
from sweeping.progress import PLAIN, Expected, reporting
from sweeping.store import POINTS, Store, locked

from tiered.core.provenance import ROOT, provenance


def to_do(
    points: Sequence[Point], runs: int, known: Mapping[tuple[str, int], Measurement], *, retry: bool
) -> list[Job]:
    """What is missing, run by run, so that a slow spell of the machine hits all points."""
    jobs = [(point, run) for run in range(runs) for point in points]

    def missing(job: Job) -> bool:
        measurement = known.get((job[0].key, job[1]))
        return measurement is None or (retry and measurement.failed)

    return [job for job in jobs if missing(job)]


def measure(args: argparse.Namespace, grid: Grid, points: Sequence[Point], store: Store, console: Console) -> int:
    """Measure what is missing and write the table; the signal that ended it early, or 0."""
    jobs = to_do(points, args.num_runs, store.measurements, retry=args.retry)
    made_by = provenance()
    made_on = {name: value for name, value in made_by.items() if name != "command"}
    expected = Expected(points, store.measurements)
    left = list(jobs)
    with stop_wish() as wish, reporting(len(jobs), console) as reporter:
        ended = run_all(
            jobs,
            lambda job: {"settings": job[0].settings(), "model": args.model, "run": job[1]},
            command=WORKER if args.worker is None else shlex.split(args.worker),
            at_a_time=args.jobs,
            timeout=args.timeout,
            stop=wish,
        )
        with closing(ended):
            for each in ended:
                measurement = taken(each, made_on)
                store.add(each.job[0], measurement)
                left.remove(each.job)
                if not measurement.failed:
                    expected.add(each.job[0], measurement.seconds)
                reporter.ended(each.job, measurement, expected.seconds(left, args.jobs))
        store.merge(grid.as_dict(), made_by)
    return wish.signal or 0


def taken(ended: Ended, made_on: Mapping[str, Any]) -> Measurement:
    """What a process gave, or why it gave nothing."""
    point, run = ended.job
    why = ended.why
    if why is None:
        try:
            return Measurement.of(point, run, ended.rows, ended.seconds, made_on)
        except ValueError as error:
            why = f"rows that cannot be: {error}"
    return Measurement.failure(point, run, why, ended.seconds, made_on)


def summary(args: argparse.Namespace, points: Sequence[Point], store: Store) -> dict[str, Any]:
    """Counts, for the last line."""
    keys = {(point.key, run) for point in points for run in range(args.num_runs)}
    own = [measurement for key, measurement in store.measurements.items() if key in keys]
    by_status = {status: sum(each.status == status for each in own) for status in ("ok", "refused", "failed")}
    out = args.out.resolve()
    return {
        "out": str(out.relative_to(ROOT)) if out.is_relative_to(ROOT) else str(args.out),
        "points": len(points),
        "runs": args.num_runs,
        **by_status,
        "missing": len(keys) - len(own),
        "rows": sum(len(each.rows) for each in store.measurements.values()),
        "skipped": len(store.skipped),
    }


def tell_skipped(store: Store, console: Console) -> None:
    """Each reason once, with the first file and the number of others."""
    files: dict[str, list[str]] = {}
    for each in store.skipped:
        files.setdefault(each.why, []).append(each.file)
    for why, own in files.items():
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        console.print(f"skipped {own[0]}{more}: {why}", **PLAIN)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    args = parser.parse_args(argv)
    for name in ("num_runs", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}; a whole number from 1 is allowed")
    if not args.timeout > 0:
        parser.error(f"--timeout {args.timeout:g}; seconds above 0 are allowed")
    try:
        grid = grid_of(args)
        points = grid.points()
        if args.filter is not None:
            points = filtered(points, args.filter)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    torch.set_num_threads(args.threads)  # as in the processes: provenance says it
    console = Console(stderr=True)
    store = Store(folder=args.out, common=grid.common)
    if args.dry_run:
        store.read()
        tell_skipped(store, console)
        jobs = to_do(points, args.num_runs, store.measurements, retry=args.retry)
        sizes = {"runs": args.num_runs, "at_a_time": args.jobs}
        print(json.dumps(show_plan(args.model, grid, points, store, jobs, **sizes)))
        return 0
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(args.out))
        except ValueError as error:
            parser.error(str(error))
        store.read()
        tell_skipped(store, console)
        try:
            stopped = measure(args, grid, points, store, console)
        except OSError as error:
            kept = f"what is finished is kept in {args.out / POINTS}; the same command goes on from there"
            console.print(f"sweep.py: error: {error.filename or args.out}: {error.strerror}; {kept}", **PLAIN)
            return 1
    counts = summary(args, points, store)
    if len(store.made_on) > 1:
        console.print("rows of several machines, versions or revisions, see run.json: compare no speeds", **PLAIN)
    if stopped:
        console.print(f"stopped with {counts['missing']} measurements missing; the same command goes on", **PLAIN)
    if counts["failed"]:
        console.print(f"{counts['failed']} measurements failed; --retry measures them again", **PLAIN)
    print(json.dumps(counts))
    return 128 + stopped if stopped else int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
