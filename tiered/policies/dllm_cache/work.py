"""Books: which rows of each sequence a pass renews, by intervals that count its own forwards."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass recomputes, by sequence of the forward; with guidance, the unconditional ones follow.

    Attributes:
        first: first column that is recomputed: 0, where the prompt is; the answer's first (or that of the row that
            predicts it), where it is not; the canvas's length, where the sequence takes no part.
        rows: how many rows of the answer are recomputed in every layer; 0 where the sequence takes no part.
        clocks: forwards that the sequence has taken part in.
        due: whether its prompt is due, and its answer; neither is where it takes no part.
    """

    first: Sequence[int]
    rows: Sequence[int]
    clocks: Sequence[int]
    due: Sequence[tuple[bool, bool]]

    @classmethod
    def of(
        cls,
        here: Sequence[bool],
        clocks: Sequence[int],
        intervals: tuple[int | None, int | None],
        *,
        answer: tuple[int, int],
        chosen: int,
        untouched: int,
        renewed: bool = False,
    ) -> "Work":
        """
        Args:
            here: whether each sequence takes part.
            clocks: forwards that it has taken part in; before its first, everything is due.
            intervals: of prompt and answer; None: never again.
            answer: its columns, first and behind the last.
            chosen: rows of the answer that are recomputed where it is not due.
            untouched: first column that is recomputed where the prompt is not due.
            renewed: whether everything is due, whatever the intervals.
        """
        start, stop = answer
        due = [
            (part and (renewed or _due(intervals[0], clock)), part and (renewed or _due(intervals[1], clock)))
            for part, clock in zip(here, clocks, strict=True)
        ]
        return cls(
            [(0 if prompt else untouched) if part else stop for part, (prompt, _) in zip(here, due, strict=True)],
            [(stop - start if whole else chosen) * part for part, (_, whole) in zip(here, due, strict=True)],
            clocks,
            due,
        )


def _due(interval: int | None, clock: int) -> bool:
    return clock == 0 or (interval is not None and clock % interval == 0)
