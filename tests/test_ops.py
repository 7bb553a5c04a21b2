"""The study `ops`: operations cover the wall clock, and the cost card counts what a forward does."""

from typing import Any

import pytest
import torch
from measuring.study import points_of, study_named
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from workloads.models import random_model
from workloads.operations import floor
from workloads.subjects import local

import tiered
from tiered.core.rates import Rates
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.forward_work import forward_work
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.planning.machine_rates import machine_rates
from tiered.policies.registry import make_policy

ops = study_named("ops")
SMALL = {"width": [128], "layers": [3], "positions": [160], "batch": [2], "steps": [8]}
CASES = [*(("random", policy) for policy in ops.AXES["policy"]), ("embedded", "none"), ("embedded", "polestar")]


@pytest.mark.parametrize(("model", "policy"), CASES)
def test_operations_cover_the_wall_clock(model: str, policy: str, monkeypatch: pytest.MonkeyPatch):
    rates = Rates(flops_per_second=1e9, bytes_per_second=1e30)
    monkeypatch.setattr("workloads.operations.machine_rates", lambda device, dtype: rates)
    axes = {**ops.AXES, **SMALL, "model": [model], "policy": [policy]}
    (point,) = points_of(ops, axes, {"device": "cpu", "threads": 1, "seed": 0})
    # Other work of the processor between two ranges belongs to neither, so a busy machine needs another try.
    rows, tries = list(ops.measure(point.settings, **local(axes))), 5
    while abs(1 - rows[0]["covered"]) > 0.05 and (tries := tries - 1):
        rows = list(ops.measure(point.settings, **local(axes)))
    first, counts = rows[0], {row["op"]: row["count"] for row in rows}
    assert abs(1 - first["covered"]) <= 0.05 and not first.keys() & point.settings.keys()
    assert first["covered"] == pytest.approx(sum(row["share"] for row in rows))
    # One MLP for each layer of each forward, whatever the policy.
    assert counts["mlp"] == 8 * (3 if model == "random" else 5) and not {"step", "forward"} & set(counts)
    assert counts["head"] == counts["propose"] == first["forwards"] == 8
    assert first["refresh_floor_ms"] == pytest.approx(1e3 * first["refresh_gflop"])
    head = {"point": "a", "run": 0, "status": "ok"} | dict(point.settings)
    lines = ops.tables([head | row for row in rows])["ops"].splitlines()
    assert len(lines) == 2 + 3 + len(rows) and f"{model}, 2 x 160: mlp" in "".join(lines)


@pytest.mark.parametrize("name", ["embedded", "embedded-uniform", "random", "tiny"])
@pytest.mark.parametrize("batch", [1, 3])
def test_flops_are_those_that_torch_counts(name: str, batch: int, tiny_model: Any):
    made = {"tiny": lambda: tiny_model, "random": lambda: random_model(128, 3, 96)}  # tiny: grouped keys
    model = made.get(name, lambda: tiered.from_pretrained(name, policy="none").model)()
    shape, kept = model.shape, make_policy("none").features(model.shape)
    sizes = CallShape(shape=shape, batch=batch, context=80, block_length=80, dtype="float32")
    store = FeatureStore(sizes, kept, torch.device("cpu"))
    ids = torch.randint(0, shape.vocab_size - 4, (batch, 80))
    for outputs in (20, 80):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            forward = Forward(model, store, torch.arange(80)[None])
            forward.logits(Pass(ids, forward.rows, slice(80 - outputs, 80)))
        own = forward_work(shape, batch=batch, context=80, rows=80, output_rows=outputs, dtype="float32")
        assert own.flops == counted.get_total_flops()


def test_bytes_and_floor_of_a_card(tiny_model: Any):
    own = forward_work(tiny_model.shape, batch=3, context=50, rows=10, output_rows=4, dtype="bfloat16")
    # The weights without the embedding's table; of two layers, keys and values, two heads of 8.
    weights = 2 * (sum(weight.numel() for weight in tiny_model.parameters()) - 128 * 32)
    assert own.read_bytes == weights + 2 * 2 * (2 * 8) * 3 * 50 * 2
    assert floor(own, Rates(flops_per_second=1e9, bytes_per_second=1e30)) == own.flops / 1e9
    assert floor(own, Rates(flops_per_second=1e30, bytes_per_second=1e6)) == own.read_bytes / 1e6
    for rows, outputs in ((0, 0), (51, 51), (10, 11)):
        with pytest.raises(ValueError, match="50 is allowed"):
            forward_work(tiny_model.shape, batch=1, context=50, rows=rows, output_rows=outputs, dtype="bfloat16")
    rates = machine_rates(torch.device("cpu"), torch.float32)
    assert rates.flops_per_second > 1e8 and rates.bytes_per_second > 1e8
