"""Tiers for every policy: with a device that does not hold what a policy keeps, the answers are the same to the bit."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import RecordLostError, TierCapacityError
from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.forward import stream_costs
from tiered.models.llada import LLaDA
from tiered.offload.delay import Point
from tiered.offload.errors import TransferError
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Lane
from tiered.output import GenerationOutput
from tiered.planning.call_costs import CallCosts
from tiered.planning.call_sizes import CallSizes
from tiered.policies.base import Policy
from tiered.policies.registry import POLICIES, make_policy
from tiered.runtime import Runtime

LAYERS, PROMPT, ANSWER, BLOCK = 6, 90, 32, 16
SIZES: dict[str, Any] = {"max_new_tokens": ANSWER, "block_length": BLOCK}
# What makes a policy keep and move more than its defaults do here.
OPTIONS: dict[str, dict[str, Any]] = {
    "dllm_cache": {"prompt_interval": 5, "response_interval": 3},
    "polestar": {"clusters": 5, "top_m": 2, "update_threshold": 0},
    "elastic_cache": {"window": 12},
}
STREAMABLE = [name for name in POLICIES if name != "none"]  # which keeps nothing from layer to layer
CALLS: dict[str, dict[str, Any]] = {
    "four a step": {"steps": 8},
    "guided": {"cfg_scale": 0.7, "steps": 4},
    "threshold": {"confidence_threshold": 0.02},
}


@pytest.fixture(scope="module")
def model() -> LLaDA:
    sizes = {"d_model": 64, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96}
    tokens = {"vocab_size": 200, "mask_token_id": 199, "eos_token_id": 198, "pad_token_id": 198}
    model = LLaDA.from_config({**sizes, **tokens, "max_sequence_length": 512, "rope_theta": 5e5})
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_costs, "FEWEST_PAGE_ROWS", 32)


def policy_of(name: str) -> Policy:
    return make_policy(name, **OPTIONS.get(name, {}))


def prompts() -> dict[str, Tensor]:
    ids = torch.randint(0, 190, (2, PROMPT), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    return {"inputs": ids, "attention_mask": mask}


def run(
    model: LLaDA,
    policy: Policy,
    budget: MemoryBudget | None = None,
    delay: Callable[[Point, Lane | None], float] | None = None,
    **options: Any,
) -> GenerationOutput:
    if policy.needs_order():
        options = {"steps": 8, **options, "remasking": "random", "seed": 3}
        options.pop("confidence_threshold", None)
    ledger = Ledger(budget)
    runtime = Runtime(model, policy=policy, ledger=ledger, transport=lambda: ThreadTransport(delay=delay))
    out = runtime.generate(**prompts(), **{"stop_at_eos": False, "output_history": True, **SIZES, **options})
    ledger.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)
    return out


def costs_of(model: LLaDA, policy: Policy, budget: MemoryBudget, guidance: bool = False) -> CallCosts:
    sizes = CallSizes(
        policy=policy, shape=model.shape, batch=4 if guidance else 2, context=PROMPT + ANSWER, block_length=BLOCK,
        dtype="float32", answer=ANSWER, guidance=guidance,
    )  # fmt: skip
    return CallCosts.of(sizes, budget, {})


def least_and_resident(model: LLaDA, policy: Policy, guidance: bool = False) -> tuple[int, int]:
    """Bytes of the device with everything streamed, and with as little as the policy allows."""
    return tuple(
        costs_of(model, policy, MemoryBudget(device=device), guidance).total(Tier.DEVICE) for device in (0, None)
    )  # pyright: ignore[reportReturnType]


def same(one: GenerationOutput, other: GenerationOutput) -> bool:
    assert one.history is not None and other.history is not None
    return torch.equal(torch.stack(one.history), torch.stack(other.history)) and torch.equal(
        one.sequences, other.sequences
    )


def jitter(seed: int) -> Callable[[Point, Lane | None], float]:
    chance = random.Random(seed)
    return lambda point, lane: max(0.0, chance.uniform(-0.02, 0.001))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", STREAMABLE)
def test_a_smaller_device_changes_no_bit(model: LLaDA, name: str, call: str):
    policy, options = policy_of(name), CALLS[call]
    least, resident = least_and_resident(model, policy, "cfg_scale" in options)
    unlimited = run(model, policy, **options)
    moved = []
    shares = (0.0, 0.5, 1.0) if call == "four a step" else (0.0,)
    for share in shares:
        device = int(least + share * (resident - 1 - least))
        out = run(model, policy, MemoryBudget(device=device), **options)
        assert same(out, unlimited), share
        assert out.memory.peak_device_bytes <= device
        moved.append(out.memory.moved.get("host->device", 0))
        needed = costs_of(model, policy, MemoryBudget(device=device), "cfg_scale" in options)
        assert needed.streams is not None
        if "confidence_threshold" not in options:
            assert out.memory.tiers[Tier.HOST].peak <= needed.total(Tier.HOST)
    assert moved[-1] == min(moved)  # of the largest device, the least has to come back
    assert moved[0] or "confidence_threshold" in options  # where one forward may commit a block, nothing is reread


@pytest.mark.parametrize("name", STREAMABLE)
def test_what_is_just_enough_runs_and_a_byte_less_does_not(model: LLaDA, name: str, monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(name)
    least, _ = least_and_resident(model, policy)
    costs = costs_of(model, policy, MemoryBudget(device=least))
    host = costs.total(Tier.HOST)
    out = run(model, policy, MemoryBudget(device=least, host=host), steps=8)
    assert out.memory.peak_device_bytes <= least and out.memory.tiers[Tier.HOST].peak <= host
    monkeypatch.setattr(LLaDA, "embed", lambda *_: pytest.fail("work has begun"))
    for short, tier in (
        (MemoryBudget(device=least - 1), Tier.DEVICE),
        (MemoryBudget(device=least, host=host - 1), None),
    ):
        with pytest.raises(TierCapacityError) as caught:
            run(model, policy, short, steps=8)
        assert tier is None or (caught.value.tier, caught.value.needed) == (tier, least)


@pytest.mark.parametrize("name", STREAMABLE)
def test_no_delay_and_no_disk_changes_a_bit(model: LLaDA, name: str, tmp_path: Any):
    policy = policy_of(name)
    least, _ = least_and_resident(model, policy)
    unlimited = run(model, policy, steps=8)
    assert same(run(model, policy, MemoryBudget(device=least), jitter(1), steps=8), unlimited)
    costs = costs_of(model, policy, MemoryBudget(device=least))
    host = costs.total(Tier.HOST) // 2 + 2 * costs.slot_bytes
    budget = MemoryBudget(device=least, host=host, disk="16MiB", disk_path=tmp_path)
    out = run(model, policy, budget, jitter(2), steps=8)
    assert same(out, unlimited)
    assert out.tiers is not None and out.tiers.evicted[Tier.HOST]
    assert out.memory.tiers[Tier.HOST].peak <= host


@pytest.mark.parametrize("guidance", [0.0, 0.6])
@pytest.mark.parametrize("name", STREAMABLE)
def test_a_sequence_that_has_ended_leaves(model: LLaDA, name: str, guidance: float, monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(name)
    options = {"steps": 8, "cfg_scale": guidance}
    first, second = run(model, policy, **options).sequences[:, PROMPT:].tolist()
    end = next((token for token in first[:BLOCK] if token not in second), None)
    order = None
    if end is None:
        end = next((token for token in second[:BLOCK] if token not in first), None)
        order = 1
    assert end is not None, "both answers begin with the same tokens"
    monkeypatch.setattr(model, "eos_token_id", end)
    unlimited = run(model, policy, **options, stop_at_eos=True)
    assert len(set(unlimited.forwards)) == 2, order
    least, _ = least_and_resident(model, policy, guidance > 0)
    out = run(model, policy, MemoryBudget(device=least), **options, stop_at_eos=True)
    assert same(out, unlimited)


def test_the_coldest_go_first_and_spread_over_the_stack(model: LLaDA):
    policy = policy_of("dllm_cache")
    least, resident = least_and_resident(model, policy)
    streamed = []
    for share in range(0, 101, 2):
        costs = costs_of(model, policy, MemoryBudget(device=int(least + share / 100 * (resident - least))))
        assert costs.total(Tier.DEVICE) <= int(least + share / 100 * (resident - least))
        streamed.append({} if costs.streams is None else {s.feature: s.layers for s in costs.streams.streams})
    assert streamed[-1] == {}
    assert {feature: len(layers) for feature, layers in streamed[0].items()} == dict.fromkeys(
        policy.features(model.shape), LAYERS
    )
    everywhere = tuple(range(LAYERS))
    for layers in streamed:
        if Feature.KEY in layers:
            assert layers[Feature.KEY] == layers[Feature.VALUE]
            assert layers[Feature.ATTN_OUT] == layers[Feature.FFN_OUT] == everywhere
        if Feature.ATTN_OUT in layers:
            assert layers[Feature.FFN_OUT] == everywhere
        for some in layers.values():
            gaps = [after - before for before, after in pairwise(some)]
            assert max(gaps, default=0) - min(gaps, default=0) <= 1
    counts = [sum(map(len, layers.values())) for layers in streamed]
    assert len(set(counts)) > 4


def test_what_the_policy_wants_in_the_host_tier_is_there_without_a_cap(model: LLaDA):
    policy = make_policy("elastic_cache", hidden_tier="host", window=12)
    assert policy.host_features() == {Feature.HIDDEN}
    costs = costs_of(model, policy, MemoryBudget())
    assert costs.streams is not None and [s.feature for s in costs.streams.streams] == [Feature.HIDDEN]
    on_device = make_policy("elastic_cache", hidden_tier="device", window=12)
    assert costs_of(model, on_device, MemoryBudget()).streams is None
    host, device = run(model, policy), run(model, on_device)
    assert same(host, device)
    assert host.memory.moved["device->host"] and not device.memory.moved


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.STORE])
def test_a_failed_copy_is_an_error(model: LLaDA, lane: Lane):
    seen = 0

    def fault(point: Point, of: Lane | None) -> float:
        nonlocal seen
        seen += point is Point.COPY and of is lane
        if seen == 20 and point is Point.COPY and of is lane:
            raise OSError("the bus is down")
        return 0.0

    policy = policy_of("fast_dllm_dual")
    least, _ = least_and_resident(model, policy)
    with pytest.raises((TransferError, RecordLostError)):
        run(model, policy, MemoryBudget(device=least), fault)
