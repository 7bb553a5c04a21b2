"""Checks and measurements that need a GPU, in one run of nine minutes: exactness, speed, and the books of memory.

    python bench/gpu_day.py                            # on a CUDA machine; writes bench/results/gpu/DEVICE.json
    python bench/gpu_day.py --parts kernels,floors --label after    # some parts alone: DEVICE-after.json
    python bench/gpu_day.py --rehearse --out FOLDER    # the same code at tiny sizes on the CPU, about a minute
    python bench/gpu_day.py --show FILE                # the summary of a file

The parts of bench/studies/gpu_day.py run in order, each in processes of its own. So a kernel that takes the device
down, or never ends, costs one row. Each part has its share of the time, and the next part may use the rest of it. The
file is written anew with every row, because a lent machine may be gone at any time. gpu_day.log beside it has the
output of the processes. Nothing is fetched from a network. docs/gpu.md says how to read the file. The last line of
stdout is JSON. Exit status: 1 if something failed, 2 for a wrong command, 130 after Ctrl-C.
"""

import argparse
import contextlib
import faulthandler
import json
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import torch
from measuring.interrupts import stop_wish
from measuring.pages import fill_marks
from measuring.point import Job, Row
from measuring.process import WORKER
from measuring.progress import PLAIN, reporting
from measuring.provenance import ROOT, provenance
from measuring.runner import STOPPED, Ended, run_group
from measuring.study import points_of
from rich.console import Console
from studies import gpu_day as study
from studies.gpu_day import APART, PARTS

from tiered.core.checks import unknown_name
from tiered.core.whole_file import write_then_rename

RESULTS = Path(__file__).resolve().parent / "results"
MINUTES = 9.0
CONSOLE = Console(stderr=True)
REHEARSAL = "a rehearsal at tiny sizes on a CPU: no figure in it means anything"
_CLOSING = 8.0  # seconds kept for the end: a process that is slow to die, the summary
_MOST_NAMED = 40  # rows that the last line names: only the end of a long output may come back from a lent machine


class Day:
    """The `rows` of a day so far, and `head`, their origin. The file at `path` is whole at any time. `broken`: why the
    file is not up to date; None if it is."""

    def __init__(self, head: dict[str, Any], rows: list[Row], path: Path | None = None) -> None:
        self.head, self.rows, self.path = head, rows, path
        self.broken: str | None = None

    def add(self, ended: Ended) -> None:
        """Keep the rows of a case."""
        settings = ended.job.point.settings
        head = {name: settings[name] for name in ("part", "case", "size")} | {"took_s": round(ended.seconds, 2)}
        for row in ended.rows:
            self.rows.append(head | {name: value for name, value in row.items() if name != "why" or value})
        self.save()

    def save(self) -> None:
        """Write the file anew, a row a line, so that a difference between two days can be read. An error is printed
        once, and the next row tries again."""
        if self.path is None:
            return
        lines = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        text = json.dumps(self.head | {"rows": []}, indent=1).removesuffix("[]\n}") + f"[\n{lines}\n ]\n}}\n"
        try:
            write_then_rename(self.path, lambda part: part.write_text(text, encoding="utf-8"))
            self.broken = None
        except OSError as error:
            if self.broken is None:
                lost = "what is measured from now on may not be in it"
                CONSOLE.print(f"gpu_day.py: error: {self.path}: {error.strerror}; {lost}", **PLAIN)
            self.broken = error.strerror or "cannot be written"

    def show(self) -> int:
        """Print the summary and the line for programs, the latter even if a table fails. Returns the exit status."""
        failed = [f"{row['part']}: {row['case']}" for row in self.rows if row["status"] == "failed"]
        counts = {row["part"]: Counter[str]() for row in self.rows}
        for row in self.rows:
            counts[row["part"]][row["status"]] += 1
        path = self.path and str(self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path)
        last = {name: self.head[name] for name in ("device", "seconds", "stopped_by", "rehearsal")}
        with contextlib.suppress(OSError):
            try:
                print(", ".join(f"{name}: {value}" for name, value in last.items() if value))
                print(*study.tables(self.rows).values(), sep="\n\n", end="\n\n")
            except Exception:  # rows that no table expects: the figures are in the file, and programs read on
                traceback.print_exc()
            last |= {"file": path, "file_error": self.broken, "rows": counts}
            last |= {"failed": failed[:_MOST_NAMED], "more_failed": len(failed[_MOST_NAMED:])}
            print(json.dumps(last), flush=True)
        return int(bool(failed or self.broken))


def main(argv: Sequence[str] | None = None) -> int:
    began, parser = time.monotonic(), _parser()
    args = parser.parse_args(argv)
    try:
        if args.show is not None:
            return _shown(args).show()
        parts = _checked(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    seconds, own = 60 * args.minutes, None  # the error that ended the run
    head = {"study": "gpu_day", "rehearsal": args.rehearse} | ({"note": REHEARSAL} if args.rehearse else {})
    head |= {"device": None, "seconds": None, "stopped_by": None, "minutes": args.minutes, "seed": args.seed}
    day = Day(head | provenance(), [])
    # If this process hangs, its end is the end of all others, and the file is whole at any time.
    faulthandler.dump_traceback_later(max(began + seconds - time.monotonic(), 0.1), exit=True, file=2)
    try:
        with stop_wish() as wish, contextlib.suppress(KeyboardInterrupt):
            try:
                measure(args, parts, day, end=began + seconds - min(_CLOSING, seconds / 10), stop=wish)
            except FileExistsError as error:
                parser.error(str(error))
            except Exception as error:  # earlier rows are worth the summary
                traceback.print_exc()
                own = f"{type(error).__name__} in gpu_day.py"
        stopped_by = own if wish.signal is None else signal.Signals(wish.signal).name
        day.head |= {"seconds": round(time.monotonic() - began, 1), "stopped_by": stopped_by}
        day.save()
        status = day.show()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return status or int(bool(own)) if wish.signal is None else 128 + wish.signal


def measure(args: argparse.Namespace, parts: Sequence[str], day: Day, *, end: float, stop: Callable[[], bool]) -> None:
    """Measure `parts`, each with its share of the time until `end` and the rest of the shares before it.

    Raises:
        FileExistsError: the file of this device is there and must not be written over.
    """
    common = {"device": "cpu" if args.rehearse else "cuda", "threads": torch.get_num_threads(), "seed": args.seed}
    axes = {"part": parts, "size": ["tiny" if args.rehearse else "full"]}
    points = points_of(study, axes, common)
    command = WORKER if args.worker is None else shlex.split(args.worker)
    if args.rehearse:  # its times do not count, and on busy cores threads that spin while they wait take far longer
        command = ("env", "OMP_WAIT_POLICY=passive", *command)
    due = time.monotonic()
    scale = (end - due) / sum(PARTS[name].seconds for name in parts)
    with _log(args.out) as log, reporting(len(points), CONSOLE) as reporter:
        for name in parts:
            due += scale * PARTS[name].seconds
            left = [Job(point) for point in points if point.settings["part"] == name]
            stem = day.path and str(day.path.with_suffix(""))
            # With more time than the parts need, a case may take longer; with less, the part's end comes first.
            limits = {"timeout": PARTS[name].case_seconds * max(1.0, scale), "limit": due - time.monotonic()}
            group = run_group(tuple(left), log=log, local={"stem": stem}, stop=stop, command=command, **limits)
            with closing(group):
                for ended in group:
                    left.remove(ended.job)
                    day.add(ended)
                    with contextlib.suppress(OSError):  # stderr may be a full disk or a closed pipe
                        case = f"{name}: {ended.job.point.settings['case']}"
                        reporter.ended(case, ended, end - time.monotonic())
            for job in left:
                day.add(Ended(job=job, rows=[{"status": "skipped", "why": STOPPED}], seconds=0.0))
            if day.path is None:
                day.head["device"] = next((row["name"] for row in day.rows if "name" in row), None)
                day.path = _path(args, day.head["device"])
                day.save()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it (default: {MINUTES:g})")
    parser.add_argument("--parts", metavar="LIST", help=f"some alone: {', '.join(list(PARTS)[1:])}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: bench/results/gpu")
    parser.add_argument("--label", default="", help="behind the device's name in the file's, such as before")
    parser.add_argument("--replace", action="store_true", help="write over the file of another day")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU; needs --out")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only the summary of this file")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="with --show: put the tables into this page, too")
    parser.add_argument("--worker", metavar="COMMAND", help="another command for the process of a part")
    return parser


def _checked(args: argparse.Namespace) -> list[str]:
    """The parts that `args` asks for, in the order of `PARTS`, always with "machine". Fills in `args.out`. Raises
    `ValueError` for wrong flags."""
    if not args.rehearse and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --rehearse --out FOLDER goes through the same code on the CPU")
    if args.rehearse and args.out is None:
        raise ValueError("--rehearse needs --out FOLDER: what it measures means nothing")
    args.out = (args.out or RESULTS / "gpu").resolve()
    for wrong, what, allowed in (
        (not 0 < args.minutes < float("inf"), f"--minutes {args.minutes:g}", "a number above 0"),
        (not 0 <= args.seed < 2**63, f"--seed {args.seed}", f"a whole number from 0 to {2**63 - 1}"),
        (not re.fullmatch(r"[\w.-]*", args.label, re.ASCII), f"--label {args.label!r}", "letters, digits, . _ and -"),
        (args.rehearse and args.out.is_relative_to(RESULTS), f"--out {args.out}", f"any folder but {RESULTS}"),
        (args.out.exists() and not args.out.is_dir(), f"--out {args.out}", "a folder"),
    ):
        if wrong:
            raise ValueError(f"{what}; {allowed} is allowed")
    day = [name for name in PARTS if name not in APART]
    asked = day if args.parts is None else [name.strip() for name in args.parts.split(",")]
    if unknown := [name for name in asked if name not in PARTS]:
        raise unknown_name("part", unknown[0], PARTS)
    return [name for name in PARTS if name in asked or name == "machine"]


def _path(args: argparse.Namespace, device: str | None) -> Path:
    """The path of the file of `device`, such as `nvidia-h100-80gb-hbm3-LABEL.json`."""
    name = "unknown-device" if device is None else re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    path = args.out / f"{name}{'-' if args.label else ''}{args.label}.json"
    if path.exists() and device is not None and not args.replace:
        raise FileExistsError(f"{path} is there; --label NAME writes beside it, --replace writes over it")
    return path


def _log(folder: Path) -> IO[bytes]:
    """An unbuffered file for the output of the processes; a temporary one if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "gpu_day.log").open("a+b", buffering=0)
    except OSError:
        return tempfile.TemporaryFile(buffering=0)


def _shown(args: argparse.Namespace) -> Day:
    """The day of the file `args.show`. Raises `ValueError` if the file has none."""
    saved = json.loads(args.show.read_text(encoding="utf-8"))
    if not isinstance(saved, dict) or saved.get("study") != "gpu_day":
        raise ValueError(f"--show {args.show}; a file of a GPU day is allowed")
    if args.into is not None:
        fill_marks(args.into, study.tables(saved["rows"]))
    return Day(saved, saved.pop("rows"), args.show.resolve())


if __name__ == "__main__":
    sys.exit(main())
