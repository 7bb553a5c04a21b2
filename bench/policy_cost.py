"""What a step of each policy costs: beside a full pass, beside the floor of its rows, and beside a block-only step.

    python bench/policy_cost.py --out bench/results/policy_cost.json     # ten minutes on one core
    python bench/policy_cost.py --quick                                  # a small model, some seconds

A random model in float32 on the CPU (that of bench/step_cost.py), over 2048 positions: a prompt and an answer of 256
tokens in blocks of 32, one token a step. Each policy answers the first forwards of it, in rounds, each time beside a
full pass and beside a block-only step: the dual cache's, over one block of as many tokens as the policy's plain step
recomputes rows. Plain steps are those that neither refresh nor update anything. Figures are medians over the rounds:

  over_full   time of a plain step, from plan to plan, over that of a full pass
  over_floor  the same over what counting positions promises: rows recomputed over positions
  overhead    time that a plain step takes to choose rows and in its layers, over that of the block-only step: what it
              costs to select, gather and scatter. Without the last layer, where only rows with logits are of use
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from step_cost import VOCABULARY, random_model
from variants import Variant, all_variants

from tiered.core.provenance import provenance
from tiered.core.whole_file import write_then_rename
from tiered.forward.forward import Flow, Forward, LayerProgram
from tiered.policies.base import Policy, PolicyState, Step, StepKind, StepRows
from tiered.policies.fast_dllm import FastDLLMDual
from tiered.policies.none import NoCache
from tiered.runtime import Runtime

BLOCK = 32
FORWARDS = 9  # a refresh, and all that happens in an interval of eight
BLOCK_FORWARDS = 7  # of the block-only call, whose steps are all alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward: rows of a sequence; seconds from plan to plan, in the plan, and in all layers but the last."""

    kind: StepKind
    rows: float
    total: float
    plan: float
    layers: float


class _Enough(Exception):
    """As many forwards as were asked for are done."""


class _Watched:
    """A policy, or the state of one, that goes on as it would; `plan` and the layers are timed."""

    _forward: Forward
    _kind: StepKind
    _planned: float
    _layers: float

    def __init__(self, watched: Any, forwards: int, passes: list[Pass]) -> None:
        self._watched, self._forwards, self._passes = watched, forwards, passes
        self._began: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)

    def start(self) -> "_Watched":
        return _Watched(self._watched.start(), self._forwards, self._passes)

    def rows(self, step: Step) -> StepRows:
        now = time.perf_counter()
        if self._began is not None:
            self._passes.append(
                Pass(
                    kind=self._kind,
                    rows=self._forward.rows_computed,
                    total=now - self._began,
                    plan=self._planned - self._began,
                    layers=self._layers,
                )
            )
        if len(self._passes) == self._forwards:
            raise _Enough
        self._began, self._layers = now, 0.0
        plan = cast(PolicyState, self._watched).rows(step)
        self._kind, self._planned = plan.kind, time.perf_counter()
        return replace(plan, program=self._timed(plan.program or Forward.dense))

    def _timed(self, program: LayerProgram) -> LayerProgram:
        def layer(forward: Forward, number: int, flow: Flow) -> Flow:
            began = time.perf_counter()
            flow = program(forward, number, flow)
            if number < forward.model.shape.layers - 1:
                self._layers += time.perf_counter() - began
            self._forward = forward
            return flow

        return layer


def first_passes(runtime: Runtime, policy: Policy, prompt: torch.Tensor, forwards: int, **call: Any) -> list[Pass]:
    """The first `forwards` of a call, which must have more of them than that."""
    passes: list[Pass] = []
    watched = cast(Policy, _Watched(policy, forwards, passes))
    try:
        Runtime(runtime.model, policy=watched).generate(prompt, stop_at_eos=False, **call)
    except _Enough:
        return passes
    raise ValueError(f"{policy} took {len(passes)} forwards, {forwards} were asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A model, token ids [1, positions], and how many of the last are the answer's places."""

    runtime: Runtime
    tokens: torch.Tensor
    answer: int

    @property
    def positions(self) -> int:
        """Of prompt and answer."""
        return self.tokens.shape[1]

    def full(self) -> float:
        """Seconds of a full pass."""
        call = {"max_new_tokens": self.answer, "block_length": BLOCK}
        return first_passes(self.runtime, NoCache(), self.tokens[:, : -self.answer], 1, **call)[0].total

    def passes(self, variant: Variant) -> list[Pass]:
        """The first forwards of a call of `variant`."""
        call = variant.call(answer=self.answer, block=BLOCK)
        return first_passes(self.runtime, variant.make(), self.tokens[:, : -self.answer], FORWARDS, **call)

    def block_only(self, rows: int) -> float:
        """Seconds that a step over the last `rows` positions, which are one block, takes for its plan and its layers
        but the last."""
        length = max(rows, 3)  # a refresh, a step, and the forward whose plan ends the step
        call = {"max_new_tokens": length, "block_length": length}
        steps = first_passes(
            self.runtime, FastDLLMDual(), self.tokens[:, :-length], min(BLOCK_FORWARDS, length - 1), **call
        )
        return statistics.median(step.plan + step.layers for step in steps if step.kind is StepKind.STEP)


def one_round(bench: Bench, variant: Variant) -> dict[str, Any]:
    """The figures of one round of `variant`."""
    full, passes = bench.full(), bench.passes(variant)
    plain = [each for each in passes if each.kind is StepKind.STEP]
    figures: dict[str, Any] = {
        "full_ms": 1000 * full,
        "passes": {
            kind.value: {
                "forwards": len(own),
                "rows": statistics.median(each.rows for each in own),
                "ms": 1000 * statistics.median(each.total for each in own),
            }
            for kind in StepKind
            if (own := [each for each in passes if each.kind is kind])
        },
    }
    if not plain:
        return figures
    rows = statistics.median(each.rows for each in plain)
    chosen = statistics.median(each.plan + each.layers for each in plain)
    block_only = bench.block_only(round(rows))
    layers = bench.runtime.model.shape.layers - 1
    return figures | {
        "rows": rows,
        "floor": rows / bench.positions,
        "over_full": statistics.median(each.total for each in plain) / full,
        # Step by step, since a policy's rows may differ from one to the next.
        "over_floor": statistics.median(each.total / each.rows for each in plain) * bench.positions / full,
        "layer_ms": 1000 * chosen / layers,
        "block_only_layer_ms": 1000 * block_only / layers,
        "overhead": chosen / block_only,
    }


def medians(rounds: list[Any]) -> Any:
    """The rounds as one: median for median, through mappings."""
    if isinstance(rounds[0], dict):
        names = dict.fromkeys(name for figures in rounds for name in figures)
        return {name: medians([figures[name] for figures in rounds if name in figures]) for name in names}
    return statistics.median(rounds)


def measured(bench: Bench, variants: list[Variant], rounds: int) -> Iterator[dict[str, dict[str, Any]]]:
    """By variant, the medians so far, after every round; "why" where a variant and its call do not fit."""
    figures: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    refused: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for variant in variants:
            if variant.name not in refused:
                try:
                    figures[variant.name].append(one_round(bench, variant))
                except (TypeError, ValueError) as error:
                    refused[variant.name] = {"why": str(error)}
        yield {name: refused.get(name) or medians(own) for name, own in figures.items()}


def cost_table(result: dict[str, dict[str, Any]]) -> Table:
    """For a terminal."""
    grid = Table()
    for column in ("policy", "rows", "step over full", "over floor", "ms a layer", "block only", "overhead", "updates"):
        grid.add_column(column, justify="left" if column == "policy" else "right")
    for name, row in result.items():
        if "rows" not in row:
            grid.add_row(name, row.get("why", "no plain step"))
            continue
        update = row["passes"].get("update")
        grid.add_row(
            name,
            f"{row['rows']:.1f}",
            f"{row['over_full']:.4f}",
            f"{row['over_floor']:.2f}",
            f"{row['layer_ms']:.2f}",
            f"{row['block_only_layer_ms']:.2f}",
            f"{row['overhead']:.2f}",
            "" if update is None else f"{update['rows']:.0f} rows, {update['ms'] / row['full_ms']:.3f}",
        )
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write; without, nothing is kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smaller model and context, one round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    width, layers, context, answer = (128, 2, 512, 64) if args.quick else (512, 8, 2048, 256)
    rounds = 1 if args.quick else args.rounds
    bench = Bench(
        runtime=Runtime(random_model(width, layers, context), policy=NoCache()),
        tokens=torch.randint(0, VOCABULARY - 2, (1, context)),
        answer=answer,
    )
    bench.full()  # pays for thread pools and the math library's workspaces
    head = {"positions": context, "answer": answer, "block": BLOCK, "width": width, "layers": layers, "rounds": rounds}
    head |= {"device": "cpu"} | provenance()
    result = {}
    # References of other calls are full passes like `none`.
    variants = [variant for variant in all_variants() if variant.policy != "none"]
    for result in measured(bench, variants, rounds):
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(head | {"policies": result}, indent=1) + "\n"
            write_then_rename(args.out, lambda part, text=text: part.write_text(text))
    Console(width=140).print(cost_table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
