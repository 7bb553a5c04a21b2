"""Staleness of caches: against a brute-force oracle, and numbers that must be 0; measuring changes nothing and is
booked."""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from canvas_figures import LENGTHS, Spy, left_padded
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads.attention_mass import attention_mass, mass_bytes
from workloads.canvas_areas import AreaFigures, area_spans
from workloads.staleness import StalenessInspector, measure_staleness
from workloads.step_drift import StepDriftInspector, measure_step_drift

import tiered
from tiered.core.features import Feature, Tier
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 8, "stop_at_eos": False}
CALLS: dict[str, dict[str, Any]] = {
    "one a step": {"steps": 16},
    "sequences that wait": {"confidence_threshold": 0.3},
    "guidance": {"steps": 8, "cfg_scale": 0.7},
}


BOTH = pytest.mark.parametrize("measure", [measure_staleness, measure_step_drift])


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32", policy="fast_dllm_dual")


def alone(row: int) -> Tensor:
    return left_padded()["inputs"][row : row + 1, -LENGTHS[row] :]


def uncached(runtime: Runtime, ids: Tensor) -> dict[Feature, Tensor]:
    """Keys and values [layers, heads, length, elements] of one sequence that has no padding."""
    shape, length = runtime.model.shape, len(ids)
    features: dict[Feature, int] = dict.fromkeys((Feature.KEY, Feature.VALUE), shape.layers)
    store = FeatureStore(runtime._call.sizes(1, length, length), features, runtime.device)
    forward = Forward(runtime.model, store, torch.arange(length)[None])
    forward.logits(Pass(ids[None], forward.rows, slice(0, length)))
    return {x: torch.stack([store.view(x, layer)[0] for layer in range(shape.layers)]) for x in features}


def brute_force(runtime: Runtime, seen: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Distances [features, steps, layers, areas] and rows [steps, areas], one sequence and column at a time."""
    longest, bl = max(LENGTHS), SIZES["block_length"]
    found = np.zeros((2, len(seen), runtime.model.shape.layers, 6))
    rows = np.zeros((len(seen), 6), dtype=int)
    for at, shown in enumerate(seen):
        for sequence, ids in enumerate(shown["ids"]):
            row = sequence % len(LENGTHS)  # guidance: the batch twice
            if not shown["active"][row]:
                continue
            pad = longest - LENGTHS[row]
            fresh = uncached(runtime, ids[pad:])
            areas = []
            for column in range(pad, len(ids)):
                block = (column - longest) // bl
                apart = block - shown["block"]
                areas.append(0 if column < longest else 1 if apart < -1 else min(apart, 2) + 3)
                rows[at, areas[-1]] += 1
            for number, (feature, stored) in enumerate(shown["stored"].items()):
                cosine = cosine_similarity(stored[:, sequence, :, pad:].double(), fresh[feature].double(), dim=-1)
                for layer, distances in enumerate((1 - cosine).mean(dim=1).tolist()):
                    for area, distance in zip(areas, distances, strict=True):
                        found[number, at, layer, area] += distance
    with np.errstate(invalid="ignore"):
        return found / rows[None, :, None], rows


@pytest.mark.parametrize("call", CALLS)
@torch.no_grad()
def test_the_figures_are_those_of_brute_force(runtime: Runtime, call: str):
    spy = Spy(runtime.model.shape.layers)
    runtime.generate(**left_padded(), inspector=spy, **CALLS[call], **SIZES)
    report = measure_staleness(runtime, **left_padded(), **CALLS[call], **SIZES)
    expected, rows = brute_force(runtime, spy.seen)
    np.testing.assert_array_equal(report.rows, rows)
    assert [report.blocks, report.numbers] == [[shown[x] for shown in spy.seen] for x in ("block", "number")]
    # The oracle rounds in float32 where its passes over one sequence differ from those over a batch.
    np.testing.assert_allclose(report.keys, expected[0], rtol=1e-3, atol=1e-10)
    np.testing.assert_allclose(report.values, expected[1], rtol=1e-3, atol=1e-10)
    if call == "sequences that wait":
        assert any(not all(shown["active"]) for shown in spy.seen)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_drifts_if_every_step_refreshes(runtime: Runtime, call: str):
    fresh = runtime.with_policy("fast_dllm_dual", refresh_interval=1)
    report = measure_staleness(fresh, **left_padded(), **CALLS[call], **SIZES)
    for distances in (report.keys, report.values):
        assert np.array_equal(np.isnan(distances), np.repeat(report.rows[:, None] == 0, 4, axis=1))
        assert np.nanmax(distances) <= 1e-6
    # Areas without rows, by a block's place in the canvas: nothing is past in the first two, nothing next in the last.
    blocks = np.array(report.blocks)
    assert set(blocks.tolist()) == {0, 1, 2, 3}
    absent = [blocks < 0, blocks < 2, blocks < 1, blocks < 0, blocks > 2, blocks > 1]
    assert np.array_equal(report.rows == 0, np.stack(absent, axis=1))


def test_the_dual_cache_drifts_where_it_must(runtime: Runtime):
    report = measure_staleness(runtime, alone(0), **SIZES)
    refreshed, there = np.array(report.numbers) == 0, report.rows > 0
    assert refreshed.sum() == 4
    for distances in (report.keys, report.values):
        assert np.nanmax(distances[refreshed]) <= 1e-9
        # Layer 0 depends on a row's own token alone. The current rows of layer 1 are fresh, as layer 0 was exact for
        # all that they attended to. Everything else has seen a canvas with more masks.
        assert np.nanmax(distances[:, 0]) <= 1e-9
        assert np.nanmax(distances[:, 1, 3]) <= 1e-9
        for layer, area in itertools.product(range(1, 4), range(6)):
            stale = distances[~refreshed & there[:, area], layer, area]
            assert len(stale) and ((layer, area) == (1, 3) or stale.min() > 1e-8), (layer, area)


@pytest.mark.parametrize(
    ("canvas", "expected"),
    [
        ((10, 10, 14, 30), [(0, 10), (10, 10), (10, 10), (10, 14), (14, 18), (18, 30)]),
        ((10, 14, 18, 30), [(0, 10), (10, 10), (10, 14), (14, 18), (18, 22), (22, 30)]),
        ((10, 18, 22, 30), [(0, 10), (10, 14), (14, 18), (18, 22), (22, 26), (26, 30)]),
        ((10, 26, 30, 30), [(0, 10), (10, 22), (22, 26), (26, 30), (30, 30), (30, 30)]),
        ((3, 3, 11, 11), [(0, 3), (3, 3), (3, 3), (3, 11), (11, 11), (11, 11)]),
    ],
)
def test_areas_of_a_canvas(canvas: tuple[int, int, int, int], expected: list[tuple[int, int]]):
    assert list(area_spans(*canvas).values()) == expected


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("fast_dllm_prefix", {"temperature": 0.8, "seed": 5} | CALLS["guidance"]),
        ("fast_dllm_dual", CALLS["sequences that wait"]),
    ],
)
@BOTH
def test_measuring_changes_no_answer(
    runtime: Runtime, measure: Any, policy: str, options: dict[str, Any], monkeypatch: Any
):
    measured, kept = runtime.with_policy(policy), []
    plain = measured.generate(**left_padded(), output_history=True, **options, **SIZES)
    generate = Runtime.generate
    monkeypatch.setattr(Runtime, "generate", lambda *args, **named: kept.append(generate(*args, **named)))
    measure(measured, **left_padded(), output_history=True, **options, **SIZES)
    assert torch.equal(kept[0].sequences, plain.sequences)
    assert torch.equal(torch.stack(kept[0].history), torch.stack(plain.history or []))
    assert (kept[0].forwards, kept[0].steps_by_kind) == (plain.forwards, plain.steps_by_kind)


@BOTH
def test_the_budget_counts_the_recompute(measure: Any, monkeypatch: Any):
    def capped(memory: int | None) -> Runtime:
        # With host memory, a call that leaves the inspector too little would stream layers.
        budget = None if memory is None else tiered.MemoryBudget(device=memory, host=0)
        return tiered.from_pretrained(
            GOLDENS / "llada_tiny_gqa", dtype="float32", policy="fast_dllm_dual", memory=budget
        )

    free = capped(None)
    weights = free.ledger.held(Tier.DEVICE)
    plain = free.generate(**left_padded(), **SIZES).memory.peak_device_bytes
    measure(free, **left_padded(), **SIZES)
    needed = free.ledger.report().peak_device_bytes
    assert needed > plain and free.ledger.held(Tier.DEVICE) == weights
    assert measure(capped(needed), **left_padded(), **SIZES).blocks[-1] == 3
    short = capped(needed - 1)
    assert short.generate(**left_padded(), **SIZES).memory.peak_device_bytes == plain
    monkeypatch.setattr(short.model, "embed", lambda ids: pytest.fail("work has started"))
    with pytest.raises(tiered.TierCapacityError, match="inspector"):
        measure(short, **left_padded(), **SIZES)
    assert short.ledger.held(Tier.DEVICE) == weights


class AllocatedBytes(TorchDispatchMode):
    """The most bytes that all storages made by operations held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.held.values()))
        return result


@pytest.mark.parametrize(("dtype", "guidance"), [("float32", 1.0), ("bfloat16", 0.0)])
@BOTH
def test_a_measurement_allocates_no_more_than_it_books(measure: Any, dtype: str, guidance: float):
    runtime = tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype=dtype, policy="fast_dllm_dual")
    weights = runtime.ledger.held(Tier.DEVICE)
    ids, mask = torch.randint(0, 480, (2, 300)), torch.ones(2, 300).long()
    mask[0, :50] = 0
    gc.collect()
    with AllocatedBytes() as allocated:
        measure(runtime, ids, attention_mask=mask, cfg_scale=guidance, steps=4, **SIZES)
    booked = runtime.ledger.report().peak_device_bytes - weights
    # Looser than for a call alone: the recompute and the call's own temporaries are not there at the same time.
    assert 0.5 * booked <= allocated.peak <= booked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [200, 5000])
def test_scores_of_attention_take_the_booked_bytes(runtime: Runtime, dtype: torch.dtype, length: int):
    shape = runtime.model.shape
    queries = torch.zeros(1, shape.heads, 200, shape.head_dim, dtype=dtype)
    keys = torch.zeros(1, shape.kv_heads, length, shape.head_dim, dtype=dtype)
    spans = [(0, 50), (50, length)]
    gc.collect()
    with AllocatedBytes() as allocated:
        attention_mass(queries, keys, spans, soft_cap=30.0)
    booked = mass_bytes(shape, length=length, dtype=str(dtype).removeprefix("torch."))
    # Beside them, queries in float32 and figures of every row and place.
    assert 0.5 * booked <= allocated.peak <= booked + 3 * 4 * queries.numel()


def test_calls_that_cannot_be_measured_are_refused(runtime: Runtime):
    for inspector in (StalenessInspector(), StepDriftInspector()):
        with pytest.raises(ValueError, match="no step was measured"):
            inspector.report()
    with pytest.raises(ValueError, match="one layer at a time"):
        measure_staleness(runtime.with_policy("none"), alone(1), **SIZES)
    with pytest.raises(ValueError, match="block_lenth"):
        measure_staleness(runtime, alone(1), block_lenth=8)


@pytest.mark.parametrize("attention", [None, np.zeros((3, 1, 8))])
def test_means_leave_out_steps_without_a_figure_but_no_cache_without_numbers(attention: np.ndarray | None):
    rows, keys = np.array([[5, 0, 8], [5, 0, 8], [5, 8, 8]]), np.arange(9.0).reshape(3, 1, 3)
    keys[0, 0, 1] = keys[1, 0, 1] = keys[2, 0, 2] = np.nan
    found = AreaFigures(keys=keys, values=keys, rows=rows, blocks=[0, 0, 1], numbers=[0, 1, 1], attention=attention)
    # Attention is measured beside distances to the step before, which the first step does not have.
    np.testing.assert_equal(found.by_layer(keys), [[3.0 if attention is None else 4.5, 7.0, np.nan]])
