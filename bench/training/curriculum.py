"""Bounds of a step's draws, which grow with the steps or with success, and task weights, which follow error rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from training.tasks import (
    ALL_TASKS,
    FRESH_SIZES,
    FRESH_TASKS,
    LONG_ASKED,
    LONG_TASKS,
    TASKS,
)

LIST_BOUNDS = (6, TASKS["copy"].sizes[1])  # names of the longest list, at first and in the end
TABLE_BOUNDS = (18.0, 3968.0)  # prompt tokens of the longest lookup, the same way; a canvas of 128 fills the positions
TABLE_GROWTH = 1.015  # factor of the longest lookup at each step
MOST_ASKED = 8  # keys of a question within one block
# Nats an asked token below which lookup counts as learned, by noise: a third of the loss of a model that knows all but
# the digits. Uniform noise also asks for tokens that it has left alone.
LOOKUP_LEARNED = {"mask": 0.3, "uniform": 0.17}
# Of `FRESH_TASKS`: prompt tokens of the longest, at first and in the end; nats a token, of tokens that follow from
# visible ones, below which a task counts as learned; factor by which a batch of a learned task lengthens its prompts.
FRESH_BOUNDS, FRESH_LEARNED, FRESH_GROWTH = (48.0, float(FRESH_SIZES[1])), 0.12, 1.03
# Sums need many more examples than lists do, chains of operations fewer.
EMPHASIS = {"add": 2.5, "chain": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """The bounds of the next batches.

    Attributes:
        list_high: names of the longest list.
        lookup_high: prompt tokens of the longest lookup; a fraction, because it grows by percents.
        stretch: growth of answers beyond one block, from 0 (none) to 1 (the lengths of `LONG_TASKS`).
        fresh_high: prompt tokens of the longest of each of `FRESH_TASKS`.
        weights: weight of each task in draws, relative to the others of its stream.
    """

    list_high: int = LIST_BOUNDS[0]
    lookup_high: float = TABLE_BOUNDS[0]
    stretch: float = 0.0
    weights: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ALL_TASKS, 1.0))
    fresh_high: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(FRESH_TASKS, FRESH_BOUNDS[0]))

    def advanced(self, step: int, grow: int, lookup_learned: bool) -> "Curriculum":
        """The next curriculum. Lists reach their full length after `grow` steps, and answers of several blocks reach
        theirs after as many more. Tables widen only while lookup is learned.

        Tables that widen on a schedule leave the model at guessing one of the values that it sees.
        """
        low, high = LIST_BOUNDS
        wider = self.lookup_high * (TABLE_GROWTH if lookup_learned else 1.0)
        lists = max(self.list_high, min(high, low + (high - low) * step // grow))
        stretch = min(1.0, self.stretch + 1 / grow) if lists == high else 0.0
        return replace(self, list_high=lists, lookup_high=min(TABLE_BOUNDS[1], wider), stretch=stretch)

    def long_size(self, task: str) -> int:
        """The longest size of a task of `LONG_STREAM` now; it grows from the longest of its short task."""
        short, long = TASKS[task.removeprefix("long_")].sizes[1], LONG_TASKS[task].sizes[1]
        return round(short + self.stretch * (long - short))

    @property
    def asked_high(self) -> int:
        """Keys of the longest question."""
        return round(MOST_ASKED + self.stretch * (LONG_ASKED[1] - MOST_ASKED))

    def with_fresh(self, task: str, loss: float) -> "Curriculum":
        """Longer prompts of one of `FRESH_TASKS`, if its `loss` is below `FRESH_LEARNED`."""
        high = self.fresh_high[task] * (FRESH_GROWTH if loss < FRESH_LEARNED else 1.0)
        return replace(self, fresh_high={**self.fresh_high, task: min(FRESH_BOUNDS[1], high)})

    def following(self, scores: Mapping[str, float]) -> "Curriculum":
        """Each task of `scores` (exact match) weighs 0.2 + its error rate, times `EMPHASIS` and smoothed."""
        lag = {name: EMPHASIS.get(name, 1.0) * (0.2 + 1.0 - value) for name, value in scores.items()}
        weights = {name: 0.5 * self.weights.get(name, 1.0) + 0.5 * lag[name] for name in lag}
        return replace(self, weights={**self.weights, **weights})


LONG_STREAM: tuple[str, ...] = ("long_copy", "long_reverse", "long_chain")  # long lookups come with the tables
LIST_TASKS: tuple[str, ...] = ("copy", "reverse", "sort", "replace", "insert", "remove")
SHORT_TASKS: tuple[str, ...] = (*LIST_TASKS, "add", "chain")
