"""The command line of bench/sweep.py, and the grid that it asks for."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows_file import weights_basis

from sweeping.axes import AXES, parse_values
from sweeping.grid import Grid
from sweeping.point import Common
from tiered.core.checks import unknown_name
from tiered.embedded.tasks import TASKS
from tiered.offload.device import pick_device

OUT = Path(__file__).resolve().parents[1] / "results" / "sweep"
# Flag, default and meaning of every axis.
FLAGS = {
    "clusters": ("--clusters", "4,8,16,32", "C, or auto"),
    "top_m": ("--top-m", "1,2,4", "M"),
    "update_threshold": ("--update-threshold", "0,1,2,4,8", "T"),
    "policy": ("--policies", "polestar,none,fast_dllm_dual", "policies and presets"),
    "codec": ("--codecs", "nvfp4_delta", "how members are stored"),
    "context": ("--contexts", "512", "tokens of the prompts of lookups"),
    "batch": ("--batches", "8", "sequences of a call"),
    "budget": ("--budgets", "none", "of the device tier, such as 12MiB; none: no cap"),
    "confidence": ("--confidences", "0.99", "threshold of the commit rule; none: one token a step"),
}
EXAMPLES = "sort=60,chain=40,lookup=4"
TIMEOUT = 1800.0


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    axes = parser.add_argument_group("axes, as lists with commas")
    for flag, default, meaning in FLAGS.values():
        axes.add_argument(flag, default=default, metavar="LIST", help=f"{meaning} (default: {default})")
    point = parser.add_argument_group("what all points share")
    point.add_argument("--model", default="embedded", help="one with the embedded tokenizer (default: embedded)")
    point.add_argument("--examples", default=EXAMPLES, metavar="TASK=N,…", help=f"tasks (default: {EXAMPLES})")
    point.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of every policy that has it; repeatable"
    )
    point.add_argument("--max-new-tokens", type=int, default=32, help="tokens of an answer (default: 32)")
    point.add_argument("--block-length", type=int, default=32, help="tokens of a block (default: 32)")
    point.add_argument("--seed", type=int, default=0, help="number of the first example (default: 0)")
    point.add_argument("--threads", type=int, default=1, help="of torch, in each process (default: 1)")
    point.add_argument("--device", default="auto", help="cpu, cuda, or auto: CUDA where there is any")
    run = parser.add_argument_group("the run")
    run.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder (default: bench/results/sweep)")
    run.add_argument("--dry-run", action="store_true", help="measure nothing: the points, and the time they will take")
    run.add_argument("--num-runs", type=int, default=1, metavar="N", help="measure all points, then all again, N times")
    run.add_argument("--filter", metavar="AXIS=VALUE|…,…", help="measure these points alone; != leaves out")
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once; above 1 they slow each other")
    run.add_argument("--retry", action="store_true", help="measure again what failed")
    run.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help=f"of a process (default: {TIMEOUT:g})"
    )
    run.add_argument("--worker", metavar="COMMAND", help="another command for the process of a point")
    return parser


def grid_of(args: argparse.Namespace) -> Grid:
    """The grid that was asked for. Raises `ValueError` with what is wrong in it."""
    axes = {axis: parse_values(axis, getattr(args, FLAGS[axis][0][2:].replace("-", "_"))) for axis in AXES}
    for name, least in (("max_new_tokens", 1), ("block_length", 1), ("seed", 0), ("threads", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"{name} = {getattr(args, name)}; a whole number from {least} is allowed")
    if args.max_new_tokens % args.block_length:
        raise ValueError(f"max_new_tokens {args.max_new_tokens} is not a multiple of block_length {args.block_length}")
    common = Common(
        model=Path(args.model).name,
        weights_sha256=weights_basis(args.model)["weights_sha256"],
        device=pick_device(args.device).type,
        tasks=examples_of(args.examples),
        max_new_tokens=args.max_new_tokens,
        block_length=args.block_length,
        seed=args.seed,
        threads=args.threads,
    )
    if "lookup" not in common.tasks and len(axes["context"]) > 1:
        raise ValueError(f"contexts {axes['context']} without lookups, the only task whose prompts can be so long")
    return Grid(axes=axes, options=options_of(args.option), common=common)


def examples_of(text: str) -> dict[str, int]:
    """How many examples of each task `sort=60,lookup=4` asks for."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        task, _, number = (piece.strip() for piece in part.partition("="))
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
        if not number.isdecimal() or int(number) < 1 or task in counts:
            raise ValueError(f"examples {part.strip()!r}; each task once, with a number from 1: {EXAMPLES}")
        counts[task] = int(number)
    return counts


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Options of policies by name: values as JSON reads them, everything else as the text it is."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r}; NAME=VALUE is allowed")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
