"""Many clients of one scheduler beside one request at a time, and steps of others while a prompt joins.

`--part clients`: each of so many clients asks again as soon as it is answered; every point is served twice in the same
process, one request at a time and together. `--part join`: a request that runs while the first pass over a prompt of
`--context` tokens is cut into chunks of `--rows` rows (0: in one piece).

    python bench/measure.py load                                              # a quarter of an hour on two idle cores
    python bench/measure.py load --keep --part join --context 3968

The last line of stdout says, each null as long as its rows are missing,

    tokens_over_one_at_a_time   tokens a second of all clients together over those in turn: the smallest
    first_block_at_16           of 16 clients, the median time to the first block over that in turn
    forwards_at_16              of 16 clients, forwards a token of answers over that in turn
    scheduler_share             of a round's time, the scheduler's own: the largest
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads import load
from workloads.load import IN_TURN, TIMED, TOGETHER
from workloads.subjects import SIZES, local, points_of

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

CALL: Axes = {"context": [256], "answer": [128], "block": [32], "confidence": [None]}
PARTS = {"clients": load.clients, "join": load.join}
AXES: Axes = {
    **SIZES, "model": ["embedded"], **CALL, "policy": ["fast_dllm_dual"], "part": ["clients"],
    "clients": [1, 4, 16, 64], "requests": [128], "rows": [128, 512, 0],
}  # fmt: skip
QUICK: Axes = {"part": ["clients", "join"], "clients": [2], "requests": [4], "rows": [128], "answer": [64]}
OF: Sequence[str] = ("way",)
COLUMNS = {
    "requests/s": "{requests_per_second:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "forwards a token": "{forwards_per_token:.3f}",
    "first block, p50 and p99, ms": "{first_p50_ms:.0f}, {first_p99_ms:.0f}",
    "end, p50 and p99, ms": "{end_p50_ms:.0f}, {end_p99_ms:.0f}",
    "scheduler's share": "{own_share:.2%}",
}
JOINED = {
    "steps meanwhile": "{steps}",
    "between steps, p50, ms": "{gap_p50_ms:.1f}",
    "p99, ms": "{gap_p99_ms:.1f}",
    "longest, ms": "{gap_max_ms:.1f}",
    "first pass, ms": "{first_pass_ms:.0f}",
}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Of every part those of its own axes."""
    own = {"clients": ("clients", "requests"), "join": ("rows",)}
    for part in axes["part"]:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
        for settings in points_of(axes, *CALL, "policy", *own[part]):
            yield {"part": part} | settings


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of a part's point."""
    return PARTS[settings["part"]](settings, paths=paths)


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A table for each part that was measured."""
    found, told = merged(rows, of=OF, timed=TIMED), {}
    for part, name, columns in (
        ("clients", "{clients} clients, `{policy}`, {way}", COLUMNS),
        ("join", "{context} tokens join, `{policy}`, {rows} rows", JOINED),
    ):
        own = [{"way": "", **row} for row in found if row["part"] == part]
        if own:
            told[f"load_{part}" if part == "join" else "load"] = rows_table(name, columns, own)
    return told


def last_line(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the last line says of the figures that have goals, of medians over rounds."""
    ways: dict[str, dict[int, dict[str, Any]]] = {IN_TURN: {}, TOGETHER: {}}
    for row in merged(rows, of=OF, timed=TIMED):
        if row["part"] == "clients" and row["status"] == "ok":
            ways[row["way"]][row["clients"]] = row

    def over(figure: str, clients: int) -> float:
        return round(ways[TOGETHER][clients][figure] / ways[IN_TURN][clients][figure], 3)

    both = ways[TOGETHER].keys() & ways[IN_TURN].keys()
    return {
        "tokens_over_one_at_a_time": min((over("tokens_per_second", each) for each in both), default=None),
        "first_block_at_16": over("first_p50_ms", 16) if 16 in both else None,
        "forwards_at_16": over("forwards_per_token", 16) if 16 in both else None,
        "scheduler_share": max((round(row["own_share"], 4) for row in ways[TOGETHER].values()), default=None),
    }
