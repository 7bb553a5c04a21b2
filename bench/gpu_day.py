"""Everything that only a GPU can tell, in one run of nine minutes: is it right, is it fast, do the books agree.

    python bench/gpu_day.py                            # on a CUDA machine; writes bench/results/gpu/DEVICE.json
    python bench/gpu_day.py --parts kernels,floors --label after    # some parts alone: DEVICE-after.json
    python bench/gpu_day.py --rehearse --out FOLDER    # the same code at tiny sizes on the CPU, about a minute
    python bench/gpu_day.py --show FILE                # the summary of a file

The parts run in order, each in processes of its own, so that a kernel that takes the device down, or never ends, costs
one row; each has its share of the time, and what one leaves over the next may use. It ends before --minutes are over.
The file is written anew with every row; DEVICE.log beside it has what the processes said. Nothing is fetched from a
network. docs/gpu.md says how to read it. The last line of stdout is JSON. The exit status is 1 where something failed
or was found wrong, 2 for a command that cannot be followed, 130 after Ctrl-C.
"""

import contextlib
import faulthandler
import json
import os
import shlex
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from gpu_parts.command_line import checked, parser_of, parts_of, slug
from gpu_parts.day_log import DayLog
from gpu_parts.part import Part
from gpu_parts.part_process import WORKER
from gpu_parts.results import Results, counts, wrong
from gpu_parts.runner import run_part
from gpu_parts.setting import Setting
from gpu_parts.summary import show
from gpu_parts.wording import line_of
from rich.console import Console
from rows_file import read_rows
from sweeping.interrupts import stop_wish

from tiered.core.provenance import ROOT, provenance

SCHEMA = "tiered gpu day 1"
REHEARSAL = "a rehearsal at tiny sizes on a CPU: no figure in it means anything"
_CLOSING = 8.0  # seconds kept for the end: a process that is slow to die, the summary
_MOST_NAMED = 40  # rows that the last line names: only the end of a long output may come back from a lent machine


def main(argv: Sequence[str] | None = None, *, began: float | None = None) -> int:
    """`began`: when the time began to run, by `time.monotonic`."""
    began = time.monotonic() if began is None else began
    parser = parser_of(__doc__)
    args = parser.parse_args(argv)
    if args.show is not None:
        return _show_file(args.show, parser.error)
    try:
        parts, args = parts_of(args.parts), checked(args)
    except ValueError as error:
        parser.error(str(error))
    seconds = 60 * args.minutes
    # Should this very process hang: its end is the end of all others, and the file is whole at any time.
    faulthandler.dump_traceback_later(max(began + seconds - time.monotonic(), 0.1), exit=True, file=2)
    try:
        if not args.rehearse and not torch.cuda.is_available():
            parser.error("there is no CUDA device here; --rehearse --out FOLDER goes through the same code on the CPU")
        own: str | None = None  # what ended the run from within
        results = Results(_head(args), lambda text: say(f"gpu_day.py: error: {text}"))
        with stop_wish() as wish, DayLog(args.out) as log, contextlib.suppress(KeyboardInterrupt):
            try:
                measure(args, parts, results, log, end=began + seconds - min(_CLOSING, seconds / 10), stop=wish)
            except FileExistsError as error:
                parser.error(str(error))
            except Exception as error:  # what was measured before is worth the summary
                traceback.print_exc()
                own = f"{type(error).__name__} in gpu_day.py"
        stopped_by = own if wish.signal is None else signal.Signals(wish.signal).name
        results.update({"seconds": round(time.monotonic() - began, 1), "stopped_by": stopped_by})
        _tell(results.as_dict(), results.path, results.broken)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if wish.signal is not None:
        return 128 + wish.signal
    return int(bool(wrong(results.parts) or results.broken or own))


def measure(
    args: Namespace,
    parts: Sequence[Part],
    results: Results,
    log: DayLog,
    *,
    end: float,
    stop: Callable[[], bool],
) -> None:
    """All `parts`, each with its share of the time until `end`, and what those before it have left over.

    Raises:
        FileExistsError: the file of this device is there and must not be written over.
    """
    setting = Setting(
        device="cpu" if args.rehearse else "cuda", tiny=args.rehearse, seed=args.seed, folder=str(args.out)
    )
    command = WORKER if args.worker is None else shlex.split(args.worker)
    due = time.monotonic()
    scale = (end - due) / sum(part.seconds for part in parts)
    for part in parts:
        began = time.monotonic()
        due += scale * part.seconds
        # With time to spare a case may take longer; with less, the part's end comes first.
        scaled = replace(part, case_seconds=part.case_seconds * max(1.0, scale))
        results.begin(part.name)
        with closing(run_part(scaled, setting, limit=due - began, log=log.stream, stop=stop, command=command)) as rows:
            for case, row in rows:
                say(line_of(part.name, results.add(part.name, case, row)))
        results.end(part.name, time.monotonic() - began)
        if part is parts[0]:
            device = next((str(row["name"]) for row in results.parts[part.name]["rows"] if "name" in row), None)
            path = _path(args, device)
            log.name(path.with_suffix(".log"))
            results.update({"device": device}, path)
            setting = replace(setting, folder=str(path.with_suffix("")))
            with contextlib.suppress(OSError):
                setting.files.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        setting.files.rmdir()  # where nobody has written a file


def _head(args: Namespace) -> dict[str, Any]:
    """What the rows rest on."""
    head = {"schema": SCHEMA, "rehearsal": args.rehearse} | ({"note": REHEARSAL} if args.rehearse else {})
    head |= {"device": None, "seconds": None, "stopped_by": None, "minutes": args.minutes, "seed": args.seed}
    return head | provenance()


def _path(args: Namespace, device: str | None) -> Path:
    name = "unknown-device" if device is None else slug(device)
    path = args.out / f"{name}{'-' if args.label else ''}{args.label}.json"
    if path.exists() and device is not None and not args.replace:
        raise FileExistsError(f"{path} is there; --label NAME writes beside it, --replace writes over it")
    return path


def _tell(day: dict[str, Any], path: Path | None, broken: str | None) -> None:
    """The summary, and the line for programs, which nothing keeps from coming."""
    with contextlib.suppress(OSError):
        try:
            show(day, Console(width=140, file=sys.stdout))
        except Exception:
            traceback.print_exc()
        names = wrong(day["parts"])
        last = {name: day.get(name) for name in ("device", "rehearsal", "seconds", "stopped_by")}
        last |= {"file": None if path is None else _relative(path), "file_error": broken}
        last |= {"rows": counts(day["parts"]), "wrong": names[:_MOST_NAMED], "more_wrong": len(names[_MOST_NAMED:])}
        print(json.dumps(last), flush=True)


def _show_file(path: Path, error: Callable[[str], NoReturn]) -> int:
    try:
        day = read_rows(path, name="parts", kind=dict)
    except (OSError, ValueError) as problem:
        error(f"--show: {problem}")
    _tell(day, path, None)
    return int(bool(wrong(day["parts"])))


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def age() -> float:
    """Seconds since this process began: its imports are a part of the time. 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return seconds if 0 <= seconds < 30 else 0.0


def say(text: str) -> None:
    """A line on stderr, which may be a full disk or a closed pipe."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(began=time.monotonic() - age()))
