"""Counts of a scheduler's work since it was made."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from tiered.output import GenerationOutput


class Work(StrEnum):
    MODEL = "model"  # forwards, and the commits behind them
    OWN = "own"  # choosing the next requests


class Clock:
    """Seconds of finished work, by kind. Nested work counts for its own kind alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Work, 0.0)
        self._now: Work | None = None
        self._since = 0.0

    @contextmanager
    def of(self, work: Work) -> Iterator[None]:
        """Count the time of the block as `work`, without nested blocks."""
        before = self._now
        self._turn_to(work)
        try:
            yield
        finally:
            self._turn_to(before)

    def _turn_to(self, work: Work | None) -> None:
        now = time.perf_counter()
        if self._now is not None:
            self.seconds[self._now] += now - self._since
        self._now, self._since = work, now


@dataclass(slots=True)
class Counts:
    """Work of a scheduler so far.

    Attributes:
        ended: requests by final `RequestState`.
        forwards: passes through the layers; a shared pass counts once.
        taken: forwards of requests; a shared pass counts once for each of its requests.
        tokens: tokens of finished answers before their end-of-sequence token.
        clock: seconds of rounds with work to do.
        copy_ns, exposed_ns: nanoseconds of copies of features of finished answers, and of compute's waits for them.
    """

    ended: Counter[str] = field(default_factory=Counter)
    forwards: int = 0
    taken: int = 0
    tokens: int = 0
    clock: Clock = field(default_factory=Clock)
    copy_ns: int = 0
    exposed_ns: int = 0

    def add(self, output: GenerationOutput) -> None:
        self.tokens += output.timings.tokens
        if output.tiers is None:
            return
        for way in output.tiers.ways.values():
            self.copy_ns += way.busy_ns
            self.exposed_ns += way.exposed_ns

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of finished answers over `taken`; 0.0 before the first forward."""
        return self.tokens / self.taken if self.taken else 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the copies' time during which compute ran; 1.0 without copies."""
        return max(0.0, 1 - self.exposed_ns / self.copy_ns) if self.copy_ns else 1.0
