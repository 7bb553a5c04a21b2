"""The study `memory`: bytes over the forwards of a call, and that the ledger agrees with what torch allocates."""

import gc
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from allocations import Allocations
from measuring.study import points_of, study_named
from workloads import memory, subjects

from tiered.core.features import Account
from tiered.forward.feature_store import FeatureStore
from tiered.forward.sizes import CallShape
from tiered.models.llada import LLaDA
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

RECORDS = {"clusters": 8, "update_threshold": 0}
# Every way in which bytes are kept: features, streamed ones, branches, stored inputs, records on the host and on the
# device.
POLICIES: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "none": ("none", {}, None),
    "dual": ("fast_dllm_dual", {}, None),
    "streamed": ("fast_dllm_dual", {}, 0.99),
    "branches": ("dllm_cache", {}, None),
    "stored inputs": ("elastic_cache", {"window": 8}, None),
    "records": ("polestar", RECORDS, None),
    "records on the device": ("polestar-window", RECORDS, None),
    "raw records": ("polestar", RECORDS | {"codec": "raw", "refresh": "drift"}, None),
}
IDS = torch.randint(0, 100, (2, 96), generator=torch.Generator().manual_seed(0))
CALL: dict[str, Any] = {"max_new_tokens": 32, "steps": 4, "stop_at_eos": False}


@pytest.fixture
def model(tiny_config: dict[str, Any]) -> LLaDA:
    """Four layers: records are of those between the first and the last."""
    torch.manual_seed(0)
    made = LLaDA.from_config({**tiny_config, "n_layers": 4})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("case", POLICIES)
def test_the_ledger_is_what_torch_allocates(case: str, model: LLaDA):
    name, options, room = POLICIES[case]
    call: dict[str, Any] = CALL | {"block_length": 32 if name == "elastic_cache" else 16}
    runtime = memory.with_books(Runtime(model, policy=make_policy(name, **options)), room, IDS, **call)
    gc.collect()
    rows = {(row["tier"], row["what"]): row for row in memory.checks(runtime, IDS, **call)}
    kept, host = rows["device", "kept"], rows["host", "kept"]
    assert kept["ledger"] > 0 and kept["difference"] == host["difference"] == 0
    assert all(row["agrees"] and "status" not in row for row in rows.values()) and len(rows) == 3
    assert (host["ledger"] > 0) == (case in ("streamed", "stored inputs", "records", "raw records"))
    # The timeline is the ledger, forward by forward.
    timeline = memory.MemoryTimeline(runtime.ledger)
    out = runtime.generate(IDS, inspector=timeline, **call)
    assert [row["account"] for row in timeline.rows if row["forward"] == -1] == [Account.WEIGHTS.value]
    passes = list({row["forward"]: row["pass"] for row in timeline.rows if row["forward"] >= 0}.values())
    assert {kind: passes.count(kind) for kind in passes} == out.steps_by_kind
    for tier, report in out.memory.tiers.items():
        held = [
            sum(r["bytes"] for r in timeline.rows if r["forward"] == n and r["tier"] == tier.value) for n in range(4)
        ]
        # Between two forwards a tier may hold more for a moment, never less than after one.
        assert 0 <= max(held) <= report.peak and (max(held) > 0) == (report.peak > 0)


def test_unbooked_bytes_are_a_failed_row(model: LLaDA, monkeypatch: pytest.MonkeyPatch):
    made = FeatureStore.__init__

    def greedy(self: FeatureStore, sizes: CallShape, *others: Any) -> None:
        made(self, replace(sizes, context=sizes.context + 64), *others)
        for tensor in chain.from_iterable(self._tensors.values()):
            tensor.zero_()  # numbers that are never written would else be NaN

    monkeypatch.setattr(FeatureStore, "__init__", greedy)
    kept, *_ = memory.checks(Runtime(model, policy=make_policy("fast_dllm_dual")), IDS, **CALL, block_length=16)
    assert kept["status"] == "failed" and kept["difference"] == kept["ledger"] * 64 // 128


def test_all_that_is_asked_of_a_call_is_a_row():
    small = {"width": [64], "layers": [4], "positions": [128], "answer": [64]}
    study, table = study_named("memory"), []
    axes = {**study.AXES, **small, "call": ["fast_dllm_dual", "polestar", "polestar on LLaDA-8B"]}
    for point in points_of(study, axes, {"device": "cpu", "threads": 1, "seed": 0}):
        for row in memory.measure(point.settings, **subjects.local({"model": []})):
            assert not row.keys() & point.settings.keys()
            whole = {"point": point.key, "run": 0, "status": "ok"} | dict(point.settings) | row
            table.append({name: value for name, value in whole.items() if value is not None})
    abouts = {call: {row["about"] for row in table if row["call"] == call} for call in axes["call"]}
    assert {"bytes", "features", "check"} <= abouts["fast_dllm_dual"] <= abouts["polestar"]
    assert "drift" in abouts["polestar"] and abouts["polestar on LLaDA-8B"] == {"plan", "features"}
    tables = study.tables(table)
    assert tables["memory"].count("agrees |") == 1 + 6 and "DIFFERS" not in tables["memory"]
    _, _, dual, polestar, *plans = tables["features"].splitlines()
    assert "| 1.000 |" in dual and "| 1.000 |" not in polestar and len(plans) == 3
    check = next(row for row in table if row["about"] == "check") | {"agrees": False, "status": "failed", "why": "…"}
    assert "| DIFFERS |" in study.tables([check])["memory"]


def test_storages_count_from_the_operation_to_their_end():
    base = torch.zeros(10)
    with Allocations() as allocations:
        first = torch.zeros(100)
        base.add_(1)
        view = first[:10].view(2, 5)  # no storage of its own
        second = first + 1
        assert allocations.held == allocations.peak == 800
        torch.add(first, 1, out=second)
        del first
        assert allocations.held == 800, "the view keeps it"
        del view
        assert (allocations.held, allocations.peak) == (400, 800)
    assert allocations.held_by("") == 400
    del second
    assert allocations.held == allocations.held_by("") == 0
