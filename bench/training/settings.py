"""The settings of a training run, and its state."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run.

    Attributes:
        steps: number of steps; the rate falls to 0 over the last fifth.
        grow: steps until lists have their full length.
        seed: seed of weights and data.
        short_tokens, lookup_tokens: tokens of a step's two batches.
        fresh_tokens: tokens of a step's batch of `FRESH_TASKS`; lists, long answers and lookups then take turns. 0 for
            none.
        rate: per cent of the full learning rates.
        bfloat16: 1 to compute the layers in bfloat16, weights and optimizers in float32.
        workers: batches that are computed at once, each by a thread.
        score_every, score_examples: steps between validations, and their examples a task.
        save_every, report_every: steps between checkpoints, and between lines of the log.
    """

    steps: int = 5000
    grow: int = 2000
    seed: int = 1
    short_tokens: int = 2900
    lookup_tokens: int = 2700
    fresh_tokens: int = 0
    rate: int = 100
    bfloat16: int = 0
    workers: int = 2
    score_every: int = 350
    score_examples: int = 16
    save_every: int = 50
    report_every: int = 25


@dataclass(kw_only=True)
class Standing:
    """The state of a run, in plain types: steps and tokens done, seconds spent, smoothed losses, last validation."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
