"""Measure how often an embedded model answers exactly right, per task, policy and commit rule.

    python bench/evaluate_embedded.py                              # all rows, about half an hour on one core
    python bench/evaluate_embedded.py --model embedded-uniform     # of the model with uniform noise
    python bench/evaluate_embedded.py --quick                      # every row with a few examples, two minutes

Every example is from the test split, whose prompts are never trained on (what steered the shipped models is said in
docs/embedded-model.md). A row is written as soon as it is measured; a second run keeps the rows that the same weights
and the same seed have given. The file holds no times: accuracy and forwards do not depend on what else a machine does.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rows_file import measured_before, weights_basis, write_rows
from scoring import score_examples

import tiered
from tiered.core.provenance import provenance
from tiered.embedded import tasks
from tiered.models.locate import EMBEDDED_MODELS

RESULTS = Path(__file__).parent / "results"
# Prompt tokens → examples under "none", whose steps recompute the whole table, and under the dual cache, ten times
# cheaper. Training saw tables of at most 512 tokens.
LOOKUPS = {512: (200, 200), 1024: (60, 200), 2048: (30, 100)}
EXAMPLES = 200
QUICK_EXAMPLES = 4
CANVAS = BLOCK = 32
THRESHOLD = 0.9
POLICIES = ("fast_dllm_dual", "fast_dllm_prefix", "none")
# Of the model with uniform noise. In one block nothing but the prompt is cached, which its noise mask makes exact; in
# blocks of 8 there is noise behind the block, too.
UNIFORM_POLICIES = ("fast_dllm_dual", "uniform", "none")
UNIFORM_BLOCKS = (32, 8)
# Tokens that a step rewrites, at as many steps as reach every token once.
UNIFORM_REWRITES = (1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: what is asked, and how it is decoded. `size` None: drawn within the task's own bounds (`sizes`).

    `tokens_per_step` and `block_steps` are of the rule `adaptive`.
    """

    task: str
    size: int | None = None
    policy: str
    commit: str = "static"
    confidence_threshold: float | None = None
    tokens_per_step: int | None = None
    block_steps: int | None = None
    block: int = BLOCK
    examples: int = EXAMPLES

    def options(self) -> dict[str, Any]:
        """Options of `generate`."""
        names = ("commit", "confidence_threshold", "tokens_per_step", "block_steps")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None} | {"block_length": self.block}

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, with the canvas and the bounds of the sizes."""
        spec = tasks.TASKS[self.task]
        sizes = list(spec.sizes) if self.size is None else [self.size, self.size]
        row = asdict(self)
        if self.commit != "adaptive":
            del row["tokens_per_step"], row["block_steps"]
        return row | {"sizes": sizes, "unit": spec.unit, "canvas": CANVAS}


def settings(noise: str, quick: bool) -> list[Setting]:
    """All rows of the file, the cheap ones first; `noise` as in `ModelShape.noise`."""
    rows = masked_rows() if noise == "mask" else uniform_rows()
    return [replace(row, examples=QUICK_EXAMPLES) for row in rows] if quick else rows


def uniform_rows() -> list[Setting]:
    """Every task under the adaptive rule, at two numbers of steps and of blocks."""
    return [
        Setting(
            task=task,
            policy=policy,
            commit="adaptive",
            tokens_per_step=count,
            block_steps=block // count,
            block=block,
        )
        for count in reversed(UNIFORM_REWRITES)
        for block in UNIFORM_BLOCKS
        for policy in UNIFORM_POLICIES
        for task in tasks.TASKS
    ]


def masked_rows() -> list[Setting]:
    """Every task in one block, one token a forward or all that are sure; lookups beyond what was trained."""
    rows = [
        Setting(task=task, policy=policy, commit="threshold", confidence_threshold=THRESHOLD)
        for policy in ("fast_dllm_dual", "none")
        for task in tasks.TASKS
    ]
    rows += [Setting(task=task, policy=policy) for policy in POLICIES for task in tasks.TASKS]
    for size, (uncached, cached) in LOOKUPS.items():
        rows.append(Setting(task="lookup", size=size, policy="fast_dllm_dual", examples=cached))
        rows.append(Setting(task="lookup", size=size, policy="none", examples=uncached))
    return rows


def measure(runtime: tiered.Runtime, setting: Setting, seed: int, progress: Progress) -> dict[str, Any]:
    """The row of one setting: examples `seed` to `seed + examples - 1` of the test split."""
    examples = [
        tasks.sample(setting.task, "test", seed + number, size=setting.size) for number in range(setting.examples)
    ]
    name = f"{setting.task} {setting.size or ''} {setting.policy} {setting.commit}"
    bar = progress.add_task(name, total=len(examples))
    scores = score_examples(
        runtime.with_policy(setting.policy),
        examples,
        max_new_tokens=CANVAS,
        progress=lambda count: progress.advance(bar, count),
        **setting.options(),
    )
    progress.remove_task(bar)
    return setting.as_dict() | {
        "correct": scores.correct,
        "exact_match": round(scores.exact_match, 4),
        "nfe": round(scores.mean_forwards, 2),
        "tokens_per_forward": round(scores.mean_tokens_per_forward, 3),
    }


def by_policy(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Exact match of every task within its own bounds, one token a forward in one block."""
    single = [
        row
        for row in rows
        if (row["commit"] == "static" or row.get("tokens_per_step") == 1)
        and row["size"] is None
        and row["block"] == BLOCK
    ]
    return {
        policy: {row["task"]: row["exact_match"] for row in single if row["policy"] == policy}
        for policy in dict.fromkeys(row["policy"] for row in single)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="embedded", help="an embedded model's name, or the directory of another export"
    )
    parser.add_argument("--out", type=Path, help="file of the rows (default: by the model's name, in bench/results)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first example")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EXAMPLES} examples a row")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file already holds")
    args = parser.parse_args()
    if args.out is None:
        if args.model not in EMBEDDED_MODELS:
            parser.error("--out says where the rows of another model go")
        args.out = RESULTS / f"{args.model}{'-quick' if args.quick else ''}.json"
    torch.set_num_threads(args.threads)
    runtime = tiered.from_pretrained(args.model, policy="none", device="cpu")
    basis: dict[str, Any] = {**weights_basis(args.model), "split": "test", "seed": args.seed}
    head, rows = basis | {"device": "cpu"} | provenance(), []
    try:
        known = [] if args.fresh else measured_before(args.out, basis)["rows"]
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        planned = settings(runtime.model.shape.noise, args.quick)
        bar = progress.add_task("rows", total=len(planned))
        for setting in planned:
            wanted = setting.as_dict()
            row = next((row for row in known if row.items() >= wanted.items()), None)
            row = row or measure(runtime, setting, args.seed, progress)
            rows.append(row)
            write_rows(args.out, head, rows)
            progress.advance(bar)
            progress.console.print(json.dumps(row), highlight=False, soft_wrap=True)
    print(json.dumps({"file": args.out.name, "rows": len(rows), "exact_match": by_policy(rows)}))


if __name__ == "__main__":
    main()
