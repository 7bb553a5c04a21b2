"""What a step draws: bounds that grow with the steps or with success, and task weights that follow what lags."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tiered.embedded.tasks import LIST_TASKS, TASKS

LIST_BOUNDS = (6, TASKS["copy"].sizes[1])  # names of the longest list, at first and in the end
TABLE_BOUNDS = (18.0, float(TASKS["lookup"].sizes[1]))  # prompt tokens of the longest lookup, the same way
TABLE_GROWTH = 1.015  # a step
# Nats a token asked for below which lookup counts as learned, by noise: a third of what it costs to know everything but
# the digits. Uniform noise asks for tokens that it has left alone, too.
LOOKUP_LEARNED = {"mask": 0.3, "uniform": 0.17}
# Arithmetic needs many more examples than lists do, and its answers are short.
EMPHASIS = {"add": 2.5, "chain": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """The bounds of the next batches.

    Attributes:
        list_high: names of the longest list.
        lookup_high: prompt tokens of the longest lookup; a fraction, since it grows by percents.
        weights: how often each short task is drawn, relative to the others.
    """

    list_high: int = LIST_BOUNDS[0]
    lookup_high: float = TABLE_BOUNDS[0]
    weights: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TASKS, 1.0))

    def advanced(self, step: int, grow: int, lookup_learned: bool) -> "Curriculum":
        """Wider: lists reach their full length after `grow` steps, tables widen only while lookup is learned.

        Tables that widen on a schedule leave the model at guessing one of the values it sees.
        """
        low, high = LIST_BOUNDS
        wider = self.lookup_high * (TABLE_GROWTH if lookup_learned else 1.0)
        return replace(
            self, list_high=min(high, low + (high - low) * step // grow), lookup_high=min(TABLE_BOUNDS[1], wider)
        )

    def following(self, scores: Mapping[str, float]) -> "Curriculum":
        """Each task of `scores` (exact match) weighs 0.2 + its error rate, smoothed: none is ever forgotten."""
        lag = {name: EMPHASIS.get(name, 1.0) * (0.2 + 1.0 - value) for name, value in scores.items()}
        return replace(self, weights={name: 0.5 * self.weights[name] + 0.5 * lag[name] for name in lag})


SHORT_TASKS: tuple[str, ...] = (*LIST_TASKS, "add", "chain")
