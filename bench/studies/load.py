"""Many clients of one scheduler beside one request at a time, and steps of others while a prompt joins.

`--part clients`: each of `--clients` clients asks again as soon as it is answered. Every point is served twice in the
same process, one request at a time and together. `--part join`: a request runs while a prompt of `--context` tokens has
its first pass, in chunks of `--rows` rows (0 for one piece). `--part blocks`: the clients ask the embedded model that
sees blocks, with its own policy and blocks. A third time they run together and share no forward.

    python bench/measure.py load                                              # a quarter of an hour on two idle cores
    python bench/measure.py load --keep --part join --context 3968
    python bench/measure.py load --keep --part blocks --clients 1,4,16

The last line of stdout says, each null as long as its rows are missing,

    tokens_over_one_at_a_time       tokens a second of all clients together over those in turn: the smallest
    first_block_at_16               of 16 clients, the median time to the first block over that in turn
    forwards_at_16                  of 16 clients, forwards a token of answers over that in turn
    scheduler_share                 of a round's time, the scheduler's own: the largest
    blocks_tokens_over_alone_at_16  part `blocks`: of 16 clients, tokens a second together over those in turn
    blocks_forwards_per_token_at_16 part `blocks`: of 16 clients together, forwards a token of answers
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads import load
from workloads.load import BLOCKS, IN_TURN, TIMED, TOGETHER
from workloads.subjects import SIZES, points_of
from workloads.subjects import local as local_of

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

CALL: Axes = {"context": [256], "answer": [128], "block": [32], "confidence": [None]}
PARTS = {"clients": load.clients, "join": load.join, "blocks": load.clients}
AXES: Axes = {
    **SIZES, "model": ["embedded"], **CALL, "policy": ["fast_dllm_dual"], "part": ["clients"],
    "clients": [1, 4, 16, 64], "requests": [128], "rows": [128, 512, 0],
}  # fmt: skip
QUICK: Axes = {"part": [*PARTS], "clients": [2], "requests": [4], "rows": [128], "answer": [64]}
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


def local(axes: Axes) -> dict[str, Any]:
    """The paths of the models, that of part `blocks` among them."""
    return local_of({**axes, "model": [*axes["model"], BLOCKS]})


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The points of every part, over its own axes."""
    asked = ("context", "answer", "confidence", "clients", "requests")
    for part in axes["part"]:
        if part == "clients":
            found = points_of(axes, *CALL, "policy", "clients", "requests")
        elif part == "join":
            found = points_of(axes, *CALL, "policy", "rows")
        elif part == "blocks":
            found = points_of({**axes, "model": [BLOCKS]}, *asked)
        else:
            raise unknown_name("part", part, PARTS)
        yield from ({"part": part} | settings for settings in found)


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of a part's point."""
    return PARTS[settings["part"]](settings, paths=paths)


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A table for each part that was measured."""
    found, told = merged(rows, of=OF, timed=TIMED), {}
    for part, name, columns in (
        ("clients", "{clients} clients, `{policy}`, {way}", COLUMNS),
        ("join", "{context} tokens join, `{policy}`, {rows} rows", JOINED),
        ("blocks", "{clients} clients, {way}", COLUMNS),
    ):
        own = [{"way": "", **row} for row in found if row["part"] == part]
        if own:
            told["load" if part == "clients" else f"load_{part}"] = rows_table(name, columns, own)
    return told


def last_line(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The figures that have goals, of medians over rounds, for the last line."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]

    def by_clients(part: str, way: str) -> dict[int, dict[str, Any]]:
        return {row["clients"]: row for row in good if row["part"] == part and row["way"] == way}

    def over(figure: str, part: str, clients: int) -> float | None:
        together, in_turn = (by_clients(part, way).get(clients) for way in (TOGETHER, IN_TURN))
        return round(together[figure] / in_turn[figure], 3) if together and in_turn else None

    shared, blocks = (by_clients(part, TOGETHER) for part in ("clients", "blocks"))
    tokens = [over("tokens_per_second", "clients", each) for each in shared]
    return {
        "tokens_over_one_at_a_time": min((each for each in tokens if each is not None), default=None),
        "first_block_at_16": over("first_p50_ms", "clients", 16),
        "forwards_at_16": over("forwards_per_token", "clients", 16),
        "scheduler_share": max((round(row["own_share"], 4) for row in shared.values()), default=None),
        "blocks_tokens_over_alone_at_16": over("tokens_per_second", "blocks", 16),
        "blocks_forwards_per_token_at_16": round(blocks[16]["forwards_per_token"], 4) if 16 in blocks else None,
    }
