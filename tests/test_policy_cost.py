"""The times of bench/policy_cost.py: which passes it times, and what it makes of the times."""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tiered.policies.base import StepKind
from tiered.policies.none import NoCache
from tiered.policies.registry import POLICIES, PRESETS
from tiered.runtime import Runtime

BENCH = Path(__file__).resolve().parents[1] / "bench"
REFRESH, UPDATE, STEP = StepKind.REFRESH, StepKind.UPDATE, StepKind.STEP


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/policy_cost.py with blocks of 8, imported as it is when it runs: with its folder on the path."""
    monkeypatch.syspath_prepend(BENCH)
    module = importlib.import_module("policy_cost")
    monkeypatch.setattr(module, "BLOCK", 8)
    return module


@pytest.fixture
def bench(cost: ModuleType, tiny_model: Any) -> Any:
    """64 tokens, of which the answer has 24."""
    tokens = torch.randint(0, 120, (1, 64), generator=torch.Generator().manual_seed(0))
    return cost.Bench(runtime=Runtime(tiny_model, policy=NoCache()), tokens=tokens, answer=24)


@pytest.mark.parametrize("name", [*POLICIES, *PRESETS])
def test_what_is_timed_is_the_policy_itself(cost: ModuleType, bench: Any, name: str):
    """Kinds and rows of the passes are those of a call that nobody watches."""
    variants = {variant.name: variant for variant in importlib.import_module("variants").all_variants()}
    variant = variants[name]
    call = variant.call(answer=24, block=cost.BLOCK)
    out = Runtime(bench.runtime.model, policy=variant.make()).generate(bench.tokens[:, :40], stop_at_eos=False, **call)
    assert out.num_forwards > cost.FORWARDS
    passes = bench.passes(variant)
    assert [each.rows for each in passes] == out.rows_per_forward[: cost.FORWARDS]
    every = cost.first_passes(bench.runtime, variant.make(), bench.tokens[:, :40], out.num_forwards - 1, **call)
    kinds = [each.kind.value for each in every]
    left = {kind: count - kinds.count(kind) for kind, count in out.passes.items()}
    assert sorted(left.values())[-1] == 1 and sum(left.values()) == 1  # the last forward has no plan behind it
    assert all(0 < each.plan + each.layers < each.total for each in passes)


def test_choosing_rows_is_timed_and_every_layer_but_the_last(
    cost: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch
):
    clock = itertools.count()
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    call = {"max_new_tokens": 8, "block_length": 8}
    for each in cost.first_passes(bench.runtime, NoCache(), bench.tokens[:, :40], 3, **call):
        # Of two layers, one counts. From plan to plan the clock is read twice in the plan, and about each layer.
        assert (each.plan, each.layers) == (1.0, 1.0)
        assert each.total > each.plan + each.layers


def test_more_forwards_than_a_call_has_are_refused(cost: ModuleType, bench: Any):
    call = {"max_new_tokens": 4, "block_length": 4}
    assert len(cost.first_passes(bench.runtime, NoCache(), bench.tokens[:, :40], 3, **call)) == 3
    with pytest.raises(ValueError, match="3 forwards, 4 were asked for"):
        cost.first_passes(bench.runtime, NoCache(), bench.tokens[:, :40], 4, **call)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_the_block_only_step_has_as_many_rows_and_positions(
    cost: ModuleType, bench: Any, rows: int, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    first_passes = cost.first_passes

    def watched(*arguments: Any, **call: Any) -> Any:
        seen.extend(first_passes(*arguments, **call))
        return seen

    monkeypatch.setattr(cost, "first_passes", watched)
    assert bench.block_only(rows) > 0
    assert [each.rows for each in seen] == [64] + [max(rows, 3)] * (len(seen) - 1)
    assert 2 <= len(seen) <= cost.BLOCK_FORWARDS


def test_figures_of_a_round(cost: ModuleType, tiny_model: Any):
    def passed(kind: StepKind, rows: float, total: float) -> Any:
        return cost.Pass(kind=kind, rows=rows, total=total, plan=total / 8, layers=total / 2)

    class Given(cost.Bench):
        def full(self) -> float:
            return 4.0

        def passes(self, variant: Any) -> list[Any]:
            # Medians 1 and 10, and of times over rows (0.05, 0.2, 0.15) 0.15.
            steps = [passed(STEP, 10, 0.5), passed(STEP, 5, 1.0), passed(STEP, 20, 3.0)]
            return [passed(REFRESH, 100, 5.0), *steps, passed(UPDATE, 50, 2.0)]

        def block_only(self, rows: int) -> float:
            assert rows == 10
            return 0.25

    given = Given(runtime=Runtime(tiny_model, policy=NoCache()), tokens=torch.zeros(1, 100), answer=40)
    figures = cost.one_round(given, None)
    assert figures["full_ms"] == 4000
    assert figures["passes"] == {
        "refresh": {"forwards": 1, "rows": 100, "ms": 5000},
        "update": {"forwards": 1, "rows": 50, "ms": 2000},
        "step": {"forwards": 3, "rows": 10, "ms": 1000},
    }
    assert (figures["rows"], figures["floor"], figures["over_full"]) == (10, 0.1, 0.25)
    assert figures["over_floor"] == pytest.approx(0.15 * 100 / 4)
    assert figures["overhead"] == pytest.approx((1 / 8 + 1 / 2) / 0.25)
    # One layer of the two: in the last one, rows without logits do not go all the way.
    assert (figures["layer_ms"], figures["block_only_layer_ms"]) == (625, 250)


def test_a_round_that_a_policy_refuses_is_one_that_says_why(cost: ModuleType, bench: Any):
    variants = importlib.import_module("variants")
    greedy = variants.Variant(name="greedy", policy="dkv_greedy")  # without the random order that it needs
    dual = variants.Variant(name="dual", policy="fast_dllm_dual")
    for figures in cost.measured(bench, [greedy, dual], 2):
        assert "random" in figures["greedy"]["why"]
        assert figures["dual"]["rows"] == cost.BLOCK


def test_rounds_become_one_median_for_median(cost: ModuleType):
    rounds: list[dict[str, Any]] = [
        {"a": 1.0, "b": {"c": 5.0}},
        {"a": 3.0, "b": {"d": 2.0}},
        {"a": 2.0, "b": {"c": 7.0}},
    ]
    median: Callable[[Any], Any] = cost.medians
    assert median(rounds) == {"a": 2.0, "b": {"c": 6.0, "d": 2.0}}
