"""Measure tokens a second, tokens a forward, ms a forward and the time to the first block, by context and batch.

    python bench/throughput.py                                   # the embedded model, a few minutes on one core
    python bench/throughput.py --quick                           # one small setting, some seconds; keeps nothing
    python bench/throughput.py --model random --width 512 --layers 8 --contexts 2048 --confidences none

The embedded model answers lookups, whose prompts are as long as one likes. A random model, of LLaDA-8B's proportions,
shows how speed goes with size; its answers mean nothing, and no token of them is ever confident, so that it commits one
a step. The cost card comes first: what the sizes of a full pass and of a step over one block dictate, and the time
that no implementation can beat on this machine.

Rounds go over all settings in turn, so that a slow spell of the machine hits all policies. Figures are medians over the
rounds; `low` and `high` are the 20th and 80th percentile of tokens a second. A policy that a call does not fit is a row
that says why. Writes bench/results/throughput.json; the last line of stdout is the same in one line of JSON.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cost_card import cost_card, machine_rates
from rich.console import Console
from rich.table import Table
from rows_file import write_rows
from speed.rounds import Rounds, Setting
from speed.subjects import Subject, embedded_subject, random_subject
from sweeping.axes import parse_values

from tiered.core.byte_size import format_bytes
from tiered.core.provenance import provenance
from tiered.models.locate import EMBEDDED_MODELS
from tiered.policies.registry import make_policy

OUT = Path(__file__).resolve().parent / "results" / "throughput.json"
RANDOM = "random"


def print_cards(subject: Subject, settings: Sequence[Setting]) -> None:
    """What each size of call costs: a full pass, and a step over one block."""
    runtime, call = subject.runtime, subject.call
    rates = machine_rates(runtime.device, runtime.dtype)
    print(f"this machine: {rates}")
    for context, batch in dict.fromkeys((setting.context, setting.batch) for setting in settings):
        positions, block = context + call["max_new_tokens"], call["block_length"]
        for name, rows in (("full pass", positions), ("block step", block)):
            card = cost_card(
                runtime.model.shape,
                batch=batch,
                context=positions,
                rows=rows,
                dtype_bytes=runtime.dtype.itemsize,
                output_rows=block,
            )
            print(f"{name}: {card}, floor {1e3 * card.floor(rates):.2f} ms")


def screen_table(rows: Sequence[dict[str, Any]]) -> Table:
    """For a terminal."""
    table = Table()
    names = ("context", "batch", "policy", "confidence", "tokens/s", "p20-p80", "TPF", "NFE", "ms/forward")
    for name in (*names, "first block, ms", "device", "host"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        head = [str(row["context"]), str(row["batch"]), row["policy"], str(row["confidence"] or "none")]
        if "why" in row:
            table.add_row(*head, row["why"])
            continue
        table.add_row(
            *head,
            f"{row['tokens_per_second']:.1f}",
            f"{row['low']:.1f}-{row['high']:.1f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['nfe']:.1f}",
            f"{row['ms_per_forward']:.2f}",
            f"{row['first_block_ms']:.1f}",
            format_bytes(row["device_bytes"]),
            format_bytes(row["host_bytes"]),
        )
    return table


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*EMBEDDED_MODELS, RANDOM], default="embedded")
    parser.add_argument("--width", type=int, default=512, help="of the random model, a multiple of 64 (default: 512)")
    parser.add_argument("--layers", type=int, default=8, help="of the random model (default: 8)")
    for flag, default, meaning in (
        ("--contexts", "256,1024,2048", "tokens of a prompt"),
        ("--batches", "1,4", "prompts of a call"),
        ("--policies", "none,fast_dllm_dual,polestar", "policies and presets"),
        ("--confidences", "0.9,none", "thresholds of the commit rule; none: one token a step"),
    ):
        parser.add_argument(flag, metavar="LIST", help=f"{meaning} (default: {default})")
        parser.set_defaults(**{flag[2:]: default})
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--block-length", type=int, default=8, help="tokens of a block (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="over all settings (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: CUDA where there is any")
    parser.add_argument("--quick", action="store_true", help="two rounds of one context, one batch, one threshold")
    parser.add_argument("--out", type=Path, help="file to write (default: bench/results/throughput.json)")
    return parser


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Policies in turn within the same call. Raises `ValueError` with what is wrong."""
    if args.quick:
        args.contexts, args.batches, args.confidences, args.rounds = "128", "2", "0.9", 2
    for name, least in (("rounds", 1), ("threads", 1), ("layers", 1), ("max_new_tokens", 1), ("block_length", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"{name} = {getattr(args, name)}; a whole number from {least} is allowed")
    if args.max_new_tokens % args.block_length:
        raise ValueError(
            f"max_new_tokens = {args.max_new_tokens} is not a multiple of block_length {args.block_length}"
        )
    if args.width < 64 or args.width % 64:
        raise ValueError(f"width = {args.width}; a multiple of 64 is allowed")
    policies = parse_values("policy", args.policies)
    for policy in policies:
        make_policy(policy)
    contexts, batches = parse_values("context", args.contexts), parse_values("batch", args.batches)
    confidences = parse_values("confidence", args.confidences)
    return [
        Setting(policy=policy, context=context, batch=batch, confidence=confidence)
        for context, batch, confidence, policy in itertools.product(contexts, batches, confidences, policies)
    ]


def subject_of(args: argparse.Namespace, settings: Sequence[Setting]) -> Subject:
    """What is measured."""
    call = {"max_new_tokens": args.max_new_tokens, "block_length": args.block_length}
    if args.model == RANDOM:
        positions = max(setting.context for setting in settings) + args.max_new_tokens
        return random_subject(args.width, args.layers, positions, args.device, args.seed, call)
    return embedded_subject(args.model, args.device, args.seed, call)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of()
    args = parser.parse_args(argv)
    torch.set_num_threads(max(1, args.threads))
    try:
        settings = settings_of(args)
        subject = subject_of(args, settings)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    path = args.out or (None if args.quick else OUT)
    console = Console(stderr=True)
    print_cards(subject, settings)
    head: dict[str, Any] = {"model": args.model} | subject.call | {"seed": args.seed}
    head["device"] = subject.runtime.device.type
    if args.model == RANDOM:
        head |= {"width": args.width, "layers": args.layers}
    head |= provenance()
    rounds = Rounds(settings)
    Rounds(settings).measure(subject)  # pays for thread pools and the math library's workspaces
    for number in range(args.rounds):
        rounds.measure(subject)
        console.print(f"round {number + 1} of {args.rounds}", highlight=False)
        if path is not None:
            write_rows(path, head, rounds.rows())
    print()
    Console(width=160).print(screen_table(rounds.rows()))
    print(json.dumps(head | {"rows": rounds.rows()}))


if __name__ == "__main__":
    main()
