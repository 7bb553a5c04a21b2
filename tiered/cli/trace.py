"""`tiered trace`: when a call computes, copies and waits, as a trace to look at."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tiered.cli.call import add_call, as_asked, load_runtime, read_prompts
from tiered.cli.printing import add_json, print_result

DESCRIPTION = """Answer prompts as `tiered generate` does, and write what happened when: ranges of compute by operation,
layer and forward, copies between the tiers on a track for each way, and where compute waited for one. Open the file at
https://ui.perfetto.dev. On CUDA torch's profiler makes it, with ranges of the same names."""


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    """Enter the command."""
    parser = subparsers.add_parser("trace", help="when a call computes, copies and waits", description=DESCRIPTION)
    add_call(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="write the trace there: *.json or *.json.gz"
    )
    parser.add_argument(
        "--synchronize",
        action="store_true",
        help="on CUDA, wait for the device at both ends of every range: times by operation are the device's, and "
        "nothing overlaps",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the trace, and print the time of each operation and of the copies."""
    from tiered.observe.trace.trace_file import check_trace_path, write_trace

    check_trace_path(args.out)
    prompts = read_prompts(args)
    from tiered.cli.option_flags import generation_options
    from tiered.cli.progress import progress_bar
    from tiered.observe.trace.op_times import op_times, trace_report
    from tiered.observe.trace.trace_call import trace_call

    options = generation_options(args)
    runtime = load_runtime(args)
    with progress_bar(options) as streamer:
        call = trace_call(runtime, prompts, raw=args.raw, synchronized=args.synchronize, streamer=streamer, **options)
    write_trace(args.out, call.trace)
    print_result(
        args,
        trace_report(call.recorder, call.out.timings.total, call.out.tiers),
        {
            **as_asked(args, prompts, options),
            "trace": str(args.out),
            "operations": [asdict(time) for time in op_times(call.recorder)],
            **call.out.as_dict(),
        },
    )
    return 0
