"""A plan has the bytes of its call, whatever ran before: random models, policies, codes and budgets, calls in a row."""

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from block_models import NEMOTRON, SDAR, batch
from long_cases import and_long

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.policies.registry import policies_for

LAYERS, CASES = 6, 80
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 160,
        "max_sequence_length": 256, "vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125,
    },
    "sdar": {**SDAR, "num_hidden_layers": LAYERS, "head_dim": 16},
    "nemotron": {**NEMOTRON, "num_hidden_layers": LAYERS, "head_dim": 16},
}  # fmt: skip
POLICIES = {
    "llada": [policy for policy in policies_for("canvas") if policy != "auto"],
    "sdar": list(policies_for("blocks")),
    "nemotron": list(policies_for("context")),
}
OPTIONS: dict[str, dict[str, Any]] = {"polestar": {"clusters": 3, "top_m": 1, "update_threshold": 0}}


class Call(NamedTuple):
    lengths: tuple[int, ...]  # of its prompts
    new: int
    block: int


@pytest.fixture(scope="module")
def checkpoints(random_checkpoint: Callable[[Mapping[str, Any]], Path]) -> Callable[[str], Path]:
    return cache(lambda family: random_checkpoint({**FAMILIES[family], "torch_dtype": "float32"}))


def totals(plan: tiered.Plan) -> list[int]:
    return [plan.tiers[tier].total for tier in (Tier.DEVICE, Tier.HOST)]


def required(out: tiered.GenerationOutput) -> list[int]:
    return [out.memory.tiers[tier].required for tier in (Tier.DEVICE, Tier.HOST)]


def over(out: tiered.GenerationOutput, plan: tiered.Plan) -> bool:
    """Whether a call held more than was planned."""
    return any(out.memory.tiers[tier].peak > plan.tiers[tier].total for tier in (Tier.DEVICE, Tier.HOST))


def run(runtime: tiered.Runtime, call: Call) -> tiered.GenerationOutput:
    ids, mask = batch(call.lengths, left=True)
    of_rule = {"remasking": "random", "seed": 3} if runtime.policy.needs_order() else {}
    return runtime.generate(
        ids, attention_mask=mask, max_new_tokens=call.new, block_length=call.block, block_steps=1,
        stop_at_eos=False, **of_rule,
    )  # fmt: skip


@pytest.fixture
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without a largest context and advice, which take most of their time."""
    monkeypatch.setattr("tiered.planning.plan.advise", lambda *_: [])
    monkeypatch.setattr("tiered.planning.plan._largest_context", lambda *_: None)


@pytest.mark.filterwarnings("ignore:.*positions, but the model was trained")
@pytest.mark.usefixtures("bytes_alone")
@pytest.mark.parametrize("seed", and_long(range(CASES), range(400)))
def test_a_plan_is_the_call(seed: int, checkpoints: Callable[[str], Path], tmp_path: Path):
    """Two calls in turn, four in all. Each has room exactly if its plan fits, takes the planned bytes, and answers as
    without a budget."""
    draw = random.Random(seed)
    family = draw.choice(["llada", "llada", "llada", "sdar", "nemotron"])
    path, policy = checkpoints(family), draw.choice(POLICIES[family])
    options: dict[str, Any] = {
        "policy": policy, "kv": draw.choice(["raw", "raw", "fp8"]), "weights": draw.choice(["raw", "raw", "int8"]),
        **OPTIONS.get(policy, {}),
    }  # fmt: skip
    block = 4 if family == "nemotron" else draw.choice([8, 16])
    calls = [
        Call(tuple(draw.randrange(4, 90) for _ in range(draw.choice([1, 1, 2]))), block * draw.randrange(1, 3), block)
        for _ in range(2)
    ]

    def planned(call: Call, memory: MemoryBudget | None) -> tiered.Plan:
        return tiered.plan(
            path, context=max(call.lengths) + call.new, batch=len(call.lengths), max_new_tokens=call.new,
            block_length=call.block, memory=memory, **options,
        )  # fmt: skip

    alone: dict[Call, tiered.GenerationOutput] = {}
    most = least_host = 0
    with tiered.from_pretrained(path, **options) as free:
        for call in calls:
            alone[call], plan = run(free, call), planned(call, None)
            # A batch of a model that sees blocks is planned for the lengths that take the most.
            ragged = family != "llada" and len(call.lengths) > 1
            assert not over(alone[call], plan) if ragged else required(alone[call]) == totals(plan)
            most = max(most, plan.tiers[Tier.DEVICE].total)
    given: dict[str, Any] = {"device": int(most * draw.uniform(0.25, 1.0))}
    if draw.random() < 0.6:
        least_host = planned(calls[0], MemoryBudget(**given)).tiers[Tier.HOST].total
        given["host"] = int((least_host + 1) * draw.uniform(0.2, 1.3))
    if draw.random() < 0.5:
        given |= {"disk": 8 << 20, "disk_path": tmp_path}
    memory = MemoryBudget(**given)
    plans = {call: planned(call, memory) for call in calls}
    try:
        runtime = tiered.from_pretrained(path, memory=memory, **options)
    except TierCapacityError:
        assert not any(plan.fits for plan in plans.values())
        return
    with runtime:
        for call in calls * 2:
            ragged = family != "llada" and len(call.lengths) > 1
            try:
                out = run(runtime, call)
            except TierCapacityError:
                assert not plans[call].fits, call
                continue
            assert plans[call].fits or ragged, call
            assert torch.equal(out.sequences, alone[call].sequences)
            assert ragged or (required(out) == totals(plans[call]) and not over(out, plans[call]))
            runtime.ledger.check_integrity()
    assert not any(runtime.ledger.held(tier) for tier in Tier)
