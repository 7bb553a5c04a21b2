"""Tiers for every policy: if the device does not hold all that a policy keeps, the answers are the same to the bit."""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from simulation import Point, SimulatedThreads
from torch import Tensor
from workloads.models import drawn

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.forward import stream_bytes
from tiered.forward.sizes import CallShape
from tiered.kernels.row_code import RowCode
from tiered.models.llada import LLaDA
from tiered.offload.errors import TransferError
from tiered.offload.transport import Lane
from tiered.output import GenerationOutput
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.policies.registry import make_policy, policies_for
from tiered.runtime import Runtime

LAYERS, PROMPT, ANSWER, BLOCK = 5, 90, 32, 16
SIZES: dict[str, Any] = {"max_new_tokens": ANSWER, "block_length": BLOCK}
# Options under which a policy keeps and moves more than by default.
OPTIONS: dict[str, dict[str, Any]] = {
    "dllm_cache": {"prompt_interval": 5, "response_interval": 3},
    "polestar": {"clusters": 5, "top_m": 2, "update_threshold": 0},
    "elastic_cache": {"window": 12},
}
# All but `none`, which keeps nothing from layer to layer, and `auto`, which is one of the others.
STREAMABLE = [name for name in policies_for("canvas") if name not in ("auto", "none")]
CALLS: dict[str, dict[str, Any]] = {
    "four a step": {"steps": 8},
    "guided": {"cfg_scale": 0.7, "steps": 4},
    "threshold": {"confidence_threshold": 0.02},
    "fp8": {"kv": RowCode.FP8, "steps": 8},
    "nvfp4": {"kv": RowCode.NVFP4, "steps": 8},
}


@pytest.fixture(scope="module")
def model() -> LLaDA:
    sizes = {"d_model": 64, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96}
    tokens = {"vocab_size": 200, "mask_token_id": 199, "eos_token_id": 198, "pad_token_id": 198}
    model = LLaDA.from_config({**sizes, **tokens, "max_sequence_length": 512, "rope_theta": 5e5})
    torch.manual_seed(0)
    return drawn(model, 0.1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_bytes, "FEWEST_CHUNK_ROWS", 32)


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
    ledger, kv = Ledger(budget), options.pop("kv", None)
    runtime = Runtime(model, policy=policy, ledger=ledger, transport=lambda: SimulatedThreads(delay=delay), kv=kv)
    out = runtime.generate(**prompts(), **{"stop_at_eos": False, "output_history": True, **SIZES, **options})
    ledger.check_integrity()
    runtime.close()
    assert all(ledger.held(tier) == 0 for tier in Tier)
    return out


@pytest.fixture(scope="module")
def unlimited(model: LLaDA) -> Callable[[str, str], GenerationOutput]:
    """The output of a policy in a call with all on the device."""
    return cache(lambda name, call: run(model, policy_of(name), **CALLS[call]))


def bytes_of(model: LLaDA, policy: Policy, budget: MemoryBudget, call: str = "four a step") -> CallBytes:
    sizes = CallShape(
        shape=model.shape, batch=2, context=PROMPT + ANSWER, block_length=BLOCK, dtype="float32", answer=ANSWER,
        kv=CALLS[call].get("kv", None), guidance="cfg_scale" in CALLS[call],
    )  # fmt: skip
    return CallBytes.of(policy, sizes, budget)


def least_and_resident(model: LLaDA, policy: Policy, call: str = "four a step") -> tuple[int, int]:
    """Bytes of the device with everything streamed, and with as little as the policy allows."""
    return tuple(bytes_of(model, policy, MemoryBudget(device=device), call).total(Tier.DEVICE) for device in (0, None))  # pyright: ignore[reportReturnType]


def same(one: GenerationOutput, other: GenerationOutput) -> bool:
    assert one.history is not None and other.history is not None
    return torch.equal(torch.stack(one.history), torch.stack(other.history)) and torch.equal(
        one.sequences, other.sequences
    )


def jitter(seed: int) -> Callable[[Point, Lane | None], float]:
    chance = random.Random(seed)
    return lambda point, lane: max(0.0, chance.uniform(-0.02, 0.001))


Unlimited = Callable[[str, str], GenerationOutput]


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", STREAMABLE)
def test_a_smaller_device_changes_no_bit(model: LLaDA, unlimited: Unlimited, name: str, call: str):
    """Nor does a host tier of the least size."""
    policy, options = policy_of(name), CALLS[call]
    least, resident = least_and_resident(model, policy, call)
    moved, streamed = [], []
    for share in (0.0, 1.0) if "steps" in options and "cfg_scale" not in options else (0.0,):
        device = int(least + share * (resident - 1 - least))
        needed = bytes_of(model, policy, MemoryBudget(device=device), call)
        assert needed.streams is not None
        host = needed.total(Tier.HOST)
        out = run(model, policy, MemoryBudget(device=device, host=host), **options)
        assert same(out, unlimited(name, call)), share
        assert out.memory.peak_device_bytes <= device and out.memory.tiers[Tier.HOST].peak <= host
        moved.append(out.memory.moved.get("host->device", 0))
        streamed.append(sum(len(stream.layers) for stream in needed.streams.streams))
    assert moved[-1] == min(moved) or len(set(streamed)) == 1  # of fewer layers less has to come back
    assert moved[0] or "confidence_threshold" in options  # if one forward may commit a block, nothing is reread


@pytest.mark.parametrize("name", ["polestar", "dkv_decode", "elastic_cache"])
def test_a_caller_in_inference_mode_gets_the_same_bits(model: LLaDA, unlimited: Unlimited, name: str):
    """There tensors do not count how often they were written."""
    budget = MemoryBudget(device=least_and_resident(model, policy_of(name))[0])
    with torch.inference_mode():
        out = run(model, policy_of(name), budget, **CALLS["four a step"])
        assert torch.is_inference_mode_enabled()
    assert out.tiers is not None and same(out, unlimited(name, "four a step"))


@pytest.mark.parametrize("name", STREAMABLE)
def test_a_byte_less_than_enough_is_refused_before_any_work(model: LLaDA, name: str, monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(name)
    least, _ = least_and_resident(model, policy)
    host = bytes_of(model, policy, MemoryBudget(device=least)).total(Tier.HOST)
    monkeypatch.setattr(LLaDA, "embed", lambda *_: pytest.fail("work has begun"))
    for short, tier in (
        (MemoryBudget(device=least - 1), Tier.DEVICE),
        (MemoryBudget(device=least, host=host - 1), None),
    ):
        with pytest.raises(TierCapacityError) as caught:
            run(model, policy, short, steps=8)
        assert tier is None or (caught.value.tier, caught.value.needed) == (tier, least)


@pytest.mark.parametrize("name", STREAMABLE)
def test_no_delay_changes_a_bit(model: LLaDA, unlimited: Unlimited, name: str):
    policy = policy_of(name)
    budget = MemoryBudget(device=least_and_resident(model, policy)[0])
    assert same(run(model, policy, budget, jitter(2), **CALLS["four a step"]), unlimited(name, "four a step"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", ["four a step", "guided"])
@pytest.mark.parametrize("name", STREAMABLE)
def test_a_sequence_that_has_ended_leaves(
    model: LLaDA, unlimited: Unlimited, name: str, call: str, monkeypatch: pytest.MonkeyPatch
):
    policy, options = policy_of(name), CALLS[call]
    first, second = unlimited(name, call).sequences[:, PROMPT:].tolist()
    alone = [token for token in first[:BLOCK] if token not in second]
    alone += [token for token in second[:BLOCK] if token not in first]
    assert alone, "both answers begin with the same tokens"
    monkeypatch.setattr(model, "eos_token_id", alone[0])
    whole = run(model, policy, **options, stop_at_eos=True)
    assert len(set(whole.forwards)) == 2
    least, _ = least_and_resident(model, policy, call)
    out = run(model, policy, MemoryBudget(device=least), **options, stop_at_eos=True)
    assert same(out, whole)


def test_the_coldest_go_first_and_spread_over_the_stack(model: LLaDA):
    policy = policy_of("dllm_cache")
    least, resident = least_and_resident(model, policy)
    streamed = []
    for share in range(0, 101, 2):
        needed = bytes_of(model, policy, MemoryBudget(device=int(least + share / 100 * (resident - least))))
        assert needed.total(Tier.DEVICE) <= int(least + share / 100 * (resident - least))
        streamed.append({} if needed.streams is None else {s.feature: s.layers for s in needed.streams.streams})
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


def test_a_policy_can_keep_features_in_the_host_tier_without_a_cap(model: LLaDA):
    policy = make_policy("elastic_cache", hidden_tier="host", window=12)
    needed = bytes_of(model, policy, MemoryBudget())
    assert needed.streams is not None and [s.feature for s in needed.streams.streams] == [Feature.HIDDEN]
    on_device = make_policy("elastic_cache", hidden_tier="device", window=12)
    assert bytes_of(model, on_device, MemoryBudget()).streams is None
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
    with pytest.raises(TransferError):
        run(model, policy, MemoryBudget(device=least), fault)
