"""Winners of a comparison, their ratios, and the size from which on they win. Less is better."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from measuring.table import Row

# A row of each contender, by its name. A row without the figure takes no part.
Contest = Mapping[str, Row]


def contests(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], Contest]:
    """The contest of every call. The settings `names` tell calls apart; the last is the link between tiers. A row that
    moves nothing without a link takes part under every link."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), {})[row["policy"]] = row
    still = {key: {name: row for name, row in own.items() if row.get("moved_bytes") == 0} for key, own in found.items()}
    return {(*of, link): still.get((*of, None), {}) | own for (*of, link), own in found.items()}


def over_least(contest: Contest, figure: str) -> dict[str, float]:
    """`figure` of each contender over the least one, in ascending order from 1 on."""
    values = {name: row[figure] for name, row in contest.items() if figure in row}
    return {name: values[name] / min(values.values()) for name in sorted(values, key=values.__getitem__)}


def winners(contest: Contest, figure: str, noise: float = 0.0) -> list[str]:
    """Contenders whose `figure` is the least, or above it by a share of `noise` at most."""
    return [name for name, ratio in over_least(contest, figure).items() if ratio <= 1 + noise]


def wins_from(
    contests: Mapping[int, Contest], name: str, others: Sequence[str], figure: str, noise: float = 0.0
) -> int | None:
    """The least size from which on `name` beats all of `others` by more than `noise`; None if it does not at the
    largest size."""
    first = None
    for size in sorted(contests, reverse=True):
        rivals = {name, *others} & contests[size].keys()
        if winners({each: contests[size][each] for each in rivals}, figure, noise) != [name]:
            break
        first = size
    return first


def border(contests: Mapping[int, Contest], name: str, others: Sequence[str], figures: Mapping[str, float]) -> str:
    """`wins_from` of each of `figures`, with its noise, as the text of a table's cell."""
    found = [wins_from(contests, name, others, figure, noise) for figure, noise in figures.items()]
    return "nowhere" if not any(found) else " · ".join("-" if size is None else str(size) for size in found)
