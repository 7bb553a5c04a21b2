"""`tiered trace`: a trace of a call's compute, copies and waits."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tiered.cli.call import add_call, as_asked, load_runtime, of_prompts, read_prompts
from tiered.cli.printing import add_json, print_result
from tiered.cli.watch import progress_bar
from tiered.core.whole_file import check_new_file

SUFFIXES = (".json", ".json.gz")  # of files that Perfetto opens
DESCRIPTION = """Answer prompts as `tiered generate` does, under torch's profiler, and write its trace: ranges by
operation and layer, copies between the tiers on a track for each direction, and waits for copies. Open the file at
https://ui.perfetto.dev."""


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    parser = subparsers.add_parser("trace", help="trace a call's compute, copies and waits", description=DESCRIPTION)
    add_call(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="write the trace there: *.json or *.json.gz"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_path(args.out)
    prompts = read_prompts(args)
    from tiered.cli.option_flags import generation_options
    from tiered.observe.trace import trace_call, trace_report, write_trace

    options = generation_options(args)
    runtime = load_runtime(args)
    with progress_bar(options) as streamer:
        call = trace_call(runtime, prompts, **of_prompts(args), streamer=streamer, **options)
    found = {"trace": str(args.out), "operations": [asdict(time) for time in call.ops], **call.out.as_dict()}
    print_result(args, trace_report(call), as_asked(args, prompts, options) | found)
    write_trace(args.out, call.trace)  # after the answer, which is not lost if the disk is full
    return 0


def _check_path(path: Path) -> None:
    if not path.name.endswith(SUFFIXES) or path.name in SUFFIXES:
        raise ValueError(f"--out {path}: a file named *.json or *.json.gz is allowed")
    check_new_file("--out", path)
