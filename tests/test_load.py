"""The study `load`: each of many clients gets the same as alone, and the study's tables."""

from typing import Any

import pytest
from measuring.study import points_of, study_named
from training import tasks

import tiered

load = study_named("load")
COMMON = {"device": "cpu", "threads": 1, "seed": 0}


def rows_of(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Measured rows, as a table has them."""
    whole = {**load.AXES, **axes}
    return [
        {"point": point.key, "run": 0, "status": "ok"} | dict(point.settings) | row
        for point in points_of(load, whole, COMMON)
        for row in load.measure(point.settings, **load.local(whole))
    ]


def test_clients_share_forwards_and_get_the_same_tokens():
    rows = rows_of({"clients": [4], "requests": [4], "answer": [32]})
    runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual")
    asked = [tasks.sample("long_lookup", "test", number, size=256).prompt for number in range(4)]
    outs = [runtime.generate(prompt, max_new_tokens=32) for prompt in asked]
    assert [row["way"] for row in rows] == ["one at a time", "together"]
    assert {row["tokens"] for row in rows} == {sum(out.timings.tokens for out in outs)}
    assert rows[0]["forwards"] == sum(out.num_forwards for out in outs) > 2 * rows[1]["forwards"]
    for row in rows:
        assert 0 < row["first_p50_ms"] < row["end_p50_ms"] <= row["end_p99_ms"] <= 1e3 * row["seconds"]
        assert 0 < row["own_share"] < 1
    assert load.last_line(rows)["first_block_at_16"] is None
    told = load.last_line([row | {"clients": 16} for row in rows])
    assert told["forwards_at_16"] == round(rows[1]["forwards"] / rows[0]["forwards"], 3) < 0.5
    assert told["scheduler_share"] == round(rows[1]["own_share"], 4)
    lines = load.tables(rows)["load"].splitlines()
    assert len(lines) == 4 and "4 clients, `fast_dllm_dual`, together" in lines[3]


def test_requests_of_the_model_that_sees_blocks_run_in_three_ways():
    rows = rows_of({"part": ["blocks"], "clients": [3], "requests": [3], "answer": [16]})
    assert [row["way"] for row in rows] == ["one at a time", "no forward shared", "together"]
    in_turn, apart, together = (row["forwards"] for row in rows)
    assert len({row["tokens"] for row in rows}) == 1 and in_turn == apart > 2 * together
    assert {row["model"] for row in rows} == {"embedded-blocks"}
    told = load.last_line([row | {"clients": 16} for row in rows])
    over = rows[2]["tokens_per_second"] / rows[0]["tokens_per_second"]
    assert told["blocks_tokens_over_alone_at_16"] == round(over, 3)
    assert told["blocks_forwards_per_token_at_16"] == round(together / rows[2]["tokens"], 4)
    assert told["tokens_over_one_at_a_time"] is told["scheduler_share"] is told["forwards_at_16"] is None
    lines = load.tables(rows)["load_blocks"].splitlines()
    assert len(lines) == 5 and "3 clients, no forward shared" in lines[3]


def test_a_pass_in_chunks_has_steps_in_between():
    cut, whole = rows_of({"part": ["join"], "rows": [128, 0], "context": [600], "answer": [32]})
    assert cut["steps"] >= 4 and whole["steps"] == 1
    assert cut["gap_p50_ms"] <= cut["gap_p99_ms"] <= cut["gap_max_ms"] < cut["first_pass_ms"]
    assert len(load.tables([cut, whole])["load_join"].splitlines()) == 4
    with pytest.raises(ValueError, match="did you mean 'join'"):
        points_of(load, {**load.AXES, "part": ["jion"]}, COMMON)
