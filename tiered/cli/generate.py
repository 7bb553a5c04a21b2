"""`tiered generate`: answer prompts with a checkpoint."""

import argparse
import sys

from tiered.cli.call import add_call, as_asked, load_runtime, of_prompts, read_prompts
from tiered.cli.printing import add_json, print_result
from tiered.cli.watch import add_watch_options, check_watch_options, shown
from tiered.core.byte_size import format_bytes

DESCRIPTION = """Answer one prompt or several, as one batch. Prompts are arguments, the lines of --prompt-file, or the
lines of standard input. If the tokenizer has a chat template, a prompt is a user's message; --raw continues it as it
is. Thinking is left out if the tokenizer's response template says where it is; --json has it.
Options also have their names in official scripts: --gen-length, --threshold, --alg."""


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    parser = subparsers.add_parser("generate", help="answer prompts with a checkpoint", description=DESCRIPTION)
    add_call(parser)
    add_watch_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tiered.cli.option_flags import generation_options

    check_watch_options(args)
    prompts = read_prompts(args)
    options = generation_options(args)
    runtime = load_runtime(args)
    with shown(args, runtime, prompts, options) as observers:
        out = runtime.generate(prompts, **of_prompts(args), **observers, **options)
    assert out.text is not None  # text went in, so there is a tokenizer
    print_result(args, "\n".join(out.text), {**as_asked(args, prompts, options), **out.as_dict()})
    rate = f"{out.timings.tokens_per_second:.1f} tokens/s"
    if args.watch and (seconds := observers["inspector"].seconds):
        rate = f"{out.timings.tokens / seconds:.1f} tokens/s without the view's time"
    peaks = ((tier, report.peak) for tier, report in out.memory.tiers.items())
    print(
        f"{out.num_forwards} forwards, {out.tokens_per_forward.mean():.2f} tokens per forward, {rate}, "
        f"peak {', '.join(f'{format_bytes(peak)} {tier}' for tier, peak in peaks if peak)}, policy {out.choice}",
        file=sys.stderr,
    )
    return 0
