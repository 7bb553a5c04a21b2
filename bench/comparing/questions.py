"""What is asked in a comparison: the models, the commit rules, the tasks and how many examples of each."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baselines.variants import Baseline
from variants import Variant

from comparing.summary import LONG
from tiered.embedded import tasks

FOLDER = Path(__file__).resolve().parents[1] / "results"
CANVAS, BLOCK = 32, 8


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
    variant: Variant | Baseline

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


def settings(noise: Noise, variants: Iterable[Variant | Baseline], examples: int | None = None) -> list[list[Setting]]:
    """All rows, those of one question and commit rule together: within a group variants alternate, so that a slow spell
    of the machine hits all. `examples`: at most so many a row."""
    variants = list(variants)
    return [
        [
            Setting(
                question=question if examples is None else replace(question, examples=min(examples, question.examples)),
                commit=commit,
                variant=variant,
            )
            for variant in variants
        ]
        for question in QUESTIONS
        for commit in noise.commits
    ]
