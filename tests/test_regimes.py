"""bench/measure.py regimes: the points of the star, the row of one call, and the winners in the tables."""

from typing import Any

import pytest
from measuring.winners import over_least, winners, wins_from
from measuring.worker import RefusedError
from studies import regimes

SMALL = {"context": 96, "blocks": 2, "block": 32, "layers": 4, "width": 64, "steps": 4}
SMALL |= {"budget": None, "link": None, "seed": 0, "device": "cpu"}


def call(policy: str, **settings: Any) -> dict[str, Any]:
    base, options = regimes.SETS.get(policy, (policy, {}))
    (row,) = regimes.measure(SMALL | {"base": base, "options": options} | settings)
    return row


def test_every_axis_is_measured_beside_every_context_and_links_with_policies_that_move_bytes():
    points = list(regimes.points(regimes.AXES))
    arms: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for point in points:
        arm = tuple(point[name] for name in ("blocks", "steps", "width", "budget", "link"))
        arms.setdefault(arm, []).append((point["context"], point["policy"]))
    again, plain = regimes.AGAIN, [name for name in regimes.POLICIES if name != regimes.AGAIN]
    movers = ["elastic_cache", "polestar", "polestar-drift"]
    wanted = {(blocks, 4, 256, None, None): regimes.POLICIES for blocks in (4, 16)}
    wanted[1, 4, 256, None, None] = [name for name in regimes.POLICIES if name != regimes.FOURTH]
    wanted |= {(4, 32, 256, None, None): plain, (4, 4, 512, None, None): plain}
    wanted |= {(4, 4, 256, budget, None): plain for budget in (1, 0.5)}
    wanted |= {(4, 4, 256, None, link): movers for link in (100, 10)}
    wanted |= {(4, 4, 256, 0.5, 100): plain}
    assert arms == {
        arm: [(size, name) for size in (512, 2048, 8192) for name in names] for arm, names in wanted.items()
    }
    assert again in regimes.SETS and [name for name in plain if name in regimes.SETS] == [regimes.FOURTH, plain[-1]]
    assert {point["block"] for point in points if point["base"] == "elastic_cache"} == {32, 128, 512}
    with pytest.raises(ValueError, match="unknown policy 'fast_dllm_dul'"):
        list(regimes.points({**regimes.AXES, "policy": ["fast_dllm_dul"]}))


def test_rows_are_those_of_the_schedule_and_steps_stand_for_a_threshold():
    positions = 96 + 2 * 32
    assert call("none")["rows_computed"] == 8 * positions
    assert call("fast_dllm_dual")["rows_computed"] == 2 * positions + 6 * 32
    patient = call("polestar", steps=32)
    # One token a step: an update at every fifth; eight: at each. Beside it the block alone is recomputed.
    assert patient["passes"] == {"refresh": 2, "update": 12, "step": 50}
    assert call("polestar")["passes"] == {"refresh": 2, "update": 6}
    assert call("polestar-drift")["passes"] == {"refresh": 1, "update": 7}
    assert patient["moved_bytes"] > 0 and patient["host_bytes"] > 0
    assert call("elastic_cache", block=64)["forwards"] == 8


def test_layers_without_room_are_streamed_and_a_slow_link_shows():
    free, half = call("fast_dllm_dual"), call("fast_dllm_dual", budget=0.5)
    assert call("fast_dllm_dual", budget=1)["moved_bytes"] == free["moved_bytes"] == 0
    assert half["rows_computed"] == free["rows_computed"]
    assert 0 < half["host_bytes"] < half["moved_bytes"] and half["device_bytes"] < free["device_bytes"]
    slow = call("fast_dllm_dual", budget=0.5, link=10)
    assert slow["copy_ms"] >= slow["moved_bytes"] / 1e4
    with pytest.raises(RefusedError, match="device tier needs"):
        call("polestar", budget=0.25, link=100)


def row(policy: str, context: int, seconds: float | None, rows: int = 100, **other: Any) -> dict[str, Any]:
    """As it is read; without `seconds`: refused."""
    settings = {"policy": policy, "context": context, "blocks": 4, "steps": 4, "width": 256} | other
    of = settings | {"point": str(settings), "run": 0, "stamp": "a", "status": "ok" if seconds else "refused"}
    size = {"none": 10, "none-again": 10}.get(policy, 20)
    figures = {"seconds": seconds, "rows_computed": rows, "device_bytes": size, "moved_bytes": 0}
    return of | (figures if seconds else {"why": "no room"})


def test_tables_name_winners_and_borders_and_noise_decides_nothing():
    rows = [row("none", 512, 1.0), row("none-again", 512, 1.05), row("fast_dllm_dual", 512, 0.98, 50)]
    rows += [row("none", 2048, 4.0), row("none-again", 2048, 4.2), row("fast_dllm_dual", 2048, 2.0, 50)]
    rows += [row("polestar", 512, 3.0, 40), row("polestar", 2048, 1.0, 60)]
    rows += [row("polestar", 2048, 9.0, 60, link=10), row("fast_dllm_dual", 2048, None, budget=0.5)]
    tables = regimes.tables(rows)
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in tables["regimes"].splitlines()}
    assert tables["regimes"].startswith("`none` twice, 2 times: apart by 5.0% at the 80th percentile, by 5.0% at most.")
    # Both are the fastest, because noise may explain their difference; rows and bytes are exact.
    assert lines["512 blocks=4"][1:5] == ["fast_dllm_dual, none", "polestar", "none", "1.02"]
    assert lines["2048 blocks=4"][1:5] == ["polestar", "fast_dllm_dual", "none", "2.00"]
    # A policy that moves nothing takes part beside a link; a refused one is shown as refused.
    assert lines["2048 blocks=4 link=10"][1] == "fast_dllm_dual" and "4.50" in lines["2048 blocks=4 link=10"]
    assert "refused" in lines["2048 blocks=4 budget=0.5"]
    border = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in tables["border"].splitlines()}
    assert border["`fast_dllm_dual`"][1] == "2048 · 512 · -"
    assert border["`polestar`"][1:3] == ["2048 · - · -", "nowhere"]
    assert "none-again" not in tables["border"] + tables["regimes"]


def test_a_border_begins_where_nothing_larger_is_lost():
    won = {"a": {"s": 2.0}, "b": {"s": 1.0}}
    lost = {"a": {"s": 1.0}, "b": {"s": 1.0}}
    assert wins_from({1: won, 2: lost, 3: won}, "b", ["a"], "s") == 3
    assert wins_from({1: won, 2: won}, "b", ["a"], "s", noise=1.0) is None
    assert wins_from({1: {"a": {}, "b": {"s": 1.0}}, 2: {"a": {"s": 1.0}}}, "b", ["a"], "s") is None
    assert over_least(won, "s") == {"b": 1.0, "a": 2.0} and winners({"a": {}}, "s") == []
