"""The study `policy_cost`: its timed passes, and the figures of their times."""

from types import SimpleNamespace
from typing import Any

import pytest
from measuring.study import points_of, study_named
from workloads import policy_cost as cost
from workloads.subjects import loaded, prompts, variant_named

from tiered.policies.base import StepKind

study = study_named("policy_cost")
COMMON = {"device": "cpu", "threads": 1, "seed": 0}
SETTINGS = COMMON | {"model": "random", "width": 64, "layers": 3, "positions": 64, "answer": 24, "block": 8}


@pytest.mark.parametrize("policy", study.AXES["policy"])
def test_timed_passes_are_those_of_the_policy(policy: str):
    """Kinds and rows of the passes are those of a call that is not timed."""
    runtime, prompt, variant = loaded(SETTINGS, {}, 64), prompts(SETTINGS, 40), variant_named(policy)
    call = variant.call(answer=24, block=8)
    plain = runtime.with_policy(variant.make()).generate(prompt, stop_at_eos=False, **call)
    _, passes = cost.passes(runtime, variant.make(), prompt, **call)
    assert [each.rows for each in passes] == plain.rows_per_step
    kinds = [each.kind for each in passes]
    assert {kind.value: kinds.count(kind) for kind in kinds} == plain.steps_by_kind
    # Every layer but the last, with the choice of rows, takes part of a forward.
    assert all(0 < each.chosen_ms < each.ms for each in passes)


def test_figures_of_a_kind_of_a_run_and_of_selection():
    def passed(rows: float, ms: float) -> cost.Pass:
        return cost.Pass(kind=StepKind.STEP, rows=rows, ms=ms, chosen_ms=ms / 2)

    def answer(seconds: float, *rows: float) -> Any:
        timings, sequences = SimpleNamespace(total=seconds), SimpleNamespace(shape=(1, 100))
        return SimpleNamespace(num_forwards=len(rows), rows_per_step=rows, timings=timings, sequences=sequences)

    # Medians 10 and 1, and of times over rows (0.05, 0.2, 0.15) 0.15.
    steps = [passed(10, 0.5), passed(5, 1.0), passed(20, 3.0)]
    figures = cost.of_kind(StepKind.STEP, steps, 100, full_ms=4.0)
    assert list(figures.values()) == [3, 10, 1, 0.25, pytest.approx(0.15 * 100 / 4)]
    # One layer of two: in the last one, rows without logits do not go all the way.
    assert list(cost.overhead(steps, [passed(10, 0.5)], layers=2).values()) == [0.5, 0.25, 2]
    assert cost.overhead([], [], layers=2) == {}
    run = cost.whole_run(
        answer(0.026, 100, 60, 20, 20), [answer(seconds, 100, 20, 20, 20) for seconds in (0.008, 0.012)], full_ms=10.0
    )
    assert (run["forwards"], run["run_ms"], run["run_rows"]) == (4, 26, 200)
    assert run["run_over_dual"] == pytest.approx(2.6) and run["rows_over_dual"] == 200 / 160
    assert run["run_over_none"] == pytest.approx(26 / 40) and run["rows_over_none"] == 0.5


def test_a_point_has_the_cost_of_an_update_and_of_a_whole_run():
    (row,) = cost.measure(SETTINGS | {"policy": "polestar"}, paths={})
    assert not row.keys() & (SETTINGS.keys() | {"policy"})
    assert row["forwards"] == 24 == sum(row[f"{kind}_forwards"] for kind in ("refresh", "update", "step"))
    assert row["step_rows"] == 8 < row["update_rows"] < row["refresh_rows"] == 64
    assert row["run_rows"] / row["rows_over_dual"] == 3 * 64 + 21 * 8, "the dual cache's"
    timed = {name for name in row if not name.endswith(("rows", "forwards")) and not name.startswith("rows")}
    assert timed == {*cost.TIMED}
    steps = cost.block_only(loaded(SETTINGS, {}, 64), SETTINGS, 40)
    assert {(each.kind, each.rows) for each in steps} == {(StepKind.STEP, 40)} and len(steps) < cost.BLOCK_FORWARDS
    done = {"point": "a", "run": 0, "status": "ok", "policy": "polestar"} | row
    refused = {"point": "b", "run": 0, "status": "refused", "why": "no room", "policy": "other"}
    head, _, first, second = study.tables([done, refused])["policy_cost"].splitlines()
    assert "an update" in head and f"| {row['update_rows']:.0f}, {row['update_over_full']:.3f} |" in first
    assert "no room" in second and head.count("|") == first.count("|") == second.count("|")
    with pytest.raises(ValueError, match="positions = 64; more than answer = 64"):
        points_of(study, {**study.AXES, "positions": [64]}, COMMON)
