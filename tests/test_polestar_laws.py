"""Laws 1 and 3 for Polestar's updates: renewing every cluster equals the uncached model, none the dual cache, and a
batch its sequences."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drift_rules import drift_aware
from padded_prompts import padded
from polestar_variants import variant
from torch import Tensor

import tiered
from tiered.core.features import Feature
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.models import base
from tiered.models.shape import ModelShape
from tiered.output import GenerationOutput
from tiered.policies.base import Policy, PolicyState, Step, StepKind
from tiered.policies.polestar.policy import Polestar
from tiered.runtime import Runtime

pytestmark = pytest.mark.usefixtures("few_slots")

GOLDENS = Path(__file__).parent / "goldens" / "llada"
LENGTHS = (17, 9, 12)
EVERYTHING: dict[str, Any] = {"codec": "raw", "top_m": 1000, "update_threshold": 0}
OF_POLICY = {*Polestar.__dataclass_fields__, "window"}
SIZES: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8}


@dataclass
class Stores(Inspector):
    """Keys and values after every forward, by sequence: its prompt's length, and its columns without padding."""

    kinds: list[StepKind] = field(default_factory=list)
    left: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def after_forward(self, step: Step, kind: StepKind, ids: Tensor, forward: Forward, active: Tensor) -> None:
        self.kinds.append(kind)
        layers = range(forward.model.shape.layers)
        both = [forward.store.view(feature, layer) for layer in layers for feature in (Feature.KEY, Feature.VALUE)]
        stacked = torch.stack(both, dim=1)
        for number, pad in enumerate(step.canvas.pads.tolist()):
            if active[number]:
                self.left[step.canvas.prompt_length - pad].append(stacked[number, :, :, pad:].clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed(Policy):
    """Every row at every step. No step is called a refresh, so a commit rule goes on measuring drift."""

    name: ClassVar[str] = "recomputed"

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        return {Feature.KEY: shape.layers, Feature.VALUE: shape.layers}

    def start(self) -> PolicyState:
        return _All()


class _All(PolicyState):
    def rows(self, step: Step) -> Pass:
        return step.over(0, step.canvas.length, StepKind.STEP)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")


def generate(runtime: Runtime, policy: str | Policy, lengths: tuple[int, ...] = LENGTHS, **options: Any):
    policy_options = {name: options.pop(name) for name in OF_POLICY & set(options)}
    given = {"stop_at_eos": False, "output_history": True, **SIZES, **padded(*lengths), **options}
    made = variant(**policy_options) if policy == "polestar" else policy
    return runtime.with_policy(made).generate(**given)


def history(out: GenerationOutput) -> Tensor:
    assert out.history is not None
    return torch.stack(out.history)


def updates(out: GenerationOutput) -> int:
    return out.steps_by_kind.get("update", 0)


@pytest.mark.parametrize(
    ("block_length", "clusters", "cluster_layers", "refresh", "options"),
    [
        (4, 2, 1, "full", {}),
        (4, 6, 2, "drift", {"steps": 12}),
        (8, 2, 99, "drift", {"confidence_threshold": 0.3}),
        (8, 6, 1, "full", {"kmeans": "faiss", "steps": 12}),
        (8, "auto", 2, "full", {"confidence_threshold": 0.3}),
        (8, 6, 2, "full", {"cfg_scale": 0.7, "steps": 12}),
        (8, 6, 1, "drift", {"cfg_scale": 0.7, "confidence_threshold": 0.3}),
        (8, 6, 99, "full", {"temperature": 0.8, "seed": 3, "steps": 12}),
        (8, 20, 2, "drift", {"refresh_blocks": 2, "steps": 12}),
        (16, 2, 2, "full", {"confidence_threshold": 0.3}),
        (16, "auto", 1, "drift", {"confidence_threshold": 0.3}),
    ],
)
def test_renewing_every_cluster_at_every_step_equals_none(
    runtime: Runtime, block_length: int, clusters: int, cluster_layers: int, refresh: str, options: dict[str, Any]
):
    policy = {"clusters": clusters, "cluster_layers": cluster_layers, "refresh": refresh, **EVERYTHING}
    sizes: dict[str, Any] = {"block_length": block_length, "max_new_tokens": 32 if block_length == 16 else 24}
    found = generate(runtime, "polestar", **policy, **options, **sizes)
    plain = {name: value for name, value in options.items() if name not in ("refresh_blocks", "kmeans")}
    exact = generate(runtime, "none", **plain, **sizes)
    assert torch.equal(history(found), history(exact))
    blocks = sizes["max_new_tokens"] // block_length
    refreshed = -(-blocks // options.get("refresh_blocks", 4)) if refresh == "drift" else blocks
    assert found.steps_by_kind == {"refresh": refreshed, "update": exact.num_forwards - refreshed}


def test_a_commit_rule_that_measures_drift_sees_that_of_the_uncached_model(runtime: Runtime):
    rule: dict[str, Any] = {"commit": drift_aware(confidence_threshold=0.8, early_threshold=0.1, drift_slope=0.05)}
    found = generate(runtime, "polestar", clusters=6, **EVERYTHING, **rule)
    assert torch.equal(history(found), history(generate(runtime, Recomputed(), **rule)))
    # Else the rule would not have looked at the drift.
    assert found.num_forwards < generate(runtime, Recomputed(), confidence_threshold=0.8).num_forwards


@pytest.mark.parametrize("options", [{}, {"confidence_threshold": 0.3}])
def test_without_clusters_to_renew_it_is_the_dual_cache(runtime: Runtime, options: dict[str, Any]):
    found = generate(runtime, "polestar", top_m=0, **options)
    exact = generate(runtime, "fast_dllm_dual", **options)
    assert torch.equal(history(found), history(exact)) and found.steps_by_kind == exact.steps_by_kind
    assert found.tiers is None and exact.tiers is None and not found.updates


RAGGED: dict[str, dict[str, Any]] = {
    "raw": {"codec": "raw", "top_m": 2, "clusters": 20, "update_threshold": 1},
    "raw, by drift": {"codec": "raw", "top_m": 1, "clusters": 18, "update_threshold": 0, "refresh": "drift"},
    "delta": {"top_m": 1, "clusters": "auto", "update_threshold": 0, "window": (1, 1)},
    "delta, beside": {"top_m": 1, "clusters": 20, "update_threshold": 1, "cluster_layers": 1, "from_below": "beside"},
    "delta, of the output": {"top_m": 2, "clusters": 20, "update_threshold": 1, "cluster_layers": 2, "drift": "output"},
    "delta, by drift": {"top_m": 2, "clusters": 20, "update_threshold": 1, "refresh": "drift", "cluster_layers": 2},
    "guided": {"top_m": 1, "clusters": 18, "update_threshold": 0, "cfg_scale": 0.5},
}


@pytest.mark.parametrize("policy", RAGGED)
def test_a_batch_is_its_sequences(runtime: Runtime, policy: str, monkeypatch: pytest.MonkeyPatch):
    """Sequences have different lengths and numbers of clusters (a prompt of 1 has fewer). They update and end at
    different steps, and leave at different blocks."""
    lengths, options = (1, 17, 9, 12), {"confidence_threshold": 0.3, **RAGGED[policy]}
    answers = generate(runtime, "polestar", lengths, **options).sequences[:, max(lengths) :]
    # The end token: one that sequences first commit in as many different blocks as possible.
    blocks = {
        token: {next((n // 8 for n in range(24) if row[n] == token), 3) for row in answers}
        for token in answers.unique().tolist()
    }
    end = max(blocks, key=lambda token: (len(blocks[token] & {0, 1}), len(blocks[token])))
    assert len(blocks[end]) > 1 and blocks[end] & {0, 1}
    monkeypatch.setattr(runtime.model, "eos_token_id", end)
    stores, alone_stores = Stores(), Stores()
    out = generate(runtime, "polestar", lengths, stop_at_eos=True, inspector=stores, **options)
    alone = [
        generate(runtime, "polestar", (length,), stop_at_eos=True, inspector=alone_stores, **options)
        for length in lengths
    ]
    assert out.forwards == [one.num_forwards for one in alone] and len(set(out.forwards)) > 2
    assert updates(out) > 2
    assert len({len(drift) for update in out.updates for drift in update.drift if drift}) > 1
    for row, one in enumerate(alone):
        steps = history(out)[:, row, -24:]
        changed = torch.cat([torch.tensor([True]), (steps[1:] != steps[:-1]).any(1)])
        assert torch.equal(steps[changed], history(one)[:, 0, -24:])
        assert torch.equal(out.sequences[row, -24:], one.sequences[0, -24:])
    for length in lengths:
        for found, expected in zip(stores.left[length], alone_stores.left[length], strict=True):
            # Some 40 float32 roundings: a row is off by 2⁻¹⁸ of itself, and by 2⁻⁸ if something else was chosen.
            assert ((found - expected).norm(dim=-1) <= 2**-16 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("policy", ["raw", "guided"])
def test_rounding_chooses_nothing(runtime: Runtime, policy: str, monkeypatch: pytest.MonkeyPatch):
    """Every product is off as another machine, or another batch, would round it. With guidance, rows of the second
    canvas differ by this alone."""
    generator, exact = torch.Generator(), base.project

    def rounded(hidden: Tensor, weight: Tensor) -> Tensor:
        product = exact(hidden, weight)
        return product * (1 + 2**-22 * torch.rand(product.shape, generator=generator))

    monkeypatch.setattr(base, "project", rounded)
    outs = []
    for seed in range(3):
        generator.manual_seed(seed)
        outs.append(generate(runtime, "polestar", (17, 9), confidence_threshold=0.3, **RAGGED[policy]))
    first, *others = outs
    assert updates(first) > 1
    for other in others:
        assert torch.equal(history(other), history(first))
        for update, expected in zip(other.updates, first.updates, strict=True):
            assert update.clusters == expected.clusters
            for drift, of_first in zip(update.drift, expected.drift, strict=True):
                assert drift == pytest.approx(of_first, rel=0.01)


@pytest.mark.parametrize(
    "preset", ["polestar-paper", "polestar-window", variant(window=(2, 1), update_threshold=1)], ids=str
)
def test_presets(runtime: Runtime, preset: str | Policy):
    policy = runtime.with_policy(preset).policy
    assert isinstance(policy, Polestar)
    out = generate(runtime, policy, (30, 21), max_new_tokens=40, confidence_threshold=0.3)
    assert updates(out) > 3 and out.tiers is not None
    assert set(out.tiers.stored) == {policy.hidden_tier} and sum(out.tiers.stored.values()) > 0


def changed_columns(stores: Stores, length: int) -> Callable[[int], set[int]]:
    """Columns of the sequence whose keys or values forward `number` left otherwise than it found them."""

    def of(number: int) -> set[int]:
        before, after = stores.left[length][number - 1 : number + 1]
        return set((before != after).any(-1).any(1).any(0).nonzero().flatten().tolist())

    return of


@pytest.mark.parametrize(
    ("window", "top_m"), [((2, 1), 1), ((2, 1), 1000), ((1, 0), 1000), ((0, 2), 1000), (None, 1000)]
)
def test_nothing_outside_the_window_is_renewed(runtime: Runtime, window: tuple[int, int] | None, top_m: int):
    stores, length = Stores(), 30
    policy = variant(window=window, top_m=top_m, clusters=4, update_threshold=0, codec="raw")
    out = generate(runtime, policy, (length,), inspector=stores, steps=12, max_new_tokens=24)
    changed, behind = changed_columns(stores, length), set()
    for number, kind in enumerate(stores.kinds):
        if kind is not StepKind.UPDATE:
            continue
        block = length + 8 * (number // 4)
        before, after = (99, 99) if window is None else window
        allowed = set(range(max(0, block - 8 * before), min(length + 24, block + 8 + 8 * after)))
        now = changed(number)
        assert now <= allowed
        assert now == allowed or top_m == 1
        behind |= now - set(range(block, block + 8))
    # Behind the last block there is nothing to renew.
    assert behind and updates(out) == (6 if window == (0, 2) else 9)


def test_a_sequence_that_has_ended_calls_for_no_update():
    """The first of two ends in the middle of their block, so that it has tokens pending still."""
    options: dict[str, Any] = {"policy": "polestar", "update_threshold": 2, "cluster_layers": 1, "codec": "raw"}
    runtime = tiered.from_pretrained(GOLDENS / "llada_tiny", dtype="float32", **options)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randint(5, 100, (40,), generator=generator) for _ in range(12)])[[0, 7]]
    call: dict[str, Any] = {"max_new_tokens": 32, "block_length": 32, "confidence_threshold": 0.3}
    end = int(runtime.generate(ids[:1], stop_at_eos=False, **call).sequences[0, 40])
    call |= {"stop_tokens": [end], "eos_early_stop": True}
    both, alone = runtime.generate(ids, **call), runtime.generate(ids[1:], **call)
    assert both.forwards == [2, 4] and alone.num_forwards == 4 and alone.steps_by_kind["step"] == 1
    assert both.steps_by_kind == alone.steps_by_kind and both.rows_per_step == alone.rows_per_step
