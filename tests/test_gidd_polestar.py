"""Polestar on GIDD: its laws under soft-capped scores, sink tokens and the noise mask, and the members of its
clusters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_drift import full_drift
from polestar_variants import variant
from torch import Tensor

import tiered
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.forward.sizes import CallShape
from tiered.output import GenerationOutput
from tiered.policies.base import Policy, Step, StepKind
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.layer_state import LayerState
from tiered.policies.polestar.policy import Polestar
from tiered.runtime import Runtime

pytestmark = pytest.mark.usefixtures("few_slots")

GOLDENS = Path(__file__).parent / "goldens" / "gidd"
EVERYTHING: dict[str, Any] = {"codec": "raw", "top_m": 1000, "update_threshold": 0}
RULES: dict[str, dict[str, Any]] = {
    "adaptive": {"commit": "adaptive", "tokens_per_step": 2, "block_steps": 6},
    "ancestral": {"commit": "ancestral", "block_steps": 5, "temperature": 0.9},
    "corrected": {"commit": "adaptive", "tokens_per_step": 3, "block_steps": 3, "correction_steps": 3},
}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "gidd_tiny_unif", dtype="float32")


def generate(
    runtime: Runtime, policy: str | Policy, options: Mapping[str, Any], rule: str, **given: Any
) -> GenerationOutput:
    """Two prompts, one of them padded; three blocks of 8 with noise behind the last."""
    ids = torch.randint(2, 500, (2, 15), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    sizes = {"max_new_tokens": 24, "block_length": 8, "trailing_noise": 16, "seed": 5, "stop_at_eos": False}
    call = {**sizes, "output_history": True, **RULES[rule], **given}
    return runtime.with_policy(policy, **options).generate(ids, attention_mask=mask, **call)


def assert_same(one: GenerationOutput, other: GenerationOutput) -> None:
    assert one.history is not None and other.history is not None
    assert torch.equal(torch.stack(one.history), torch.stack(other.history))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("clusters", "refresh"), [(3, "full"), ("auto", "drift"), (9, "drift")])
def test_renewing_every_cluster_at_every_step_equals_none(
    runtime: Runtime, rule: str, clusters: int | str, refresh: str
):
    out = generate(runtime, "polestar", {"clusters": clusters, "refresh": refresh, **EVERYTHING}, rule)
    assert_same(out, generate(runtime, "none", {}, rule))
    # And not by chance: the dual cache, which renews nothing, gives other tokens.
    assert out.steps_by_kind["update"]
    dual = generate(runtime, "fast_dllm_dual", {}, rule)
    assert not torch.equal(out.sequences, dual.sequences)


@pytest.mark.parametrize("rule", RULES)
def test_renewing_nothing_equals_the_dual_cache(runtime: Runtime, rule: str):
    out = generate(runtime, "polestar", {"top_m": 0}, rule)
    assert_same(out, generate(runtime, "fast_dllm_dual", {}, rule))


@pytest.mark.parametrize("codec", ["raw", "nvfp4_delta"])
def test_offloaded_equals_resident(runtime: Runtime, codec: str):
    options = {"codec": codec, "clusters": 5, "top_m": 2, "update_threshold": 0}
    host, device = (generate(runtime, variant(tier, **options), {}, "adaptive") for tier in ("host", "device"))
    assert_same(host, device)
    assert [update.clusters for update in host.updates] == [update.clusters for update in device.updates]
    assert host.memory.moved["host->device"] and not device.memory.moved.get("host->device")


class Clusters(Inspector):
    """All columns behind the block, and no others, are members. `firsts`: the distance from the block's
    end."""

    def __init__(self, caches: Sequence[HiddenCache]) -> None:
        self._caches, self.firsts = caches, []

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        for state in self._caches[-1].states.values():
            for columns in (members.columns for members in state.members):
                assert (columns >= step.stop).all() and len(columns) == forward.length - step.stop
                self.firsts.append(int(columns.min()) - step.stop)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[HiddenCache]:
    """Every cache that begins a refresh."""
    seen, begin = [], HiddenCache.begin

    def watched(cache: HiddenCache, *rest: Any) -> None:
        seen.append(cache)
        begin(cache, *rest)

    monkeypatch.setattr(HiddenCache, "begin", watched)
    return seen


@pytest.mark.parametrize("options", [{}, {"window": (2, 9)}, {"refresh": "drift"}])
def test_final_columns_are_in_no_cluster(runtime: Runtime, caches: list[HiddenCache], options: dict[str, Any]):
    inspector = Clusters(caches)
    generate(runtime, variant(**options, update_threshold=0), {}, "adaptive", inspector=inspector)
    assert set(inspector.firsts) == {0}


def test_nothing_behind_the_last_block_makes_no_clusters(runtime: Runtime, caches: list[HiddenCache]):
    options: dict[str, Any] = {"trailing_noise": 0, "max_new_tokens": 16}
    out = generate(runtime, "polestar", EVERYTHING, "adaptive", **options)
    assert_same(out, generate(runtime, "none", {}, "adaptive", **options))
    assert out.steps_by_kind["update"] and not caches[-1].states


@pytest.mark.parametrize("moves", [False, True])
def test_drift_is_of_the_familys_own_attention(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, moves: bool):
    """The first drift of every layer, against all keys of then and now with the cap and the sinks."""
    shape, before, first = runtime.model.shape, {}, {}
    assert shape.soft_cap and shape.sink_tokens
    of, measure = LayerState.of.__func__, LayerState.measure  # pyright: ignore[reportFunctionMemberAccess]

    def made(kind: type[LayerState], forward: Forward, layer: int, *rest: Any) -> LayerState:
        state = of(kind, forward, layer, *rest)
        before.setdefault(layer, forward.keys(layer).clone())
        return state

    def measured(state: LayerState, forward: Forward, *rest: Any) -> list[list[float]]:
        *_, last_queries = rest
        then, layer = state.queries if last_queries is None else last_queries, state.layer
        found = measure(state, forward, *rest)
        if layer not in first:
            sinks, mask = forward.model.sink_keys(layer), forward.limits.key_mask
            given = forward.keys(layer), before[layer], mask, shape.soft_cap, sinks
            first[layer] = torch.tensor(found), full_drift(state.queries, *given, last_queries=then).float()
        return found

    monkeypatch.setattr(LayerState, "of", classmethod(made))
    monkeypatch.setattr(LayerState, "measure", measured)
    options = {"clusters": 4, "top_m": 1, "update_threshold": 0, "codec": "raw", "cluster_layers": 1}
    generate(runtime, variant(**options, moves=moves), {}, "adaptive")
    assert len(first) == 3
    for found, true in first.values():
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-6)
        assert (found > 0).all()


def test_rows_in_front_of_the_answer_are_not_booked(runtime: Runtime):
    shape = runtime.model.shape
    sizes = CallShape(shape=shape, batch=2, context=512, block_length=8, dtype="float32")
    of_answer = replace(sizes, answer=64)
    # Families without the mask cluster the prompt as well.
    seen = replace(of_answer, shape=replace(shape, sight="canvas"))
    hidden_records_of = lambda sizes: Polestar().needs(sizes).records()  # type: ignore[misc]  # noqa: E731
    whole, answer, alone, unmasked = (
        hidden_records_of(each) for each in (sizes, of_answer, replace(sizes, context=64), seen)
    )
    assert whole and answer and alone and unmasked
    assert answer.records == alone.records < whole.records / 5
    assert answer.host == alone.host
    assert unmasked.records == whole.records
