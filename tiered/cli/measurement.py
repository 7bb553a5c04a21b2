"""What the commands that measure share: the call that is measured, a report on standard output, and a file of it."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tiered.cli.generate import add_call, as_inputs, generation_options, load_runtime, read_prompts
from tiered.cli.policy_options import policy_options


class Report(Protocol):
    """What a measurement found; as a string it is a table."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        ...


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Enter what says which call is measured, and where its figures go."""
    add_call(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every step there")


def print_measurement(args: argparse.Namespace, measure: Callable[[], Callable[..., Report]]) -> int:
    """Print the table of means, and with `--json` write the figures of every step to a file, with what they were made
    on. The exit status.

    Args:
        args: of `add_measurement`.
        measure: imports, once the command line has been read, what measures a call; that takes a runtime, inputs, a
            streamer and the options of `generate`.
    """
    if args.json is not None and not args.json.parent.is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no directory {args.json.parent}")
    prompts = read_prompts(args)
    # Imported here: help and a wrong command line need no torch.
    from tiered.cli.progress import progress_bar

    options = generation_options(args)
    runtime = load_runtime(args)
    with progress_bar(options.get("max_new_tokens", 128)) as streamer:
        report = measure()(runtime, as_inputs(prompts, runtime, raw=args.raw), streamer=streamer, **options)
    print(report)
    if args.json is not None:
        request = {
            "model": args.model,
            "policy": args.policy,
            "policy_options": policy_options(args),
            "prompts": prompts,
            "options": options,
        }
        _write(args.json, {**request, "device": str(runtime.device), **report.as_dict()})
    return 0


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a measurement, with what it was made on."""
    from tiered.provenance import provenance
    from tiered.whole_file import write_then_rename

    text = json.dumps(record | provenance()) + "\n"
    write_then_rename(path, lambda part: part.write_text(text))
