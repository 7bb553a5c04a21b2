"""The command line, from arguments to an exit status."""

import argparse
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tiered
from tiered.cli.call import CommandParser
from tiered.core.errors import TierCapacityError
from tiered.core.extras import MissingPackageError
from tiered.offload.errors import OffloadError

# Modules beside this one, each with `add_parser(subparsers)`, which sets `run(args) -> int`. They import torch only
# when their command runs.
MODULES = ("generate", "serve", "trace", "plan", "models", "rates", "warmup")


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tiered",
        usage="%(prog)s COMMAND [OPTION ...]",
        description="Memory-tiered inference for diffusion language models. `tiered COMMAND --help` explains one.",
    )
    parser.add_argument("--version", action="version", version=f"tiered {tiered.__version__}")
    subparsers = parser.add_subparsers(title="commands", prog=parser.prog, required=True, metavar="COMMAND")
    for module in MODULES:
        importlib.import_module(f"tiered.cli.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv`: arguments, None for the process's own.

    Returns the exit status: 0 for success, 2 for an error of the user, 130 after Ctrl-C, 141 after a closed output (`|
    head`). A command line that cannot be parsed, `--help` and `--version` raise `SystemExit`, as argparse does.
    """
    try:
        with _interrupts_stay_interrupts(), _warnings_without_source():
            output: object = sys.stdout
            if output is None:
                raise OSError("standard output is closed")
            if isinstance(output, io.TextIOWrapper):  # help and answers may have characters that a terminal has not
                output.reconfigure(errors="backslashreplace")
            try:
                args = build_parser().parse_args(argv)
                return args.run(args)
            finally:
                print(end="", flush=True)
    except BrokenPipeError:
        # Python flushes once more at its end.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, TypeError, TierCapacityError, OffloadError, OSError, MissingPackageError) as error:
        print(f"tiered: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def _warnings_without_source() -> Iterator[None]:
    """Print the text of a warning alone, without the line of code that it came from."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"tiered: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _interrupts_stay_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise `KeyboardInterrupt` from the block, even if a half imported library raises another error."""
    came = False

    def note(number: int, frame: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    # A caller's own handler stays, and an ignored signal stays ignored; only the main thread may set a handler.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
