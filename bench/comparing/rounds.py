"""What rounds say: a speed's median and spread, its ratio to the reference's of the same round, and the noise floor.

A row's "samples" are its speeds, each with the session (one run of the script) and the round that it is of. Two speeds
make a ratio only where both are of one round of one session: between sessions a machine changes. In a round all
variants answer a question one after the other.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Row = dict[str, Any]

# `none` under a second name: what its ratio to `none` is off 1 by is noise.
AGAIN = "none, again"
# What rounds cannot change: nothing is drawn that a seed does not fix.
ANSWERS = ("correct", "nfe", "tokens_per_forward", "rows_per_forward", "passes")


class OtherAnswersError(RuntimeError):
    """Two rounds of one row have answered otherwise."""


def joined(before: Row | None, row: Row, session: str, number: int) -> Row:
    """`row`, as round `number` of `session` has measured it, with the samples of the rounds before.

    Raises:
        OtherAnswersError: the round answered otherwise than those before; names the row and both figures.
    """
    sample = {"session": session, "round": number, "tokens_per_second": row["tokens_per_second"]}
    if before is None or "samples" not in before:
        return row | {"samples": [sample]}
    if other := {name: (before[name], row[name]) for name in ANSWERS if before[name] != row[name]}:
        told = ", ".join(f"{name} {now} after {then}" for name, (then, now) in other.items())
        raise OtherAnswersError(
            f"{row['policy']}, {row['task']}, {row['commit']}: rounds disagree ({told}), though nothing is left to "
            "chance; if the code has changed since, measure all rounds anew with --fresh"
        )
    return before | {"samples": [*before["samples"], sample]}


def with_spread(row: Row, reference: Row | None) -> Row:
    """`row` with the median, 20th and 80th percentile of its speeds ("tokens_per_second", "low", "high") over "rounds",
    and of their ratios to `reference`'s ("speedup", "speedup_low", "speedup_high"), where rounds have both. A row
    without samples, from before there were rounds, is as it was."""
    if "samples" not in row:
        return row
    low, median, high = percentiles([sample["tokens_per_second"] for sample in row["samples"]])
    shown = {"tokens_per_second": round(median, 2), "low": round(low, 2), "high": round(high, 2)}
    figures: Row = row | shown | {"rounds": len(row["samples"])}
    if ratios := paired_ratios(row, reference):
        low, median, high = percentiles(ratios)
        figures |= {"speedup": round(median, 3), "speedup_low": round(low, 3), "speedup_high": round(high, 3)}
    return figures


def paired_ratios(row: Row, reference: Row | None) -> list[float]:
    """`row`'s speed over `reference`'s, of each round that has measured both."""
    theirs = {_when(sample): sample["tokens_per_second"] for sample in (reference or {}).get("samples", ())}
    ours = {_when(sample): sample["tokens_per_second"] for sample in row.get("samples", ())}
    return [speed / theirs[when] for when, speed in ours.items() if theirs.get(when)]


def noise_floor(rows: Iterable[Row], counts: Callable[[Row], bool]) -> Mapping[str, Any] | None:
    """How far two speeds of `none` are apart that one round has measured, as a share: the 80th percentile and the
    largest of |again / none - 1|, over all "pairs" of rows that `counts` takes. None where there are none."""
    rows = list(filter(counts, rows))
    plain = {question_of(row): row for row in rows if row["policy"] == "none"}
    apart = [
        abs(ratio - 1)
        for row in rows
        if row["policy"] == AGAIN
        for ratio in paired_ratios(row, plain.get(question_of(row)))
    ]
    if not apart:
        return None
    return {"pairs": len(apart), "p80": round(percentiles(apart)[2], 4), "largest": round(max(apart), 4)}


def question_of(row: Row) -> tuple[Any, ...]:
    """What rows of all policies have in common that may be compared."""
    return tuple(row[name] for name in ("task", "size", "commit", "examples"))


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th, with straight lines between the values."""
    low, median, high = np.percentile(values, (20, 50, 80)).tolist()
    return low, median, high


def _when(sample: Mapping[str, Any]) -> tuple[str, int]:
    return sample["session"], sample["round"]
