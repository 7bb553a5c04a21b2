"""Rows, floors and books of the part of a GPU day at LLaDA-8B's shape, with the model at its tiny size on the CPU."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tiered
import tiered.runtime
from tiered.core.features import Account, Tier
from tiered.core.rates import Rates
from tiered.forward.library_bytes import LARGEST_GPU
from tiered.kernels.projection import adjoining
from tiered.offload.lane import Lane
from tiered.policies.base import StepKind
from tiered.policies.polestar.update_log import GroupUpdate
from tiered.tiers.stats import TierStats, WayStats

BLOCK = 32
GIB = 1 << 30


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.syspath_prepend(request.config.rootpath / "bench")


@pytest.fixture
def part() -> Callable[[str], ModuleType]:
    return lambda name: importlib.import_module(f"gpu_parts.{name}")


@pytest.fixture
def setting(part: Callable[[str], ModuleType]) -> Any:
    return part("setting").Setting(device="cpu", tiny=True, seed=3)


@pytest.fixture
def steps(part: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # Every call is made twice, however slow the machine is.
    monkeypatch.setattr(part("steps"), "_QUICK", 1e9)
    return part("steps")


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the peak of the device's allocator."""
    return lambda nbytes: monkeypatch.setattr(tiered.runtime, "allocator_peak", lambda device: nbytes)


# The model


def test_model_is_drawn_whole(part: Callable[[str], ModuleType], setting: Any) -> None:
    # New memory holds NaN in tests, so unwritten numbers show.
    model = part("random_llada").random_llada(setting)
    plan = tiered.plan(part("random_llada").llada_config(setting), context=64, policy="none")
    held = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert held == plan.tiers[Tier.DEVICE].accounts[Account.WEIGHTS]
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert not parameter.requires_grad, name
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.002, name
    assert list(model.buffers()) == []
    assert part("random_llada").random_llada(replace(setting)) is model  # an equal setting: the same model
    other = part("random_llada").random_llada(replace(setting, seed=4))
    assert not torch.equal(other.wte.weight, model.wte.weight)


def test_products_of_a_layer_are_joined_as_those_of_a_loaded_model(
    part: Callable[[str], ModuleType], setting: Any
) -> None:
    for dtype in (None, torch.float32):
        for block in part("random_llada").few_layers(setting, 2, dtype).blocks:
            for names in (("q_proj", "k_proj", "v_proj"), ("ff_proj", "up_proj")):
                assert adjoining([getattr(block, name).weight for name in names]) is not None


def test_full_size_is_that_of_llada_8b(part: Callable[[str], ModuleType], setting: Any) -> None:
    llada = part("random_llada")
    config = llada.llada_config(replace(setting, tiny=False))
    assert tiered.plan(config, context=64, policy="none").tiers[Tier.DEVICE].accounts[Account.WEIGHTS] == 2 * PARAMETERS
    assert config["max_sequence_length"] >= 131072
    assert sum(parameter.numel() for parameter in llada.without_weights(config).parameters()) == PARAMETERS


def test_ids_are_no_special_tokens(part: Callable[[str], ModuleType], setting: Any) -> None:
    for tiny, least_special in ((True, 510), (False, 126081)):
        ids = part("random_llada").random_ids(replace(setting, tiny=tiny), 4000)
        assert ids.shape == (1, 4000)
        assert 0.9 * least_special < ids.max() < least_special
        assert ids.min() >= 0


# Rows of the steps


ROWS: Mapping[str, Mapping[str, int]] = {
    # 16 forwards of 2 commits each. More than 4 since the last update call for one: every third forward.
    "fast_dllm_dual": {"refresh": 1, "step": 15},
    "polestar_resident": {"refresh": 1, "step": 10, "update": 5},
    "polestar_raw": {"refresh": 1, "step": 10, "update": 5},
    "polestar_delta": {"refresh": 1, "step": 10, "update": 5},
    # Two blocks of 8 forwards, in each of which the fifth goes over the next block too.
    "uniform": {"refresh": 2, "step": 12, "update": 2},
    "none": {"refresh": 16},
}


@pytest.mark.parametrize("variant", ROWS)
def test_row_of_a_policy(steps: ModuleType, setting: Any, variant: str) -> None:
    row = steps.measure(setting, f"{variant} 96")
    assert row["ok"] is True, row
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["forwards"] == ROWS[variant]
    assert {kind: figures["forwards"] for kind, figures in row["kinds"].items()} == ROWS[variant]
    for figures in row["kinds"].values():
        assert 0 < figures["p20_ms"] <= figures["median_ms"] <= figures["p80_ms"]
        assert figures["over_floor"] == pytest.approx(figures["median_ms"] / figures["floor_ms"])
        assert figures["floor_ms"] == max(figures["bytes_floor_ms"], figures["flops_floor_ms"])
        assert "again_share" in figures
    assert row["kinds"]["refresh"]["rows"] == 96
    assert row["memory"]["planned_device_bytes"] >= row["memory"]["booked_device_bytes"] > 900_000
    if "step" in row["kinds"]:
        assert row["kinds"]["step"]["rows"] == BLOCK
    if variant.startswith("polestar"):
        update = row["kinds"]["update"]
        assert 0 < update["renewed_rows"] < 96 - BLOCK  # two of six clusters
        assert update["floor_ms"] <= update["in_turn_floor_ms"] * (1 + 1e-9)
        assert (row["copies"] != {}) == (variant != "polestar_resident")
    if variant in ("polestar_raw", "polestar_delta"):
        fetch = row["copies"]["fetch"]
        assert fetch["bytes"] > 0 and fetch["copy_ms"] > 0 and 0 <= fetch["hidden_share"] <= 1
        assert fetch["most_exposed_ms"] <= fetch["exposed_ms"]
        assert row["memory"]["planned_host_bytes"] >= row["memory"]["booked_host_bytes"] > 0


def test_copies_are_those_of_the_tiers(part: Callable[[str], ModuleType]) -> None:
    fetches = {
        3: WayStats(jobs=1, nbytes=400, busy_ns=4_000_000, exposed_ns=1_000_000),
        5: WayStats(jobs=2, nbytes=600, busy_ns=1_000_000, exposed_ns=3_000_000),
        7: WayStats(jobs=1, nbytes=0, busy_ns=0, exposed_ns=9_000_000),  # asked for nothing
    }
    stats = TierStats(layers={layer: {Lane.FETCH: way, Lane.STORE: WayStats()} for layer, way in fetches.items()})
    stats.ways[Lane.FETCH] = WayStats(jobs=3, nbytes=1000, busy_ns=5_000_000, exposed_ns=4_000_000)
    assert part("step_figures").copies(stats) == {
        "fetch": {
            "jobs": 3, "bytes": 1000, "copy_ms": 5.0, "exposed_ms": 4.0, "hidden_share": 0.2, "gb_per_s": 0.0002,
            "layers": 2, "most_exposed_layer": 5, "most_exposed_ms": 3.0, "least_hidden_share": 0.0,
        }
    }  # fmt: skip
    assert part("step_figures").copies(TierStats()) == {}
    assert part("step_figures").copies(None) is None


def test_contexts_come_in_order(steps: ModuleType, setting: Any) -> None:
    contexts = [int(case.split()[1]) for case in steps.cases(replace(setting, tiny=False))]
    assert contexts == sorted(contexts) and set(contexts) == {1024, 4096, 16384, 32768}
    assert len(steps.cases(setting)) == 2 * len(ROWS)
    assert [steps.call_of("none", context).steps for context in (1024, 4096, 16384, 32768)] == [16, 8, 2, 2]


@pytest.mark.parametrize(("excess", "ok"), [(0, True), (1, False)])
def test_books_decide(steps: ModuleType, setting: Any, peak: Callable[[int], None], excess: int, ok: bool) -> None:
    booked = steps.measure(setting, "polestar_delta 96")["memory"]["booked_device_bytes"]
    peak(booked + excess)
    row = steps.measure(setting, "polestar_delta 96")
    assert row["ok"] is ok
    assert ok or f"{booked + 1} bytes, 1 more than the {booked}" in row["why"]


def test_wrong_plan_shows(
    monkeypatch: pytest.MonkeyPatch, steps: ModuleType, setting: Any, peak: Callable[[int], None]
) -> None:
    right = steps.measure(setting, "fast_dllm_dual 96")["memory"]["planned_device_bytes"]
    peak(right)
    assert steps.measure(setting, "fast_dllm_dual 96")["memory"]["plan_difference_share"] == 0
    planned = steps.planned
    monkeypatch.setattr(steps, "planned", lambda *of: planned(*of[:2], replace(of[2], positions=64)))
    memory = steps.measure(setting, "fast_dllm_dual 96")["memory"]
    assert memory["plan_difference_share"] == (right - memory["planned_device_bytes"]) / memory["planned_device_bytes"]
    assert memory["plan_difference_share"] > 0.01
    assert memory["booked_difference_share"] == 0


def test_policies_that_disagree_are_found(steps: ModuleType, setting: Any) -> None:
    steps.measure(setting, "polestar_resident 96")
    answer = steps._answers[setting, "polestar_resident", 96]
    assert len(answer) == BLOCK
    answer[5] += 1
    row = steps.measure(setting, "polestar_raw 96")
    assert (row["ok"], row["why"]) == (False, "1 of 32 tokens differ from those of polestar_resident")


def test_calls_that_disagree_are_found(monkeypatch: pytest.MonkeyPatch, steps: ModuleType, setting: Any) -> None:
    run, calls = steps.PolicyCall.run, []

    def changed(call: Any, *of: Any) -> Any:
        calls.append(run(call, *of))
        return replace(calls[-1], answer=[*calls[-1].answer[:-1], len(calls)])

    monkeypatch.setattr(steps.PolicyCall, "run", changed)
    row = steps.measure(setting, "fast_dllm_dual 96")
    assert (row["ok"], row["why"]) == (False, "two equal calls gave different tokens")


def test_wrong_numbers_are_found(part: Callable[[str], ModuleType], steps: ModuleType, setting: Any) -> None:
    model = part("random_llada").random_llada(setting)
    model.ln_f.weight[7] = torch.nan
    try:
        with pytest.raises(tiered.NonFiniteError):  # which the row then has
            steps.measure(setting, "fast_dllm_dual 96")
    finally:
        model.ln_f.weight[7] = 1.0


@pytest.mark.parametrize(
    ("answer", "fault"),
    [([1, 511, 511], "2 of 3 tokens are still masks"), ([1, 512, -1], "[512, -1]"), ([1, 2, 3], "")],
)
def test_answers_that_are_none(part: Callable[[str], ModuleType], setting: Any, answer: list[int], fault: str) -> None:
    model = part("random_llada").random_llada(setting)
    measured = part("policy_calls").Measured(out=SimpleNamespace(), kinds=(), answer=answer)
    faults = "; ".join(measured.faults(model))
    assert fault in faults
    assert bool(fault) == bool(faults)


# Floors

LAYERS, WIDTH, MLP, VOCABULARY = 32, 4096, 12288, 126464
LAYER_MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP
PARAMETERS = LAYERS * (LAYER_MATRICES + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
READ = 2 * (PARAMETERS - VOCABULARY * WIDTH)  # bytes of the weights, without the table that tokens are looked up in


def flops(positions: int, keys: list[int], through: list[int]) -> int:
    """Of a pass in which each layer computes keys and values of so many rows, and sends so many through the rest."""
    total = 2 * BLOCK * WIDTH * VOCABULARY
    for key_rows, rows in zip(keys, through, strict=True):
        total += 2 * key_rows * 2 * WIDTH * WIDTH  # keys, values
        total += 2 * rows * (2 * WIDTH * WIDTH + 3 * WIDTH * MLP)  # queries, output; gate, up, down
        total += 2 * 2 * rows * positions * WIDTH  # scores, and the values they weigh
    return total


def floors_at_1k(part: Callable[[str], ModuleType], setting: Any, updates: list[GroupUpdate]) -> Mapping[StepKind, Any]:
    llada = part("random_llada")
    shape = tiered.plan(llada.llada_config(replace(setting, tiny=False)), context=64, policy="none").shape
    out = SimpleNamespace(rows_per_step=[1024.0, 32.0, 280.0, 32.0], updates=updates)
    kinds = (StepKind.REFRESH, StepKind.STEP, StepKind.UPDATE, StepKind.STEP)
    return part("step_figures").floors(shape, 1024, out, kinds)


def test_floors_are_those_of_a_hand_count(part: Callable[[str], ModuleType], setting: Any) -> None:
    renewed = [100 + layer for layer in range(31)]  # by layer; the last one renews none
    updates = [
        GroupUpdate(
            forward=2, layer=layer, layers=1, drift=[[0.0]], clusters=[[0]], rows=[rows], patched=[0],
            fetched_bytes=1000, ahead=0, on_demand=0, in_vain=0, repairs=0,
        )
        for layer, rows in enumerate(renewed)
    ]  # fmt: skip
    found = floors_at_1k(part, setting, updates)
    kv = 1024 * GIB // 2048  # half a MiB a token
    assert found[StepKind.STEP].nbytes == found[StepKind.REFRESH].nbytes == READ + kv
    assert 14.4 * GIB < READ + kv < 14.6 * GIB
    assert found[StepKind.STEP].flops == flops(1024, [32] * 32, [32] * 32)
    assert found[StepKind.REFRESH].flops == flops(1024, [1024] * 32, [1024] * 31 + [32])
    # Rows that a layer renews have their keys made in the next one.
    keys, through = [32, *(32 + rows for rows in renewed)], [*(32 + rows for rows in renewed), 32]
    assert found[StepKind.UPDATE].flops == pytest.approx(flops(1024, keys, through), rel=1e-12)
    assert found[StepKind.UPDATE].nbytes == READ + kv + 31 * 1000
    assert (found[StepKind.UPDATE].rows, found[StepKind.UPDATE].renewed_rows) == (32 + 115, 115)
    rates = Rates(flops_per_second=7e14, bytes_per_second=3e12)
    step = found[StepKind.STEP].figures(rates)
    assert step["floor_ms"] == step["bytes_floor_ms"] == pytest.approx((READ + kv) / 3e9)
    assert 5 < step["floor_ms"] < 5.5
    refresh = found[StepKind.REFRESH].figures(rates)
    assert refresh["floor_ms"] == refresh["flops_floor_ms"] == pytest.approx(found[StepKind.REFRESH].flops / 7e11)


def test_update_without_clusters_counts_its_rows(part: Callable[[str], ModuleType], setting: Any) -> None:
    found = floors_at_1k(part, setting, [])[StepKind.UPDATE]
    assert (found.rows, found.renewed_rows) == (280, 0)
    assert found.flops == flops(1024, [280] * 32, [280] * 31 + [32])


# Books of a device


@pytest.fixture
def gigabyte_device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """torch.cuda's counts, faked: a device of 1 GiB."""
    counts = {"allocated": 1000, "reserved": 4096, "free": GIB - 10_000}
    for name, fake in {
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: counts["allocated"],
        "memory_reserved": lambda: counts["reserved"],
        "mem_get_info": lambda: (counts["free"], GIB),
        "memory_stats": lambda: {"reserved_bytes.all.peak": 8192, "inactive_split_bytes.all.peak": 512},
        "set_per_process_memory_fraction": lambda share: counts.__setitem__("cap", round(share * GIB)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return counts


def test_memory_of_a_device(
    part: Callable[[str], ModuleType],
    setting: Any,
    peak: Callable[[int], None],
    gigabyte_device: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = part("policy_calls").CallMemory(torch.device("cuda"))
    gigabyte_device |= {"free": GIB - 20_000, "reserved": 9000, "allocated": 7}
    peak(200_000_000)
    calls = part("policy_calls")
    policy, call = calls.policy_of("fast_dllm_dual", setting), calls.PolicyCall(positions=96, steps=4)
    monkeypatch.setattr("tiered.call.gpu_of", lambda device: LARGEST_GPU)
    monkeypatch.setattr("tiered.planning.plan.gpu_of", lambda device: LARGEST_GPU)
    out = call.run(part("random_llada").random_runtime(setting, policy), setting).out
    figures = memory.figures(out, calls.planned(setting, policy, call))
    weights = figures["booked_device_accounts_bytes"]["weights"]
    assert figures["libraries_before_bytes"] == 1000 - weights  # as they were before the call
    libraries = figures["libraries_booked_bytes"]
    assert libraries == LARGEST_GPU.workspace_bytes + 2 * (96 + 32) * 4  # and a mask, in float32
    assert libraries == figures["planned_device_accounts_bytes"]["libraries"]
    assert (figures["outside_torch_before_bytes"], figures["outside_torch_after_bytes"]) == (10_000 - 4096, 11_000)
    assert (figures["reserved_peak_bytes"], figures["inactive_split_peak_bytes"]) == (8192, 512)
    assert figures["allocator_peak_bytes"] == 200_000_000
    booked = figures["booked_device_bytes"]
    assert list(memory.faults(out, cap=200_000_000)) == [
        f"torch held 200000000 bytes, {200_000_000 - booked} more than the {booked} that were booked; "
        f"{1000 - weights} were there before the call, {libraries} are libraries'"
    ]
    assert len(list(memory.faults(out, cap=199_999_999))) == 2


def test_torch_is_limited_meanwhile(part: Callable[[str], ModuleType], gigabyte_device: dict[str, int]) -> None:
    limit = part("budget").torch_limit
    with pytest.raises(KeyError), limit(torch.device("cuda"), 500_000_000):
        assert gigabyte_device["cap"] == 500_000_000
        raise KeyError
    assert gigabyte_device["cap"] == GIB
    del gigabyte_device["cap"]
    for device, cap in (("cuda", None), ("cpu", 500)):
        with limit(torch.device(device), cap):
            assert "cap" not in gigabyte_device


def test_call_that_the_device_cannot_hold_is_left_out(
    steps: ModuleType, setting: Any, gigabyte_device: dict[str, int]
) -> None:
    on_device = replace(setting, device="cuda", tiny=False)
    row = steps.measure(on_device, "polestar_raw 32768")
    assert row["status"] == "skipped" and f"the device has {GIB}" in row["why"]


# The longest context


@pytest.fixture
def budget(part: Callable[[str], ModuleType]) -> ModuleType:
    return part("budget")


@pytest.mark.parametrize("streams", [True, False])
def test_longest_context_runs_and_no_block_more(budget: ModuleType, setting: Any, streams: bool) -> None:
    case = "polestar_delta, host 64GiB" if streams else "fast_dllm_dual, host 0"
    row = budget.measure(setting, case)
    assert row["ok"] is True, row
    json.dumps(row, allow_nan=False)
    assert row["longest_context"] == row["ran_at"] and row["ran"] == "at the longest context"
    assert row["forwards"] == ({"refresh": 1, "step": 2, "update": 1} if streams else {"refresh": 1, "step": 3})
    assert row["memory"]["booked_device_bytes"] <= row["device_budget_bytes"] == 2 << 20
    assert row["memory"]["booked_host_bytes"] <= row["host_budget_bytes"]
    assert bool(row["streamed_layers"]) is streams
    refused = row["refused_beyond"]
    assert refused["positions"] == row["longest_context"] + BLOCK
    assert refused["needed_bytes"] > refused["available_bytes"]
    dual = budget.measure(setting, "fast_dllm_dual, host 0")["longest_context"]
    assert row["over_fast_dllm_dual"] == row["longest_context"] / dual
    assert row["over_fast_dllm_dual"] == 1 or streams


def test_every_case_of_the_budget_passes(budget: ModuleType, setting: Any) -> None:
    cases = budget.cases(setting)
    assert len(cases) == 6
    rows = {case: budget.measure(setting, case) for case in cases}
    assert {case for case, row in rows.items() if row["ok"] is not True} == set()
    resident, host = rows["polestar_resident, host 0"], rows["polestar_raw, host 64GiB"]
    assert resident["longest_context"] <= host["longest_context"]  # how much less, is seen at a real size: test_plan.py
    assert resident["memory"]["booked_host_bytes"] == 0 < host["memory"]["booked_host_bytes"]


def test_context_that_is_planned_too_short_is_found(
    monkeypatch: pytest.MonkeyPatch, budget: ModuleType, setting: Any
) -> None:
    longest = budget.longest_context
    monkeypatch.setattr(budget, "longest_context", lambda *of: longest(*of) - BLOCK)
    row = budget.measure(setting, "polestar_raw, host 64GiB")
    assert (row["ok"], row["why"]) == (False, f"{row['longest_context'] + BLOCK} positions were not refused")
    monkeypatch.setattr(budget, "longest_context", lambda *of: longest(*of) + BLOCK)
    with pytest.raises(tiered.TierCapacityError):
        budget.measure(setting, "polestar_raw, host 64GiB")


def test_peak_above_the_cap_is_found(budget: ModuleType, setting: Any, peak: Callable[[int], None]) -> None:
    peak((2 << 20) + 1)
    row = budget.measure(setting, "fast_dllm_dual, host 0")
    assert row["ok"] is False
    assert f"1 more than the {2 << 20} of the cap" in row["why"]


def test_call_that_torch_refuses_is_repeated(
    monkeypatch: pytest.MonkeyPatch, budget: ModuleType, part: Callable[[str], ModuleType], setting: Any
) -> None:
    calls = part("policy_calls")
    budget._warm_up(setting, "fast_dllm_dual")
    run, tried = calls.PolicyCall.run, []

    def refused(call: Any, *of: Any) -> Any:
        tried.append(call.positions)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
        return run(call, *of)

    monkeypatch.setattr(calls.PolicyCall, "run", refused)
    row = budget.measure(setting, "fast_dllm_dual, host 0")
    assert (row["ok"], row["why"]) == (False, "torch refused what the ledger allows: CUDA out of memory.")
    assert tried == [row["longest_context"]] * 2
    assert row["memory"]["booked_device_bytes"] > 0


@pytest.mark.parametrize(
    ("longest", "most", "positions"),
    [(200_000, 65.6, 65536), (200_000, 50, 49152), (50_000, 50, 50_000), (50_000, 40, 32768), (20_000, 10, 4096),
     (20_000, 1, 4096), (2000, 1, 2000)],
)  # fmt: skip
def test_run_is_as_long_as_time_allows(
    monkeypatch: pytest.MonkeyPatch, budget: ModuleType, setting: Any, longest: int, most: float, positions: int
) -> None:
    monkeypatch.setattr(budget, "expected_seconds", lambda setting, policy, memory, positions: positions / 1000)
    found = budget.fitting_run(setting, None, None, longest, most)
    assert found == (positions, positions / 1000)


def test_shorter_run_says_so(monkeypatch: pytest.MonkeyPatch, budget: ModuleType, setting: Any) -> None:
    monkeypatch.setattr(budget, "_POSITIONS", (65536, 128))
    monkeypatch.setattr(budget, "expected_seconds", lambda setting, policy, memory, positions: positions)
    row = budget.measure(setting, "polestar_delta, host 64GiB")
    assert (row["ran_at"], row["ok"]) == (128, True)
    assert row["ran"].startswith("planned only")
    assert row["refused_beyond"]["positions"] == row["longest_context"] + BLOCK
    longer = budget.measure(setting, "polestar_delta, host 64GiB, longer")
    assert "no longer run" in longer["why"]
