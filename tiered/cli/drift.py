"""`tiered drift`: how far a policy's caches are from an uncached pass, while prompts are answered."""

import argparse
import json
from pathlib import Path
from typing import Any

from tiered.cli.generate import add_call, as_inputs, generation_options, load_runtime, read_prompts
from tiered.cli.policy_options import policy_options

DESCRIPTION = """Answer prompts as `tiered generate` does, and compare the keys and values that the policy's cache holds
after every forward with those of an uncached pass over the same tokens: 1 - cos by layer and region of the canvas."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Enter the command."""
    parser = subparsers.add_parser(
        "drift", help="how far a policy's caches are from an uncached pass", description=DESCRIPTION
    )
    add_call(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every step there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table of means by layer, and with `--json` write the figures of every step to a file."""
    if args.json is not None and not args.json.parent.is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no directory {args.json.parent}")
    prompts = read_prompts(args)
    # Imported here: help and a wrong command line need no torch.
    from tiered.analysis.token_drift import measure_token_drift
    from tiered.cli.progress import progress_bar

    options = generation_options(args)
    runtime = load_runtime(args)
    with progress_bar(options.get("max_new_tokens", 128)) as streamer:
        report = measure_token_drift(runtime, as_inputs(prompts, runtime, raw=args.raw), streamer=streamer, **options)
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
