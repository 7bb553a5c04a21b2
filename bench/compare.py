"""Compare all policies and presets on an embedded model: accuracy, forwards, speed, rows, and bytes in each tier.

    python bench/compare.py                              # everything, about a quarter of an hour on one core
    python bench/compare.py --model embedded-uniform     # the same questions to the model of uniform noise
    python bench/compare.py --quick                      # every row with two examples, three minutes; keeps nothing
    python bench/compare.py --table README.md            # measures nothing: puts the tables of the file into README.md
    python bench/compare.py --table docs/policies.md     # and the table of both kinds of noise into docs/policies.md

Every policy has its defaults. Answers have 32 tokens in blocks of 8, so that a canvas has finished blocks and blocks to
come; a policy that is made for another call gets that one, and `none` answers it too. Every example is from the test
split. A row is written as soon as it is measured, and a second run keeps the rows that the same weights, options,
examples and machine have given. A policy that a call does not fit is a row that says why.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compare_page import put_tables
from compare_summary import LONG, by_policy, screen_table
from rich.console import Console
from rows_file import measured_before, weights_basis, write_rows
from tally import Tally
from variants import Variant, all_variants

import tiered
from tiered.embedded import tasks
from tiered.embedded.scoring import score_examples
from tiered.provenance import provenance

FOLDER = Path(__file__).resolve().parent / "results"
COSTS = FOLDER / "policy_cost.json"
CANVAS, BLOCK = 32, 8
QUICK_EXAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How one kind of noise is compared.

    Attributes:
        model: that knows it.
        commits: commit rules by name: a slow one and a fast one.
        results: file of the rows.
    """

    model: str
    commits: dict[str, dict[str, Any]]
    results: Path


NOISES = {
    "masks": Noise(
        model="embedded",
        commits={"one a step": {}, "threshold 0.9": {"confidence_threshold": 0.9}},
        results=FOLDER / "compare.json",
    ),
    # Twice as many steps as tokens: a block ends as soon as a step has nothing to change.
    "uniform": Noise(
        model="embedded-uniform",
        commits={
            "one a step": {"steps": 2 * CANVAS, "seed": 0},
            "three a step": {"steps": 2 * CANVAS, "tokens_per_step": 3, "seed": 0},
        },
        results=FOLDER / "compare_uniform.json",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Examples of one task. `size`: tokens of a lookup's prompt; None: drawn within the task's own bounds."""

    task: str
    size: int | None = None
    examples: int


# Most where policies differ: sorting and chains hang on fresh looks at what the cache holds. The long lookups come one
# by one; their speed, rows and bytes are those of the tables.
EXAMPLES = {"sort": 60, "chain": 40, "lookup": 10}
QUESTIONS = (
    *(Question(task=task, examples=EXAMPLES.get(task, 20)) for task in tasks.TASKS),
    Question(task=LONG[0], size=LONG[1], examples=3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: who answers what, and how many tokens are committed at a time."""

    question: Question
    commit: str
    variant: Variant

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        question = self.question
        return {
            "policy": self.variant.name,
            "task": question.task,
            "size": question.size,
            "commit": self.commit,
            "examples": question.examples,
        }


def settings(noise: Noise, variants: Iterable[Variant], examples: int | None = None) -> list[Setting]:
    """All rows. Variants alternate, so that a slow spell of the machine hits all; `examples`: at most so many a row."""
    variants = list(variants)
    return [
        Setting(
            question=question if examples is None else replace(question, examples=min(examples, question.examples)),
            commit=commit,
            variant=variant,
        )
        for question in QUESTIONS
        for commit in noise.commits
        for variant in variants
    ]


def measure(runtime: tiered.Runtime, setting: Setting, seed: int, commit: dict[str, Any]) -> dict[str, Any]:
    """The row of one setting, over examples `seed` and following of the test split, with the options of its commit
    rule; with "why" in place of figures where the policy and the call do not fit each other."""
    question, tally = setting.question, Tally()
    examples = [
        tasks.sample(question.task, "test", seed + number, size=question.size) for number in range(question.examples)
    ]
    try:
        scores = score_examples(
            runtime.with_policy(setting.variant.make()),
            examples,
            watch=tally,
            **(setting.variant.call(answer=CANVAS, block=BLOCK) | commit),
        )
    except (TypeError, ValueError) as error:
        return setting.as_dict() | {"why": str(error)}
    return setting.as_dict() | {
        "correct": scores.correct,
        "exact_match": round(scores.exact_match, 4),
        "nfe": round(scores.mean_forwards, 3),
        "tokens_per_forward": round(scores.mean_tokens_per_forward, 3),
        "tokens_per_second": round(tally.tokens / tally.seconds, 1),
        "rows_per_forward": round(tally.rows_per_forward, 1),
        "cache_ratio": round(tally.cache_ratio, 4),
        "passes": dict(tally.passes),
        "device_bytes": tally.device,
        "host_bytes": tally.host,
        "moved_bytes": dict(tally.moved),
    }


class Rows:
    """The rows of a file: those that are still good, and those that are measured now."""

    def __init__(self, path: Path | None, basis: dict[str, Any], planned: list[Setting]) -> None:
        """`path` None: nothing is kept. `planned`: all rows that may be there, in order. `basis`: what they rest on,
        beside their variants."""
        self._path, self._planned = path, planned
        self._head = basis | provenance()
        # As JSON gives them back: lists for tuples.
        by_name = {setting.variant.name: setting.variant.as_dict() for setting in planned}
        self._variants = json.loads(json.dumps(by_name))
        saved: dict[str, Any] = {"rows": []} if path is None else measured_before(path, basis)
        same = {name for name, variant in saved.get("variants", {}).items() if self._variants.get(name) == variant}
        self._rows = {self._key(row): row for row in saved["rows"] if row["policy"] in same}

    def forget(self, variants: Iterable[Variant]) -> None:
        """Drop what is known of these."""
        names = {variant.name for variant in variants}
        self._rows = {key: row for key, row in self._rows.items() if row["policy"] not in names}

    def has_figures(self, setting: Setting) -> bool:
        """Whether `setting` was measured; a row that says why it was not may have other news next time."""
        return "why" not in self._rows.get(self._key(setting.as_dict()), {"why": "not asked yet"})

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, with the revision that it is of, and write the file."""
        self._rows[self._key(row)] = row = row | {"revision": self._head["revision"]}
        if self._path is not None:
            write_rows(self._path, self._head | {"variants": self._variants}, self.in_order())
        return row

    def in_order(self) -> list[dict[str, Any]]:
        """Those that are there, in the order of the plan."""
        keys = [self._key(setting.as_dict()) for setting in self._planned]
        return [self._rows[key] for key in keys if key in self._rows]

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("policy", "task", "size", "commit", "examples"))


def chosen(names: str | None, variants: list[Variant]) -> list[Variant]:
    """The variants that a comma-separated list names; None: all. Raises `ValueError` for a name that is none."""
    if names is None:
        return variants
    by_name = {variant.name: variant for variant in variants}
    if unknown := [name for name in names.split(",") if name not in by_name]:
        raise ValueError(f"no policy {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = {noise.model: noise for noise in NOISES.values()}
    parser.add_argument("--model", choices=list(models), default="embedded", help="who answers (default: embedded)")
    parser.add_argument("--out", type=Path, help="file of the rows (default: bench/results/compare[_uniform].json)")
    parser.add_argument("--policies", metavar="NAME,…", help="measure these alone; rows of others stay in the file")
    parser.add_argument("--seed", type=int, default=0, help="number of the first example")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EXAMPLES} examples a row")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file already holds")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="put the tables into FILE.md; measure nothing")
    args = parser.parse_args()
    noise = models[args.model]
    if args.table is not None:
        files = {name: args.out if args.out and each is noise else each.results for name, each in NOISES.items()}
        put_tables(args.table, files, COSTS)
        return
    if args.quick and args.out is not None and args.out.resolve() == noise.results:
        parser.error(f"--quick --out {args.out}: rows of {QUICK_EXAMPLES} examples would replace those of the tables")
    path = args.out or (None if args.quick else noise.results)
    known = all_variants(slides=noise.model == "embedded")
    try:
        variants = chosen(args.policies, known)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(args.threads)
    runtime = tiered.from_pretrained(noise.model, policy="none", device="cpu")
    machine = {name: value for name, value in provenance().items() if name not in ("command", "revision")}
    basis = weights_basis(noise.model) | {"split": "test", "seed": args.seed, "canvas": CANVAS, "block": BLOCK}
    basis |= {"device": "cpu"} | machine
    examples = QUICK_EXAMPLES if args.quick else None
    rows = Rows(path, basis, settings(noise, known, examples))
    if args.fresh:
        rows.forget(variants)
    console = Console(stderr=True)
    # The first call pays for thread pools and the math library's workspaces.
    score_examples(runtime, [tasks.sample("copy", "test", 0)], max_new_tokens=CANVAS, block_length=BLOCK)
    for setting in settings(noise, variants, examples):
        if not rows.has_figures(setting):
            row = rows.add(measure(runtime, setting, args.seed, noise.commits[setting.commit]))
            console.print(json.dumps(row), highlight=False, soft_wrap=True)
    for commit in noise.commits:
        Console(width=220).print(screen_table(rows.in_order(), commit))
    print(json.dumps(by_policy(rows.in_order())))


if __name__ == "__main__":
    main()
