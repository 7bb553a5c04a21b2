"""`tiered drift` and `tiered regions`: figures of a call while prompts are answered, as tables and as a file."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tiered.cli.call import add_call, as_asked, load_runtime, read_prompts
from tiered.cli.printing import add_json, print_result

DRIFT = """Answer prompts as `tiered generate` does, and compare the keys and values that the policy's cache holds
after every forward with those of an uncached step over the same tokens: 1 - cos by layer and area of the canvas."""
REGIONS = """Answer prompts as `tiered generate` does, and measure the uncached model at every step, by layer and
area of the canvas: how far keys and values have moved since the step before (1 - cos), and how much of the current
block's attention falls on the area. The policy, 'none' unless one is given, decides the tokens alone."""


def _drift() -> Callable[..., Any]:
    from tiered.observe.analysis.token_drift import measure_token_drift

    return measure_token_drift


def _regions() -> Callable[..., Any]:
    from tiered.observe.analysis.regions_report import measure_regions

    return measure_regions


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    """Enter both commands."""
    drift = subparsers.add_parser(
        "drift", help="how far a policy's caches are from an uncached step", description=DRIFT
    )
    regions = subparsers.add_parser(
        "regions", help="how far features move in a step, and attention, by area of the canvas", description=REGIONS
    )
    for parser, measure in ((drift, _drift), (regions, _regions)):
        add_call(parser)
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures of every step there, as JSON")
        add_json(parser)
        parser.set_defaults(run=partial(run, measure))
    regions.set_defaults(policy="none")


def run(measure: Callable[[], Callable[..., Any]], args: argparse.Namespace) -> int:
    """Print the tables of means, or with `--json` the figures of every step; with `--out` write those to a file, with
    what they were made on.

    `measure` imports, once the command line has been read, what measures a call; that takes a runtime, inputs, a
    streamer and the options of `generate`, and returns a report: a table as a string, plain types by `as_dict`.
    """
    if args.out is not None and not args.out.parent.is_dir():
        raise FileNotFoundError(f"--out {args.out}: there is no directory {args.out.parent}")
    prompts = read_prompts(args)
    from tiered.cli.option_flags import generation_options
    from tiered.cli.progress import progress_bar
    from tiered.core.provenance import provenance
    from tiered.core.whole_file import write_then_rename

    options = generation_options(args)
    runtime = load_runtime(args)
    with progress_bar(options) as streamer:
        report = measure()(runtime, prompts, raw=args.raw, streamer=streamer, **options)
    record = {**as_asked(args, prompts, options), "device": str(runtime.device), **report.as_dict()}
    if args.out is not None:
        text = json.dumps(record | provenance()) + "\n"
        write_then_rename(args.out, lambda part: part.write_text(text))
    print_result(args, report, record)
    return 0
