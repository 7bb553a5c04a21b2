"""Measures, keeps and shows: one command for every figure of this repository.

    python bench/measure.py STUDY                    # measure; goes on if it was interrupted, else begins anew
    python bench/measure.py STUDY --runs 3           # three rounds over all points, for medians and spreads
    python bench/measure.py STUDY --show --into docs/measurements/STUDY.md    # the tables, and put them into a page
    python bench/measure.py STUDY --help             # its axes, each a flag

A point is a model, a policy, a workload, a budget and a device, in a process of its own. Rows, refusals and failures
among them, lie in bench/results/STUDY/rows.parquet. Exit status: 1 if a point failed, 2 a wrong command, 130 Ctrl-C.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring.interrupts import stop_wish
from measuring.pages import fill_marks
from measuring.point import Job, Point, words
from measuring.process import WORKER
from measuring.progress import PLAIN, Expected, Guess, duration, reporting
from measuring.provenance import ROOT, command_line, provenance
from measuring.runner import run_group
from measuring.store import Store, locked, read_rows
from measuring.study import names, parse_values, points_of, study_named
from rich.console import Console

RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT = 3600.0


def parser_of(study: ModuleType) -> argparse.ArgumentParser:
    """The command line of one study."""
    name = study.__name__.rpartition(".")[2]
    parser = argparse.ArgumentParser(
        prog=f"measure.py {name}", description=study.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    axes = parser.add_argument_group("axes, as lists with commas")
    for axis, values in study.AXES.items():
        default = ",".join("none" if value is None else str(value) for value in values)
        axes.add_argument(f"--{axis.replace('_', '-')}", metavar="LIST", help=f"default: {default}".replace("%", "%%"))
    run = parser.add_argument_group("the run")
    run.add_argument("--runs", type=int, default=1, metavar="N", help="rounds over all points (default: 1)")
    run.add_argument("--keep", action="store_true", help="measure only what the table does not have yet")
    run.add_argument("--retry", action="store_true", help="as --keep, and again what failed")
    run.add_argument("--filter", metavar="NAME=VALUE|…,…", help="these points alone; != leaves out")
    run.add_argument(
        "--quick", action="store_true", help="a few small points, to see that all works; not into results/"
    )
    run.add_argument("--dry-run", action="store_true", help="measure nothing: the points, and the time they will take")
    run.add_argument("--show", action="store_true", help="measure nothing: the tables of what is there")
    run.add_argument("--into", type=Path, metavar="PAGE.md", help="put the tables between the marks of this page, too")
    run.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the rows (default: bench/results/{name})")
    if "threads" not in study.AXES:
        run.add_argument("--threads", type=int, default=1, help="of torch, in each process (default: 1)")
    run.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    run.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    run.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="of a point (default: 3600)")
    flags = getattr(study, "LOCAL", {})
    for flag, told in flags.items():
        run.add_argument(f"--{flag.replace('_', '-')}", metavar="PATH", help=told)
    parser.set_defaults(local=tuple(flags))
    run.add_argument("--worker", metavar="COMMAND", help="another command for the process of a point")
    return parser


def plan(study: ModuleType, args: argparse.Namespace) -> tuple[list[Point], dict[str, Any]]:
    """The points, and keywords of the study's `measure` from this machine. Raises `ValueError` for wrong flags."""
    for name, least in (("runs", 1), ("threads", 1), ("seed", 0)):
        if name not in study.AXES and getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)}; a whole number from {least} is allowed")
    if not args.timeout > 0:
        raise ValueError(f"--timeout {args.timeout:g}; seconds above 0 are allowed")
    axes = dict(study.AXES) | (dict(study.QUICK) if args.quick else {})
    for axis, values in study.AXES.items():
        if (text := getattr(args, axis)) is not None:
            axes[axis] = parse_values(axis, text, values)
    common = {name: getattr(args, name) for name in ("device", "threads", "seed") if name not in study.AXES}
    flags = {flag: getattr(args, flag) for flag in args.local}
    local = study.local(axes, **flags) if hasattr(study, "local") else {}
    return points_of(study, axes, common, args.filter), local


def measure(
    args: argparse.Namespace,
    points: Sequence[Point],
    local: dict[str, Any],
    store: Store,
    console: Console,
    guess: Guess | None,
) -> int:
    """Measure missing points and write the table. Returns the signal that ended it, or 0. `guess`: see `Expected`."""
    known = store.unfinished if not (args.keep or args.retry) else store.finished | store.unfinished
    jobs = [Job(point, run) for run in range(args.runs) for point in points]
    left = [job for job in jobs if job.name not in known or (args.retry and worst(known[job.name]) == "failed")]
    made_by = {name: value for name, value in provenance().items() if name not in ("command", "threads")}
    expected, shared = Expected(store.finished | store.unfinished, guess), _shared(points)
    command = WORKER if args.worker is None else shlex.split(args.worker)
    with stop_wish() as wish, reporting(len(left), console) as reporter, tempfile.TemporaryFile(buffering=0) as log:
        for job in list(left):
            ended = run_group([job], log=log, local=local, timeout=args.timeout, stop=wish, command=command)
            with closing(ended):
                for each in ended:
                    store.add(job, each.rows, each.seconds, made_by)
                    left.remove(job)
                    expected.add(each)
                    reporter.ended(words(job.point.settings, without=shared), each, expected.seconds(left))
            if wish():
                break
        if not left:
            store.merge(command_of(args))
    return wish.signal or 0


def command_of(args: argparse.Namespace) -> str:
    """The command line, without the paths that only this machine knows."""
    said = sys.argv
    for path in filter(None, (getattr(args, flag) for flag in args.local)):
        said = [re.sub(rf"(^|=){re.escape(path)}$", r"\1PATH", word) for word in said]
    return command_line(said)


def summary(args: argparse.Namespace, points: Sequence[Point], store: Store) -> dict[str, Any]:
    """Counts, for the last line."""
    wanted = {(point.key, run) for point in points for run in range(args.runs)}
    own = [rows for name, rows in (store.finished | store.unfinished).items() if name in wanted]
    statuses = [worst(rows) for rows in own]
    out = args.out.resolve()
    return {
        "out": str(out.relative_to(ROOT)) if out.is_relative_to(ROOT) else str(args.out),
        "points": len(points),
        "runs": args.runs,
        **{status: statuses.count(status) for status in ("ok", "refused", "failed")},
        "missing": len(wanted) - len(own),
        "rows": sum(map(len, own)),
        "skipped": store.skipped,
    }


def show(study: ModuleType, args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, and put them into a page. Returns counts and the study's numbers, for the last line."""
    rows, about = read_rows(args.out)
    tables = study.tables(rows)
    for mark, text in tables.items():
        print(f"{mark}\n\n{text}\n")
    if len(about["stamps"]) > 1:
        print("rows of several machines, versions or revisions: compare no speeds among them\n")
    told = {} if args.into is None else {"filled": fill_marks(args.into, tables)}
    return {"rows": len(rows)} | told | (study.last_line(rows) if hasattr(study, "last_line") else {})


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0].startswith("-"):
        told = "\n".join(f"  {name:12} {what}" for name, what in names().items())
        overview = argparse.ArgumentParser(
            description=__doc__, epilog=f"studies:\n{told}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        overview.add_argument("study", metavar="STUDY", help="one of those below")
        overview.parse_args(argv)
    try:
        study = study_named(argv[0])
    except ValueError as error:
        print(f"measure.py: error: {error}", file=sys.stderr)
        return 2
    parser = parser_of(study)
    args = parser.parse_args(argv[1:])
    own = RESULTS / argv[0]
    if args.quick and (args.out is None or args.out.resolve() == own):
        parser.error("--quick needs --out DIR: a few small points would stand among the results")
    args.out, console = args.out or own, Console(stderr=True)
    try:
        if args.show:
            print(json.dumps(show(study, args)))
            return 0
        points, local = plan(study, args)
        if args.dry_run:
            print(json.dumps(dry_run(args, points, console, getattr(study, "expected", None))))
            return 0
        with locked(args.out):
            store = Store(args.out, points)
            for name, why in store.skipped.items():
                console.print(f"not used: {name}: {why}", **PLAIN)
            try:
                stopped = measure(args, points, local, store, console, getattr(study, "expected", None))
            except OSError as error:
                kept = "what is finished is kept; the same command goes on from there"
                console.print(f"measure.py: error: {error.filename or args.out}: {error.strerror}; {kept}", **PLAIN)
                return 1
        counts = summary(args, points, store)
        if counts["missing"]:
            console.print(f"{counts['missing']} measurements are missing; the same command goes on", **PLAIN)
        else:
            counts = show(study, args) | counts
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(counts))
    return 128 + stopped if stopped else int(counts["failed"] > 0)


def dry_run(args: argparse.Namespace, points: Sequence[Point], console: Console, guess: Guess | None) -> dict[str, Any]:
    """Print the points, and the time that they will take by measurements so far, or by `guess`."""
    store, shared = Store(args.out, points), _shared(points)
    for point in points:
        console.print(words(point.settings, without=shared) or point.key, **PLAIN)
    seconds = Expected(store.finished | store.unfinished, guess).seconds([Job(point) for point in points] * args.runs)
    console.print("nothing was measured yet" if seconds is None else f"about {duration(seconds)}", **PLAIN)
    return {"points": len(points), "runs": args.runs, "shared": shared, "seconds": seconds}


def _shared(points: Sequence[Point]) -> dict[str, Any]:
    """Settings that all points have alike."""
    first = points[0].settings
    return {name: value for name, value in first.items() if all(p.settings.get(name) == value for p in points)}


def worst(rows: Sequence[dict[str, Any]]) -> str:
    """The worst status of a measurement: "failed" (its process died or raised), "refused" (by the library), or "ok"."""
    return next((status for status in ("failed", "refused") if any(row["status"] == status for row in rows)), "ok")


if __name__ == "__main__":
    sys.exit(main())
