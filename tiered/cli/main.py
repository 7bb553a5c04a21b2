"""The entry point: `tiered COMMAND …`, also as `python -m tiered COMMAND …`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import tiered
from tiered.errors import TierCapacityError

# Each is a module beside this one with `add_parser(subparsers)` and `run(args) -> int`. What they need torch for they
# import when they run: planning and help work without it.
COMMANDS = ("generate", "drift", "regions", "trace", "plan", "models")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tiered", description="Memory-tiered inference for diffusion language models."
    )
    parser.add_argument("--version", action="version", version=f"tiered {tiered.__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"tiered.cli.{command}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is the process's own where it is None.

    Returns the exit status: 0 done, 2 for anything wrong with what was asked, 130 after Ctrl-C. A command line that
    cannot be parsed, `--help` and `--version` raise `SystemExit`, as argparse does.
    """
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except (ValueError, TypeError, TierCapacityError, OSError) as error:
        print(f"tiered: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
