"""What the commands that measure share: the call that is measured, its report, and a file of the figures."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tiered.cli.generate import add_call, as_asked, generation_options, load_runtime, read_prompts
from tiered.cli.printing import add_json, print_result


class Report(Protocol):
    """What a measurement found; as a string it is a table."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        ...


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Enter what says which call is measured, and where its figures go."""
    add_call(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures of every step there, as JSON")
    add_json(parser)


def print_measurement(args: argparse.Namespace, measure: Callable[[], Callable[..., Report]]) -> int:
    """Print the table of means, or with `--json` the figures of every step; with `--out` write those to a file, with
    what they were made on. The exit status.

    Args:
        args: of `add_measurement`.
        measure: imports, once the command line has been read, what measures a call; that takes a runtime, inputs, a
            streamer and the options of `generate`.
    """
    if args.out is not None and not args.out.parent.is_dir():
        raise FileNotFoundError(f"--out {args.out}: there is no directory {args.out.parent}")
    prompts = read_prompts(args)
    # Imported here: help and a wrong command line need no torch.
    from tiered.cli.progress import progress_bar

    options = generation_options(args)
    runtime = load_runtime(args)
    with progress_bar(options.get("max_new_tokens", 128)) as streamer:
        report = measure()(runtime, prompts, raw=args.raw, streamer=streamer, **options)
    record = {**as_asked(args, prompts, options), "device": str(runtime.device), **report.as_dict()}
    if args.out is not None:
        _write(args.out, record)
    print_result(args, report, record)
    return 0


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a measurement, with what it was made on."""
    from tiered.core.provenance import provenance
    from tiered.core.whole_file import write_then_rename

    text = json.dumps(record | provenance()) + "\n"
    write_then_rename(path, lambda part: part.write_text(text))
