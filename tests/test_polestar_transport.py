"""Law 2 for Polestar: the tier of the hidden states, and the way and time of copies, change no bit of the caches."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_rows import Stores
from polestar_variants import variant
from simulation import Link, LinkSpeed, Point, SimulatedThreads
from torch import Tensor

import tiered
from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.offload.fence import Event
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Copy, Lane, TransferEvent, Transport
from tiered.output import GenerationOutput
from tiered.policies.polestar.fetching import Fetching
from tiered.runtime import Runtime

pytestmark = pytest.mark.usefixtures("few_slots")

GOLDENS = Path(__file__).parent / "goldens" / "llada"
LENGTHS = (17, 9)


@dataclass
class Left:
    """The output and the caches of a call."""

    out: GenerationOutput
    stores: Tensor

    def same_as(self, other: "Left") -> bool:
        assert self.out.history is not None and other.out.history is not None
        return torch.equal(torch.stack(self.out.history), torch.stack(other.out.history)) and torch.equal(
            self.stores.view(torch.int32), other.stores.view(torch.int32)
        )

    def chosen(self) -> list[Sequence[Sequence[int]]]:
        return [update.clusters for update in self.out.updates]


class Synchronous(ThreadTransport):
    """Every copy has ended before the caller goes on."""

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        event = super().copy(lane, copies, after)
        event.synchronize()
        return event


def jitter(seed: int) -> Callable[[Point, Lane | None], float]:
    """Seconds of a random delay at every point, 0 to 3 ms, mostly none."""
    chance = random.Random(seed)
    return lambda point, lane: max(0.0, chance.uniform(-0.006, 0.003))


@pytest.fixture(scope="module")
def model():
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32").model


def run(model: Any, transport: Callable[[], Transport] | None = None, guidance: float = 0.0, **policy: Any) -> Left:
    ids = torch.randint(0, 480, (2, 17), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    stores = Stores()
    out = Runtime(model, policy=variant(**policy), transport=transport).generate(
        ids, attention_mask=mask, max_new_tokens=16, block_length=8, steps=8, stop_at_eos=False,
        cfg_scale=guidance, output_history=True, inspector=stores,
    )  # fmt: skip
    assert out.steps_by_kind["update"] > 1
    return Left(out, torch.stack(stores.left))


@pytest.mark.parametrize(
    ("codec", "clusters", "top_m", "threshold", "refresh"),
    [
        *((codec.value, 5, 1, 0, "full") for codec in Codec),
        ("raw", 5, 2, 0, "drift"),
        ("fp8", 3, 1, 1, "drift"),
        ("nvfp4_delta", 9, 3, 2, "drift"),
    ],
)
def test_the_tier_changes_no_bit(model: Any, codec: str, clusters: int, top_m: int, threshold: int, refresh: str):
    policy = {"codec": codec, "clusters": clusters, "top_m": top_m, "update_threshold": threshold, "refresh": refresh}
    host, device = (run(model, tier=tier, **policy) for tier in ("host", "device"))
    assert host.same_as(device)
    assert host.chosen() == device.chosen()
    assert host.out.tiers is not None and device.out.tiers is not None
    assert set(host.out.tiers.asked) == {Tier.HOST} and set(device.out.tiers.asked) == {Tier.DEVICE}


def test_codecs_do_differ(model: Any):
    """Else no stored row would ever be read, and the laws here would hold of nothing."""
    left = [run(model, codec=codec, clusters=5, top_m=1, update_threshold=0) for codec in Codec]
    assert not any(one.same_as(other) for number, one in enumerate(left) for other in left[:number])


SLOW = Link(fetch=LinkSpeed(latency=0.004), store=LinkSpeed(latency=0.002))
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "synchronous": Synchronous,
    "slow": lambda: SimulatedThreads(link=SLOW),
    **{f"delays {seed}": lambda seed=seed: SimulatedThreads(delay=jitter(seed)) for seed in range(2)},
    "slow, with delays": lambda: SimulatedThreads(link=SLOW, delay=jitter(9)),
}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"codec": "nvfp4_delta", "clusters": 5, "top_m": 2, "update_threshold": 0},
    "by drift": {"codec": "raw", "clusters": 9, "top_m": 3, "update_threshold": 0, "refresh": "drift"},
    "shared, guided": {"clusters": 9, "top_m": 2, "update_threshold": 1, "cluster_layers": 2, "guidance": 0.5},
}


@pytest.fixture(scope="module")
def plain(model: Any) -> dict[str, Left]:
    return {name: run(model, **policy) for name, policy in POLICIES.items()}


@pytest.mark.parametrize(
    ("policy", "transport"),
    [("full", transport) for transport in TRANSPORTS]
    + [("by drift", "synchronous"), ("by drift", "slow, with delays"), ("by drift", "delays 1")]
    + [("shared, guided", "synchronous"), ("shared, guided", "slow, with delays")],
)
def test_no_delay_changes_a_bit(model: Any, plain: dict[str, Left], policy: str, transport: str):
    found = run(model, TRANSPORTS[transport], **POLICIES[policy])
    assert sum(update.fetched_bytes for update in found.out.updates) > 0
    assert found.same_as(plain[policy])
    assert found.chosen() == plain[policy].chosen()


@pytest.mark.parametrize("policy", ["full", "by drift"])
def test_fetching_ahead_changes_no_bit(
    model: Any, plain: dict[str, Left], policy: str, monkeypatch: pytest.MonkeyPatch
):
    assert sum(update.ahead for update in plain[policy].out.updates) > 0
    monkeypatch.setattr(Fetching, "guess", lambda *_: None)
    found = run(model, **POLICIES[policy])
    assert found.same_as(plain[policy])
    assert not sum(update.ahead + update.in_vain for update in found.out.updates)
