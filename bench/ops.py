"""Where the time of a forward goes, by operation and policy: the sum of all operations matches the wall clock.

    python bench/ops.py --out bench/results/ops.json                     # some minutes on one core
    python bench/ops.py --quick                                          # a small model, some seconds
    python bench/ops.py --models embedded --policies none polestar --context 512 2048 --batch 1 4

Calls of a random model (that of bench/step_cost.py) and of the embedded one, in float32 unless --dtype says otherwise.
Before each size its cost card is printed: bytes, FLOPs, and the floor of a plain step and of a refresh at the rates
that this machine reaches. Each call is made once to warm up and then in rounds, under a recorder and without; the
fastest recorded round counts. Its table says what each operation took without those inside it (docs/tracing.md), and
`covered` is their sum over the wall clock of the call, which another clock has measured.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cost_card import cost_card, machine_rates
from rich.console import Console
from rich.table import Table
from step_cost import random_model
from variants import Variant, all_variants

import tiered
from tiered.core.errors import TierCapacityError
from tiered.core.provenance import provenance
from tiered.core.whole_file import write_then_rename
from tiered.observe.trace.op_times import op_times
from tiered.observe.trace.trace_call import trace_call
from tiered.policies.none import NoCache
from tiered.runtime import Runtime

MODELS = ("random", "embedded")
POLICIES = ("none", "fast_dllm_dual", "polestar", "dllm_cache", "dkv_decode", "elastic_cache")
BLOCK = 32
WITHIN = 0.05  # of 1 is `covered`, or something costs time and has no name


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One row of the table: a model under a policy, over so many positions of so many sequences."""

    model: str
    variant: Variant
    context: int
    batch: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, {self.variant.name}, {self.batch} x {self.context}"


def load(model: str, *, quick: bool, context: int, dtype: str, device: str) -> Runtime:
    """The model by its name; `context`: positions that it must serve."""
    if model == "embedded":
        return tiered.from_pretrained("embedded", policy="none", dtype=dtype, device=device)
    width, layers = (128, 3) if quick else (512, 8)
    made = random_model(width, layers, context).to(device=device, dtype=getattr(torch, dtype))
    return Runtime(made, policy=NoCache(), name="random")


def measured(runtime: Runtime, call: Call, *, answer: int, steps: int, rounds: int) -> dict[str, Any]:
    """The fastest round of `call`, as a row of the file."""
    under = runtime.with_policy(call.variant.make())
    ids = torch.randint(
        0,
        runtime.model.shape.vocab_size - 4,
        (call.batch, call.context - answer),
        generator=torch.Generator().manual_seed(0),
    )
    options = call.variant.call(answer=answer, block=min(BLOCK, answer)) | {"steps": steps, "stop_at_eos": False}
    under.generate(ids, **options)
    plain, best = [], None
    for _ in range(rounds):
        plain.append(under.generate(ids, **options).timings.total)
        found = trace_call(under, ids, profiled=False, synchronized=True, **options)
        if best is None or found.out.timings.total < best.out.timings.total:
            best = found
    assert best is not None, "there is a round"
    wall, times = best.out.timings.total, op_times(best.recorder)
    return {
        "name": call.name,
        "model": call.model,
        "policy": call.variant.name,
        "positions": call.context,
        "batch": call.batch,
        "forwards": best.out.num_forwards,
        "plain_ms": 1000 * min(plain),
        "wall_ms": 1000 * wall,
        "sum_ms": sum(time.ns for time in times) / 1e6,
        "covered": sum(time.ns for time in times) / 1e9 / wall,
        "ops": [
            {"op": time.op.value, "ms": time.ns / 1e6, "share": time.ns / 1e9 / wall, "count": time.count}
            for time in times
        ],
    }


def rows_of(args: argparse.Namespace, variants: list[Variant], console: Console) -> Iterator[dict[str, Any]]:
    """Every call in turn; the cost card comes before the calls of its size."""
    for model in args.models:
        runtime = load(model, quick=args.quick, context=max(args.context), dtype=args.dtype, device=args.device)
        rates = machine_rates(runtime.device, runtime.dtype)
        console.print(f"{model}: {runtime.model.shape.parameters:,} parameters; this machine: {rates}", highlight=False)
        for context, batch in product(args.context, args.batch):
            sizes = {"batch": batch, "context": context, "dtype_bytes": runtime.dtype.itemsize}
            block = min(BLOCK, args.answer)
            for what, rows in (("plain step", block), ("refresh", context)):
                card = cost_card(runtime.model.shape, rows=rows, output_rows=block, **sizes)
                console.print(
                    f"{what}, {card}; floor {1000 * card.floor(rates):.2f} ms", highlight=False, soft_wrap=True
                )
            for variant in variants:
                call = Call(model=model, variant=variant, context=context, batch=batch)
                yield measured(runtime, call, answer=args.answer, steps=args.steps, rounds=args.rounds)


def table(row: dict[str, Any]) -> Table:
    """For a terminal."""
    title = f"{row['name']}: {row['wall_ms']:.1f} ms, {row['forwards']} forwards, covered {row['covered']:.3f}"
    grid = Table(title=title, title_justify="left")
    for column in ("operation", "ms", "share", "ranges"):
        grid.add_column(column, justify="left" if column == "operation" else "right")
    for op in row["ops"]:
        grid.add_row(op["op"], f"{op['ms']:.2f}", f"{100 * op['share']:.1f} %", str(op["count"]))
    return grid


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {variant.name: variant for variant in all_variants()}
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--policies", nargs="+", choices=list(known), default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--context", nargs="+", type=int, help="positions, answer included (default: 1024)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="sequences of a call (default: 1)")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--steps", type=int, default=16, help="forwards of a call (default: 16)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a smaller random model, 256 positions, one round")
    parser.add_argument("--out", type=Path, help="JSON file to write; without, nothing is kept")
    args = parser.parse_args()
    args.context = args.context or [256 if args.quick else 1024]
    args.rounds = 1 if args.quick else args.rounds
    for name in ("batch", "answer", "steps", "rounds", "threads"):
        values = getattr(args, name)
        if min(values if isinstance(values, list) else [values]) < 1:
            parser.error(f"--{name} {values}: 1 or more is allowed")
    if min(args.context) <= args.answer:
        parser.error(f"--context {min(args.context)}: more than the answer's {args.answer} positions are needed")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no directory {args.out.parent}")
    args.variants = [known[name] for name in args.policies]
    args.refuse = parser.error
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    console = Console(width=120)
    calls = []
    try:
        for row in rows_of(args, args.variants, console):
            console.print(table(row))
            calls.append(row)
    except (ValueError, TypeError, TierCapacityError) as error:
        args.refuse(str(error))
    record = {"calls": calls, "device": args.device, "answer": args.answer, "steps": args.steps} | provenance()
    if args.out is not None:
        write_then_rename(args.out, lambda part: part.write_text(json.dumps(record, indent=1) + "\n"))
    unnamed = [row["name"] for row in calls if abs(1 - row["covered"]) > WITHIN]
    if unnamed:
        console.print(f"not within {100 * WITHIN:.0f} % of the wall clock: {'; '.join(unnamed)}", highlight=False)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
