"""Medians and spreads of rounds, ratios within a round, the noise floor, and intervals of right answers, alone and
paired."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from measuring.point import Row

# Columns that may differ between runs of one point.
_OF_A_RUN = ("run", "stamp", "took_s")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile, with straight lines between the values."""
    low, median, high = np.percentile(np.asarray(values, dtype=float), (20, 50, 80)).tolist()
    return low, median, high


def merged(rows: Iterable[Row], *, of: Sequence[str] = (), timed: Sequence[str]) -> list[Row]:
    """The runs of each point as one row: medians of the columns `timed`, with NAME_low and NAME_high beside them, and
    "runs". A column that only some runs have, such as a baseline's, is kept. The columns `of` tell rows of a point
    apart. Without a row that is "ok", the last row stays as it is.

    Raises:
        ValueError: two runs differ in another column, though nothing is left to chance; names point and column.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["point"], *(str(row.get(name)) for name in of)), []).append(row)
    out = []
    for own in groups.values():
        good = [row for row in own if row["status"] == "ok"]
        if not good:
            out.append(own[-1])
            continue
        whole, skipped = good[0], {*_OF_A_RUN, *timed}
        for row in good[1:]:
            if differ := [name for name in (whole.keys() & row.keys()) - skipped if whole[name] != row[name]]:
                told = ", ".join(f"{name} {row[name]} after {whole[name]}" for name in sorted(differ))
                raise ValueError(f"runs of {whole['point']} disagree: {told}; measure all of them anew")
            whole = row | whole
        figures: Row = {"runs": len(good)}
        for name in timed:
            if values := [row[name] for row in good if name in row]:
                low, figures[name], high = spread(values)
                figures |= {f"{name}_low": low, f"{name}_high": high}
        out.append(whole | figures)
    return out


def paired(rows: Sequence[Row], ours: str, theirs: str, figure: str) -> list[float]:
    """`figure` of point `ours` over that of point `theirs`, for each run that has both: a machine changes between runs.
    Rows of more than one task are added up first."""

    def by_run(key: str) -> dict[tuple[int, str], float]:
        found: dict[tuple[int, str], float] = {}
        for row in rows:
            if row["point"] == key and row["status"] == "ok" and figure in row:
                at = (row["run"], row["stamp"])
                found[at] = found.get(at, 0.0) + row[figure]
        return found

    base = by_run(theirs)
    return [value / base[at] for at, value in by_run(ours).items() if base.get(at)]


def noise_floor(ratios: Sequence[float]) -> dict[str, float] | None:
    """Distances of two measurements of the same thing, as shares, from their `ratios` within a run: the 80th percentile
    and the largest. None for no ratios."""
    if not ratios:
        return None
    apart = [abs(ratio - 1) for ratio in ratios]
    return {"pairs": len(apart), "p80": spread(apart)[2], "largest": max(apart)}


def interval(correct: int, examples: int) -> tuple[float, float]:
    """The bounds of the true share in 95 of 100 cases (Wilson 1927, score interval)."""
    z = 1.959964
    share, spare = correct / examples, z * z / examples
    middle = (share + spare / 2) / (1 + spare)
    reach = z / (1 + spare) * ((share * (1 - share) + spare / 4) / examples) ** 0.5
    return (0.0 if not correct else middle - reach), (1.0 if correct == examples else middle + reach)


def drop(base: Sequence[bool], ours: Sequence[bool]) -> tuple[float, float, float]:
    """The share of right answers in `base` minus that in `ours`, to the same examples, and its bounds in 95 of 100
    cases. Examples that both have right, or both wrong, make the interval narrower (Newcombe 1998, Statistics in
    Medicine 17: 2635, method 10).

    Raises:
        ValueError: the numbers of examples differ, or are 0.
    """
    if len(base) != len(ours) or not base:
        raise ValueError(f"{len(ours)} answers cannot be paired with {len(base)}")
    count, first, second = len(base), sum(base), sum(ours)
    both = sum(a and b for a, b in zip(base, ours, strict=True))
    # φ, the correlation of the two, which the continuity correction brings closer to 0.
    excess = both * (count - first - second + both) - (first - both) * (second - both)
    excess = max(0.0, excess - count / 2) if excess > 0 else excess
    spare = (first * (count - first) * second * (count - second)) ** 0.5
    phi = excess / spare if spare else 0.0
    (low, high), (our_low, our_high) = interval(first, count), interval(second, count)

    def reach(one: float, other: float) -> float:
        return max(0.0, one * one - 2 * phi * one * other + other * other) ** 0.5

    share, ours_share = first / count, second / count
    lower, upper = reach(share - low, our_high - ours_share), reach(high - share, ours_share - our_low)
    return share - ours_share, share - ours_share - lower, share - ours_share + upper
