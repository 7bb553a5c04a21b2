"""How the clusters of an update travel: guesses, few slots, failures, and tiers that are too small."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import Point, SimulatedThreads
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.offload.errors import TransferError
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Lane, Transport
from tiered.output import GenerationOutput
from tiered.policies.polestar import hidden_bytes
from tiered.policies.polestar.fetching import Fetching
from tiered.policies.polestar.layer_state import LayerState
from tiered.policies.polestar.members import Cluster
from tiered.policies.polestar.policy import Polestar
from tiered.runtime import Runtime
from tiered.tiers.record_bytes import StoredCluster
from tiered.tiers.stored_rows import StoredRows

GOLDENS = Path(__file__).parent / "goldens" / "llada"
BASE: dict[str, Any] = {"clusters": 6, "top_m": 2, "update_threshold": 0}


@pytest.fixture(scope="module")
def model():
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32").model


@dataclass
class Watch:
    """Clusters that were sent for, by the method of `Fetching`, and clusters of a layer that were sent, and read."""

    wanted: Counter[str] = field(default_factory=Counter)
    sent: set[tuple[int, int, int]] = field(default_factory=set)
    read: set[tuple[int, int, int]] = field(default_factory=set)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watching, read = Watch(), StoredRows.read

    def watched(name: str) -> None:
        method = getattr(Fetching, name)

        def call(self: Fetching, state: LayerState, *rest: Any) -> list[Cluster]:
            sent = method(self, state, *rest)
            watching.wanted[name] += len(sent)
            watching.sent |= {(state.layer, one.region, one.cluster) for one in state.places(sent)}
            return sent

        monkeypatch.setattr(Fetching, name, call)

    def watched_read(self: StoredRows, layer: int, clusters: Sequence[StoredCluster], *where: Any) -> None:
        watching.read |= {(layer, one.region, one.cluster) for one in clusters}
        read(self, layer, clusters, *where)
        self.check_integrity()

    for name in ("guess", "ask", "refetch"):
        watched(name)
    monkeypatch.setattr(StoredRows, "read", watched_read)
    return watching


def make(model: Any, transport: Callable[[], Transport] | None = None, **options: Any) -> Runtime:
    memory = options.pop("memory", None)
    policy = Polestar(**{**BASE, **options})
    return Runtime(model, policy=policy, transport=transport, ledger=Ledger(MemoryBudget.of(memory)))


def answer(runtime: Runtime, **options: Any) -> GenerationOutput:
    """Of a left-padded batch: 16 new tokens in 8 steps, 6 of which update."""
    ids = torch.randint(0, 480, (2, 17), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    sizes = {"max_new_tokens": 16, "block_length": 8, "steps": 8}
    out = runtime.generate(ids, attention_mask=mask, stop_at_eos=False, output_history=True, **{**sizes, **options})
    assert {account for tier in Tier for account in runtime.ledger.accounts(tier)} <= {Account.SPARE}
    return out


def run(model: Any, transport: Callable[[], Transport] | None = None, **options: Any) -> GenerationOutput:
    return answer(make(model, transport, **options))


def same(first: GenerationOutput, second: GenerationOutput) -> bool:
    """Tokens, and drifts to the bit: they are made of every key that updates have left."""
    assert first.history is not None and second.history is not None
    return torch.equal(torch.stack(first.history), torch.stack(second.history)) and (
        [(layer.drift, layer.clusters) for layer in first.updates]
        == [(layer.drift, layer.clusters) for layer in second.updates]
    )


# --- fetches


@pytest.mark.parametrize(
    "options", [{}, {"codec": "raw", "refresh": "drift", "cluster_layers": 1}, {"cluster_layers": 99, "top_m": 3}]
)
def test_every_fetch_is_counted(model: Any, watch: Watch, few_slots: None, options: dict[str, Any]):
    out = run(model, **options)
    count = {name: counted(out, name) for name in ("ahead", "on_demand", "in_vain", "repairs")}
    assert watch.wanted == {
        "guess": count["ahead"] + count["in_vain"],
        "ask": count["ahead"] + count["on_demand"],
        "refetch": count["repairs"],
    }
    assert watch.wanted["guess"] > 0 and watch.wanted["ask"] + watch.wanted["refetch"] > 10
    assert watch.read <= watch.sent and watch.read
    assert 0 < counted(out, "fetched_bytes") == copied(out)
    # The fetched clusters were chosen, and did not come whole from below.
    for layer in out.updates:
        assert layer.ahead + layer.on_demand <= sum(map(len, layer.clusters))
        assert layer.layer > 0 or layer.ahead == layer.on_demand == layer.repairs == 0
    if options.get("cluster_layers") == 99:  # the layer above the embeddings alone has clusters of which it gets parts
        assert count["repairs"] == sum(layer.repairs for layer in out.updates if layer.layer == 1)


def counted(out: GenerationOutput, name: str) -> int:
    return sum(getattr(layer, name) for layer in out.updates)


def copied(out: GenerationOutput) -> int:
    """Bytes of all copies to the device."""
    assert out.tiers is not None
    return out.tiers.ways[Lane.FETCH].nbytes


@pytest.mark.parametrize(("refresh", "slots"), [("full", 1), ("drift", 2), ("drift", 3)])
def test_few_slots_are_enough(model: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch, slots: int, refresh: str):
    options: dict[str, Any] = {"clusters": 20, "top_m": 12, "cluster_layers": 1, "refresh": refresh}
    plain = run(model, **options)
    monkeypatch.setattr(hidden_bytes, "MOST_SLOTS", slots)
    monkeypatch.setattr(hidden_bytes, "RECORD_ROWS", 4)  # larger clusters lie in several records
    out = run(model, **options)
    assert same(out, plain)
    assert copied(plain) == counted(plain, "fetched_bytes") < copied(out) == counted(out, "fetched_bytes")


# --- failures, and a runtime's next call


class Faults:
    """Raises at every copy in a lane from that number on."""

    def __init__(self, lane: Lane, number: int) -> None:
        self.lane, self.left = lane, number

    def __call__(self, point: Point, lane: Lane | None) -> float:
        if point is Point.COPY and lane is self.lane:
            self.left -= 1
            if self.left < 0:
                raise OSError("the bus is down")
        return 0.0


@pytest.mark.parametrize(("lane", "number"), [(Lane.FETCH, 0), (Lane.FETCH, 9), (Lane.STORE, 0), (Lane.STORE, 9)])
def test_after_a_failed_copy_the_next_call_is_right(model: Any, few_slots: None, lane: Lane, number: int):
    transports: Iterator[Transport] = iter([SimulatedThreads(delay=Faults(lane, number)), ThreadTransport()])
    options: dict[str, Any] = {"cluster_layers": 1}
    runtime = make(model, lambda: next(transports), **options)
    with pytest.raises(TransferError):
        answer(runtime)
    assert {account for tier in Tier for account in runtime.ledger.accounts(tier)} <= {Account.SPARE}
    runtime.ledger.check_integrity()
    assert same(answer(runtime), run(model, **options))


@pytest.mark.parametrize("refresh", ["full", "drift"])
def test_two_calls_in_turn_are_two_first_calls(model: Any, few_slots: None, refresh: str):
    runtime = make(model, refresh=refresh)
    first, other, second = answer(runtime), answer(runtime, steps=4, cfg_scale=0.5), answer(runtime)
    assert same(first, second) and same(first, run(model, refresh=refresh))
    assert same(other, answer(make(model, refresh=refresh), steps=4, cfg_scale=0.5))
    assert not same(first, other)


# --- budgets


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tokens that each forward reads."""
    read, logits = [], Forward.logits

    def noted(self: Forward, pass_: Pass) -> Tensor:
        read.append(pass_.ids)
        return logits(self, pass_)

    monkeypatch.setattr(Forward, "logits", noted)
    return read


@pytest.mark.parametrize(
    ("tier", "caps"),
    [(Tier.HOST, {"host": 2000}), (Tier.HOST, {"host": 0}), (Tier.DEVICE, {"device": None})],
    ids=["host", "no host", "device"],
)
def test_a_small_budget_is_refused_before_any_pass(model: Any, passes: list[Tensor], tier: Tier, caps: dict[str, Any]):
    if tier is Tier.DEVICE:  # the least that the same call takes without clusters
        with pytest.raises(TierCapacityError) as caught:
            run(model, top_m=0, memory=MemoryBudget(device=1))
        caps = {"device": caught.value.total}
    runtime = make(model, memory=MemoryBudget(**caps))
    with pytest.raises(TierCapacityError) as caught:
        answer(runtime)
    assert caught.value.tier is tier and caught.value.needed > caught.value.available
    assert not passes and all(runtime.ledger.held(tier) == 0 for tier in Tier)
    assert answer(runtime.with_policy("polestar", top_m=0)).num_forwards == len(passes) == 8


def budget(tier: Tier, cap: int) -> MemoryBudget:
    return MemoryBudget(host=cap) if tier is Tier.HOST else MemoryBudget(device=cap)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
@pytest.mark.parametrize("options", [{}, {"codec": "raw", "refresh": "drift", "clusters": 12, "top_m": 9}])
def test_the_budget_that_is_asked_for_is_enough(model: Any, few_slots: None, tier: Tier, options: dict[str, Any]):
    plain, found = run(model, **options), None
    least = 0
    for _ in range(4):  # one call may ask for less than all: for what its caches need first
        try:
            found = run(model, memory=budget(tier, least), **options)
            break
        except TierCapacityError as error:
            least += error.needed - error.available
    assert found is not None and same(found, plain)
    peak = plain.memory.tiers[tier].peak
    assert found.memory.tiers[tier].peak <= least <= 3 * peak
    # On the device it may be less: layers that it has no room for are streamed.
    assert tier is Tier.DEVICE or peak <= least
