"""Token drift: against a brute-force oracle, and what must be 0; and that an analysis changes nothing and is booked."""

import gc
import itertools
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiered
from tiered.core.features import Account, Feature, Tier
from tiered.core.rows import Rows
from tiered.embedded import tasks
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.observe.analysis.attention_mass import attention_mass, mass_bytes
from tiered.observe.analysis.regions_report import measure_regions
from tiered.observe.analysis.reports import TokenDriftReport, area_spans
from tiered.observe.analysis.token_drift import StalenessInspector, measure_token_drift
from tiered.policies.base import Step, StepKind
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
LENGTHS = (17, 9, 12)
SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 8, "stop_at_eos": False}
CALLS: dict[str, dict[str, Any]] = {
    "one a step": {"steps": 16},
    "sequences that wait": {"confidence_threshold": 0.3},
    "guidance": {"steps": 8, "cfg_scale": 0.7},
}


# What holds of every analysis.
ANALYSES = pytest.mark.parametrize("measure", [measure_token_drift, measure_regions])


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32", policy="fast_dllm_dual")


@pytest.fixture(scope="module")
def embedded() -> Runtime:
    return tiered.from_pretrained("embedded", policy="fast_dllm_dual")


def left_padded() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    ids, mask = torch.full((len(LENGTHS), max(LENGTHS)), 499), torch.zeros(len(LENGTHS), max(LENGTHS)).long()
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.randint(0, 480, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"inputs": ids, "attention_mask": mask}


def alone(row: int) -> Tensor:
    return left_padded()["inputs"][row : row + 1, -LENGTHS[row] :]


@dataclass
class Spy:
    """An inspector that keeps a copy of everything it is shown."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        return {}

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        stored = {
            feature: torch.stack([forward.store.view(feature, layer) for layer in range(forward.model.shape.layers)])
            for feature in (Feature.KEY, Feature.VALUE)
        }
        place = {"block": step.block, "number": step.number, "kind": kind, "start": step.start, "stop": step.stop}
        self.seen.append({**place, "ids": ids.clone(), "stored": stored, "active": active.tolist()})


def uncached(runtime: Runtime, ids: Tensor) -> dict[Feature, Tensor]:
    """Keys and values [layers, heads, length, elements] of one sequence that has no padding."""
    shape, length = runtime.model.shape, len(ids)
    features: dict[Feature, int] = dict.fromkeys((Feature.KEY, Feature.VALUE), shape.layers)
    store = FeatureStore(shape, features, batch=1, length=length, dtype=runtime.dtype, device=runtime.device)
    forward = Forward(runtime.model, store, torch.arange(length)[None])
    forward.logits(ids[None], Rows.span(0, length), slice(0, length))
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
    spy = Spy()
    runtime.generate(**left_padded(), inspector=spy, **CALLS[call], **SIZES)
    report = measure_token_drift(runtime, **left_padded(), **CALLS[call], **SIZES)
    expected, rows = brute_force(runtime, spy.seen)
    np.testing.assert_array_equal(report.rows, rows)
    assert [report.blocks, report.numbers] == [[shown[x] for shown in spy.seen] for x in ("block", "number")]
    assert report.kinds == [shown["kind"].value for shown in spy.seen]
    # The oracle rounds in float32 where its passes over one sequence differ from those over a batch.
    np.testing.assert_allclose(report.keys, expected[0], rtol=1e-3, atol=1e-10)
    np.testing.assert_allclose(report.values, expected[1], rtol=1e-3, atol=1e-10)
    if call == "sequences that wait":
        assert any(not all(shown["active"]) for shown in spy.seen)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("none", {}), ("fast_dllm_prefix", {"refresh_interval": 1}), ("fast_dllm_dual", {"refresh_interval": 1})],
)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_drifts_where_every_step_refreshes(runtime: Runtime, policy: str, options: dict[str, int], call: str):
    report = measure_token_drift(runtime.with_policy(policy, **options), **left_padded(), **CALLS[call], **SIZES)
    for distances in (report.keys, report.values):
        assert np.array_equal(np.isnan(distances), np.repeat(report.rows[:, None] == 0, 4, axis=1))
        assert np.nanmax(distances) <= 1e-6
    # What a block's place in the canvas leaves out: nothing is past in the first two, nothing is next in the last.
    blocks = np.array(report.blocks)
    assert set(blocks.tolist()) == {0, 1, 2, 3}
    absent = [blocks < 0, blocks < 2, blocks < 1, blocks < 0, blocks > 2, blocks > 1]
    assert np.array_equal(report.rows == 0, np.stack(absent, axis=1))


def test_the_dual_cache_drifts_where_it_must(runtime: Runtime):
    report = measure_token_drift(runtime, alone(0), **SIZES)
    refreshed, there = np.array(report.numbers) == 0, report.rows > 0
    assert set(report.kinds) == {"refresh", "step"} and refreshed.sum() == 4
    assert np.array_equal(refreshed, [kind == "refresh" for kind in report.kinds])
    for distances in (report.keys, report.values):
        assert np.nanmax(distances[refreshed]) <= 1e-9
        # Layer 0 depends on a row's own token alone. The current rows of layer 1 are fresh, as layer 0 was exact for
        # all that they attended to. Everything else has seen a canvas with more masks.
        assert np.nanmax(distances[:, 0]) <= 1e-9
        assert np.nanmax(distances[:, 1, 3]) <= 1e-9
        for layer, area in itertools.product(range(1, 4), range(6)):
            stale = distances[~refreshed & there[:, area], layer, area]
            assert len(stale) and ((layer, area) == (1, 3) or stale.min() > 1e-8), (layer, area)


def test_a_batch_has_the_mean_of_its_sequences(embedded: Runtime):
    # Prompts of several lengths, blocks that end at different steps, answers that end in different blocks.
    prompts = [tasks.sample(task, "test", seed).prompt for task in ("copy", "add", "remove") for seed in range(2)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": 32, "block_length": 4, "confidence_threshold": 0.8}
    batch = measure_token_drift(embedded, chats, **options)
    singles = [measure_token_drift(embedded, chat, **options) for chat in chats]
    assert len({tuple(single.blocks) for single in singles}) > 1
    for at, place in enumerate(zip(batch.blocks, batch.numbers, strict=True)):
        sums, rows = np.zeros((2, *batch.keys.shape[1:])), np.zeros(6, dtype=int)
        for single in singles:
            places = list(zip(single.blocks, single.numbers, strict=True))
            if place in places:
                mine = places.index(place)
                rows += single.rows[mine]
                sums += np.nan_to_num(np.stack([single.keys[mine], single.values[mine]])) * single.rows[mine]
        np.testing.assert_array_equal(batch.rows[at], rows)
        expected = sums / np.where(rows, rows, np.nan)
        np.testing.assert_allclose([batch.keys[at], batch.values[at]], expected, rtol=1e-3, atol=1e-10)


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
        ("none", CALLS["one a step"]),
        ("none", {"temperature": 0.8, "seed": 5, "steps": 8}),
        ("fast_dllm_prefix", CALLS["guidance"]),
        ("fast_dllm_dual", CALLS["sequences that wait"]),
    ],
)
@ANALYSES
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
    assert (kept[0].forwards, kept[0].passes) == (plain.forwards, plain.passes)


@ANALYSES
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


@pytest.mark.parametrize(("dtype", "guidance"), [("float32", 0.0), ("float32", 1.0), ("bfloat16", 0.0)])
@ANALYSES
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
def test_scores_of_attention_take_what_is_booked(runtime: Runtime, dtype: torch.dtype, length: int):
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


def test_what_cannot_be_measured_is_refused(runtime: Runtime):
    with pytest.raises(ValueError, match="no step was measured"):
        StalenessInspector().report()
    with pytest.raises(ValueError, match="one layer of keys and values"):
        runtime.with_policy("none").generate(alone(1), inspector=StalenessInspector(), **SIZES)
    with pytest.raises(ValueError, match="block_lenth"):
        measure_token_drift(runtime, alone(1), block_lenth=8)


@pytest.fixture
def report() -> TokenDriftReport:
    """Two steps, twelve layers; the first step has prompt, current and next alone, and a cache without numbers."""
    generator = np.random.default_rng(0)
    rows = np.array([[5, 0, 0, 8, 8, 0], [5, 8, 8, 8, 8, 8]])
    keys, values = np.where(rows[None, :, None] > 0, generator.random((2, 2, 12, 6)), np.nan)
    keys[0, 2, 0], values[:, 3, 3] = np.nan, 0
    return TokenDriftReport(
        keys=keys, values=values, rows=rows, blocks=[0, 1], numbers=[0, 3], kinds=["refresh", "step"]
    )


def test_means_and_plain_types(report: TokenDriftReport):
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["regions"] == ["prompt", "past", "previous", "current", "next", "future"]
    assert told["steps"][1] == {"block": 1, "number": 3, "kind": "step", "rows": [5, 8, 8, 8, 8, 8]}
    keys, by_layer = told["keys"]["all"], told["keys"]["by_layer"]
    assert keys[1][4] == report.keys[1, 4].tolist() and keys[0][4][1] is None
    assert by_layer[4][1] == keys[1][4][1]  # one step had past blocks
    assert by_layer[4][3] == pytest.approx((keys[0][4][3] + keys[1][4][3]) / 2)
    assert by_layer[2][0] is None  # what is not a number is not left out of a mean
    assert told["keys"]["by_step"][1] == pytest.approx(report.keys[1].mean(axis=0))
    assert told["values"]["by_step"][0][1] is None
    assert told["values"]["by_layer"][3][3] == 0


def test_the_table(report: TokenDriftReport):
    lines = str(report).splitlines()
    assert lines[0] == "token drift error (1 - cos), mean over 2 forwards (1 refresh, 1 step)"
    assert max(map(len, lines)) <= 100
    columns = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("keys", "values"))}
    assert columns["keys"] == columns["values"] == report.as_dict()["regions"]
    layers = [line.split() for line in lines if line.startswith("layer")]
    assert [line[1] for line in layers] == [*map(str, range(12))] * 2
    assert layers[2][2] == "-" and layers[12 + 3][2 + 3] == "0"
    assert float(layers[12 + 7][2 + 4]) == pytest.approx(report.values[:, 7, 4].mean(), rel=1e-2)
