"""A call books the bytes that torch allocates: never fewer, and not many more."""

import gc
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocations import Allocations
from baselines import parity
from long_cases import and_long
from polestar_variants import variant
from workloads.models import drawn

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.rows import Rows
from tiered.decoding.attention_shift import AttentionShift
from tiered.forward.attention_bytes import attention_chunk
from tiered.forward.sizes import CallShape
from tiered.kernels import block_attention_ref
from tiered.kernels.row_code import RowCode
from tiered.models.gidd import Gidd
from tiered.models.llada import LLaDA
from tiered.models.llada_moe import LLaDAMoE
from tiered.models.sdar import Sdar
from tiered.offload.chunk import Chunk
from tiered.offload.lane import Lane
from tiered.offload.pinning import PageablePinner
from tiered.output import GenerationOutput
from tiered.planning.call_bytes import CallBytes
from tiered.planning.workload import UNCAPPED
from tiered.policies.registry import make_policy, policies_for
from tiered.runtime import Runtime
from tiered.tiers.stored_rows import StoredRows

# The least share of the booked bytes that is allocated.
TIGHT = 0.9
MODELS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 1},
    "wide vocabulary": {"vocab_size": 16384},
    "wide MLP": {"mlp_hidden_size": 2048},
    "bfloat16": {"dtype": torch.bfloat16, "vocab_size": 8192},
}
CALLS: dict[str, dict[str, Any]] = {
    "short": {"prompt": 40, "max_new_tokens": 64},
    "long": {"prompt": 700, "max_new_tokens": 32},
    "four blocks": {"prompt": 16, "max_new_tokens": 128},
    "padded batch": {"prompt": 300, "max_new_tokens": 32, "batch": 3, "pads": 100},
    "guided": {"prompt": 300, "max_new_tokens": 32, "cfg_scale": 1.0},
    "sampled": {"prompt": 64, "max_new_tokens": 32, "temperature": 1.0, "batch": 2},
    "threshold": {"prompt": 64, "max_new_tokens": 16, "block_length": 8, "confidence_threshold": 0.5},
    "drift-aware": {"prompt": 64, "max_new_tokens": 16, "block_length": 8, "commit": "drift_aware"},
    "drift-aware, long": {"prompt": 700, "max_new_tokens": 8, "block_length": 8, "commit": "drift_aware"},
    "drift-aware, padded batch": {
        "prompt": 300,
        "max_new_tokens": 8,
        "block_length": 8,
        "commit": "drift_aware",
        "batch": 3,
        "pads": 90,
    },
    "drift-aware, guided": {
        "prompt": 300,
        "max_new_tokens": 8,
        "block_length": 8,
        "commit": "drift_aware",
        "cfg_scale": 1.0,
    },
}


PLAIN = [call for call in CALLS if "drift-aware" not in call]
FEW = (("multi-head", "short"), ("grouped", "padded batch"), ("grouped", "guided"), ("multi-head", "sampled"))
EVERY = policies_for("canvas")
# Calls of policies that hold something of their own.
OF_ITS_OWN = ("short", "long", "padded batch", "guided", "sampled")
# Each policy, each model, each call; policies that hold something of their own under calls that change it. The hidden
# states of `polestar` have tests of their own, below.
CASES = and_long(
    [
        *((policy, "multi-head", "short") for policy in EVERY if policy not in ("polestar", "fast_dllm_dual")),
        *(("fast_dllm_dual", model, "short") for model in MODELS),
        *(("fast_dllm_dual", "grouped", call) for call in CALLS if call != "short"),
        *(
            (policy, "grouped", call)
            for policy in ("dllm_cache", "elastic_cache")
            for call in ("padded batch", "guided")
        ),
        ("fast_dllm_dual", "bfloat16", "sampled"),
        ("fast_dllm_dual", "bfloat16", "drift-aware, guided"),
        ("elastic_cache", "multi-head", "long"),
    ],
    [
        # Attention is compared apart from the vocabulary and the MLP. bfloat16 is emulated on a CPU: a long prompt
        # takes minutes there, and is booked by the same formula.
        *product(["fast_dllm_dual"], ["multi-head", "grouped", "wide vocabulary", "wide MLP"], PLAIN),
        *product(["fast_dllm_dual"], ["bfloat16"], ["short", "guided", "sampled", "threshold", "drift-aware"]),
        # Bytes of steps over chosen rows do not depend on the vocabulary and the MLP.
        *((policy, *case) for policy in EVERY if policy != "polestar" for case in FEW),
        *product(["dllm_cache", "elastic_cache"], ["multi-head", "grouped"], OF_ITS_OWN),
    ],
)


# Hidden states in tiers: bytes of a call depend on the clusters, and are booked for those that take most.
# `EVERYTHING` renews all rows in every step. Then the bound is close, unless it counts finished blocks that are not
# there yet. Else it is loose, because an update passes over fewer rows.
EVERYTHING: dict[str, Any] = {"top_m": 1000, "update_threshold": 0}
HIDDEN: dict[str, tuple[float, dict[str, Any]]] = {
    "default": (0.6, {}),
    "few clusters, raw": (0.85, {**EVERYTHING, "clusters": 4, "codec": "raw"}),
    "few clusters": (0.85, {**EVERYTHING, "clusters": 4}),
    "two clusters, fp8": (0.85, {**EVERYTHING, "clusters": 2, "codec": "fp8"}),
    "many clusters": (0.8, {**EVERYTHING, "clusters": 32}),
    "many clusters, raw": (0.7, {**EVERYTHING, "clusters": 32, "codec": "raw"}),
    "finished blocks appended": (0.5, {**EVERYTHING, "clusters": 4, "refresh": "drift"}),
    "finished blocks appended, raw": (0.5, {**EVERYTHING, "clusters": 32, "refresh": "drift", "codec": "raw"}),
    "single rows and finished blocks": (0.45, {"clusters": "rows", "update_threshold": 0, "refresh": "drift"}),
    "a window": (0.85, {**EVERYTHING, "clusters": 8, "window": (2, 1), "codec": "nvfp4"}),
    "clusters of their own": (0.8, {**EVERYTHING, "clusters": 8, "cluster_layers": 1}),
    "beside those from below": (0.6, {"update_threshold": 0, "from_below": "beside", "cluster_layers": 1}),
    "drift of the output": (0.6, {"update_threshold": 0, "drift": "output", "cluster_layers": 1}),
    "single rows": (0.6, {"clusters": "rows", "update_threshold": 0, "from_below": "beside", "codec": "raw"}),
    "on the device": (0.85, {**EVERYTHING, "clusters": 8, "tier": "device"}),
    "faiss": (0.5, {**EVERYTHING, "clusters": 8, "kmeans": "faiss"}),
}
# Every option under one call; all of them take minutes.
HIDDEN_CASES = and_long(
    [
        *((options, "multi-head", PLAIN[n % len(PLAIN)]) for n, options in enumerate(HIDDEN)),
        ("few clusters", "multi-head", "drift-aware, guided"),
        ("few clusters, raw", "grouped", "guided"),
        ("many clusters", "bfloat16", "short"),
        ("finished blocks appended", "multi-head", "four blocks"),
        ("single rows and finished blocks", "multi-head", "four blocks"),
    ],
    [
        *((options, "multi-head", PLAIN[(n + 3) % len(PLAIN)]) for n, options in enumerate(HIDDEN)),
        *product(["default", "few clusters, raw"], ["multi-head"], PLAIN[:2]),
        *product(list(HIDDEN)[1::4], ["grouped"], ["guided"]),
        ("few clusters", "multi-head", "drift-aware"),
        ("many clusters, raw", "bfloat16", "guided"),
        ("default", "wide MLP", "sampled"),
        ("few clusters", "wide vocabulary", "padded batch"),
    ],
)


@cache
def random_model(*, dtype: torch.dtype = torch.float32, vocab_size: int = 2048, **config: int) -> LLaDA:
    sizes = {"d_model": 128, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 384, "vocab_size": vocab_size}
    tokens = {"mask_token_id": vocab_size - 1, "eos_token_id": vocab_size - 2, "pad_token_id": vocab_size - 2}
    model = LLaDA.from_config({**sizes, **tokens, "max_sequence_length": 4096, "rope_theta": 5e5, **config}).to(dtype)
    torch.manual_seed(0)
    return drawn(model, 0.05)


def generated(runtime: Runtime, ids: torch.Tensor, tight: float = TIGHT, **options: Any) -> GenerationOutput:
    """The output of `generate`, which has to allocate at most its booked bytes, and at least `tight` of them."""
    gc.collect()
    with Allocations() as allocated:
        out = runtime.generate(ids, **options)
    booked = out.memory.peak_device_bytes
    assert tight * booked <= allocated.peak <= booked
    assert {account for tier in Tier for account in runtime.ledger.accounts(tier)} <= {Account.SPARE}
    return out


@pytest.mark.usefixtures("host_memory_apart")
@pytest.mark.parametrize(("policy", "model", "call"), CASES)
def test_a_call_allocates_what_it_books(policy: str, model: str, call: str):
    ids, options = call_of(call)
    runtime = Runtime(random_model(**MODELS[model]), policy=make_policy(policy))
    if runtime.policy.needs_order():
        options["remasking"] = "random"
    generated(runtime, ids, **options)


@cache
def block_model(heads: int = 4, window: int | None = None) -> Sdar:
    tokens = {"mask_token_id": 2047, "eos_token_id": 2046}
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 2}
    more = {"head_dim": 32, "intermediate_size": 384, "vocab_size": 2048, "max_position_embeddings": 4096}
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 1}
    model = Sdar.from_config({**sizes, **tokens, **more, **windows})
    torch.manual_seed(0)
    return drawn(model, 0.05)


@pytest.mark.parametrize(
    ("policy", "call", "heads", "window"),
    and_long(
        [
            *(("block_causal", call, 4, None) for call in ("short", "long", "padded batch", "guided")),
            ("none", "padded batch", 4, None),
            ("block_causal", "long", 12, None),  # which are wider together than the model
            ("none", "padded batch", 4, 40),
        ],
        [
            *(("block_causal", "sampled", 4, None), ("none", "long", 12, None), ("block_causal", "threshold", 4, None)),
            *((policy, call, 4, 40) for policy in ("none", "block_causal") for call in ("long", "padded batch")),
        ],
    ),
)
def test_a_call_over_blocks_allocates_what_it_books(policy: str, call: str, heads: int, window: int | None):
    ids, options = call_of(call)
    runtime = Runtime(block_model(heads, window), policy=make_policy(policy))
    generated(runtime, ids, 0.7, **{"block_length": 16, **options})


# Mixtures of experts: most room is for the router, for one expert, or for the shared one.
MIXTURES: dict[str, dict[str, Any]] = {
    "router": {"num_experts": 1024, "moe_router_enable_expert_bias": True},
    "expert": {"num_experts": 4, "expert_intermediate_size": 1024},
    "shared expert": {"num_experts": 16, "shared_expert_intermediate_size": 512, "moe_layer_freq": [0, 1]},
}


@cache
def mixture_model(mixture: str, dtype: torch.dtype) -> LLaDAMoE:
    tokens = {"mask_token_id": 1023, "eos_token_id": 1022, "pad_token_id": 1022}
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "expert_intermediate_size": 96}
    more = {"num_experts_per_tok": 3, "vocab_size": 1024, "max_position_embeddings": 4096}
    config = {**sizes, **tokens, **more, "dense_intermediate_size": 512, **MIXTURES[mixture]}
    model = LLaDAMoE.from_config(config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
        if "router" not in name:
            parameter.data = parameter.to(dtype)
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("policy", "call"), [("none", "short"), ("fast_dllm_dual", "long"), ("dllm_cache", "padded batch")]
)
def test_a_call_over_experts_allocates_what_it_books(policy: str, call: str, dtype: torch.dtype, mixture: str):
    ids, options = call_of(call)
    generated(Runtime(mixture_model(mixture, dtype), policy=make_policy(policy)), ids, 0.75, **options)


# How tokens are proposed: how tight, the options. If a draw takes room, it is booked also for tokens without one.
SAMPLINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "margin": (TIGHT, {"confidence": "margin"}),
    "entropy": (0.5, {"confidence": "entropy"}),
    "cut": (TIGHT, {"top_p": 0.9, "top_k": 50, "temperature": 0.7}),
    "cut, one row": (0.8, {"top_p": 0.9, "temperature": 0.7, "block_length": 1, "max_new_tokens": 2}),
    "cut, entropy": (0.5, {"top_p": 0.9, "commit": "timestep", "confidence": "entropy", "block_length": 32}),
    "cut, drawn": (TIGHT, {"top_p": 0.9, "temperature": 0.7, "commit": "timestep", "confidence_temperature": 0.3}),
}


SAMPLING_CASES = and_long(
    [
        *((case, "wide vocabulary", 1) for case in SAMPLINGS),
        ("cut", "wide vocabulary", 14),
        ("entropy", "bfloat16", 2),
        ("cut, drawn", "bfloat16", 2),
    ],
    ((case, *sizes) for case in SAMPLINGS for sizes in (("wide vocabulary", 14), ("bfloat16", 2))),
)


@pytest.mark.parametrize(("case", "model", "batch"), SAMPLING_CASES)
def test_proposing_holds_no_more_than_is_booked(case: str, model: str, batch: int, monkeypatch: pytest.MonkeyPatch):
    tight, options = SAMPLINGS[case]
    monkeypatch.setattr("tiered.models.shape.WHOLE_LOGITS", 2**30)  # tiles are the next test's
    monkeypatch.setitem(CALLS, case, {"prompt": 16, "max_new_tokens": 64, "batch": batch, **options})
    ids, generation = call_of(case)
    runtime = Runtime(random_model(**MODELS[model]), policy=make_policy("none"))
    generated(runtime, ids, tight, **{**generation, "steps": 2})


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", ["wide vocabulary", "bfloat16"])
@pytest.mark.parametrize("case", ["likeliest", "guided", "margin", "cut", "cut, drawn"])
def test_tiles_of_logits_hold_no_more_than_is_booked(case: str, model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.models.shape.WHOLE_LOGITS", 2**18)
    monkeypatch.setattr("tiered.models.shape.TILE_LOGITS", 2**18)
    monkeypatch.setattr("tiered.models.shape.VOCABULARY_TILE", 1024)
    _, options = SAMPLINGS.get(case, (TIGHT, {"cfg_scale": 1.0} if case == "guided" else {}))
    monkeypatch.setitem(CALLS, case, {"prompt": 16, "max_new_tokens": 256, "block_length": 256, "batch": 2, **options})
    ids, generation = call_of(case)
    runtime = Runtime(random_model(**MODELS[model]), policy=make_policy("none"))
    # Margins are from some rows at a time, and booked as if they were from some tokens.
    out = generated(runtime, ids, 0.45 if case == "margin" else 0.7, **{**generation, "steps": 2})
    vocabulary = runtime.model.shape.vocab_size
    assert out.memory.peak_device_bytes < 2 * 256 * vocabulary * 4


def test_steps_that_skip_guidance_have_tiles_in_a_call_without_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.models.shape.WHOLE_LOGITS", 2**18)
    monkeypatch.setitem(CALLS, "unguided", {"prompt": 16, "max_new_tokens": 256, "block_length": 256, "steps": 2})
    ids, generation = call_of("unguided")
    model = random_model(**MODELS["wide vocabulary"])
    generated(Runtime(model, policy=make_policy("dllm_cache", guidance_interval=2)), ids, 0.5, **generation)


# Passes over chosen rows: how tight, the policy's options, the call.
BRANCHES: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "most rows": (0.95, {"update_ratio": 0.95}, {"prompt": 8, "max_new_tokens": 160}),
    "prompt due": (0.9, {"update_ratio": 0.9, "prompt_interval": 3}, {"prompt": 600, "max_new_tokens": 256}),
    "clocks apart": (
        0.9,
        {"prompt_interval": 3, "response_interval": 2},
        {"prompt": 64, "max_new_tokens": 96, "batch": 3, "pads": 20, "confidence_threshold": 0.005},
    ),
    "guided at times": (
        0.9,
        {"guidance_interval": 2, "prompt_interval": 2, "response_interval": 2},
        {"prompt": 64, "max_new_tokens": 96, "batch": 2, "cfg_scale": 1.0},
    ),
    # The difference that guidance makes is kept of the whole answer, and booked for the whole context.
    "guided, parity": (0.55, {"guidance_interval": 3}, {"prompt": 64, "max_new_tokens": 96, "cfg_scale": 1.0}),
}


BRANCH_CASES = and_long(
    [*((case, "multi-head") for case in BRANCHES), ("clocks apart", "grouped"), ("most rows", "bfloat16")],
    product(BRANCHES, ["grouped", "bfloat16"]),
)


@pytest.mark.parametrize(("case", "model"), BRANCH_CASES)
def test_a_call_over_chosen_rows_allocates_what_it_books(case: str, model: str, monkeypatch: pytest.MonkeyPatch):
    tight, policy, call = BRANCHES[case]
    monkeypatch.setitem(CALLS, case, call)
    torch.manual_seed(1)
    ids, options = call_of(case)
    made = (parity.policy if "parity" in case else make_policy)("dllm_cache", **policy)
    runtime = Runtime(random_model(**{**MODELS[model], "vocab_size": 1024}), policy=made)
    out = generated(runtime, ids, tight, **options)
    assert case != "clocks apart" or len(set(out.forwards)) > 1


def call_of(call: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids and the options of `generate`."""
    options: dict[str, Any] = {"batch": 1, "pads": 0, "stop_at_eos": False, **CALLS[call]}
    ids = torch.randint(0, 1000, (options.pop("batch"), options.pop("prompt")))
    options["attention_mask"] = torch.ones_like(ids)
    options["attention_mask"][0, : options.pop("pads")] = 0
    steps = None if {"confidence_threshold", "commit"} & set(options) else 2 * options["max_new_tokens"] // 32
    return ids, {"steps": steps, **options}


@pytest.fixture
def host_memory_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that torch does not count: without a GPU it would be the device's."""

    def allocate(_: PageablePinner, nbytes: int) -> Chunk:
        return Chunk(torch.from_numpy(np.empty(nbytes, np.uint8)), pinned=False, actual_bytes=nbytes)

    monkeypatch.setattr(PageablePinner, "allocate", allocate)


def planned(runtime: Runtime, context: int, budget: MemoryBudget = UNCAPPED, **sizes: Any) -> dict[Tier, int]:
    """Planned bytes of a call by tier. Weights are left out: the runtimes of these tests do not book them."""
    dtype = str(runtime.dtype).removeprefix("torch.")
    sizes = {"batch": 1, "block_length": 32, **sizes}
    made = CallShape(shape=runtime.model.shape, context=context, dtype=dtype, **sizes)
    accounts = CallBytes.of(runtime.policy, made, budget).tiers(budget)
    return {tier: sum(accounts[tier].values()) for tier in Tier}


@pytest.mark.usefixtures("host_memory_apart")
@pytest.mark.parametrize(("options", "model", "call"), HIDDEN_CASES)
def test_a_call_with_hidden_states_allocates_what_it_books(options: str, model: str, call: str):
    tight, policy = HIDDEN[options]
    ids, generation = call_of(call)
    runtime = Runtime(random_model(**{"n_layers": 4, **MODELS[model]}), policy=variant(**policy))
    out = generated(runtime, ids, tight, **generation)
    assert out.steps_by_kind["update"]
    if "commit" not in generation:
        most = planned(
            runtime,
            out.sequences.shape[1],
            batch=len(ids),
            block_length=generation.get("block_length", 32),
            guidance="cfg_scale" in generation,
            sampled="temperature" in generation,
        )
        assert all(out.memory.tiers[tier].peak <= most[tier] for tier in Tier)


@pytest.mark.usefixtures("host_memory_apart")
def test_the_codes_of_a_long_prompt_are_booked():
    """In a narrow model a refresh takes most: the rows of all clusters go into their codes at once."""
    runtime = Runtime(random_model(n_layers=4, vocab_size=256, mlp_hidden_size=128), policy=make_policy("polestar"))
    generated(runtime, torch.randint(0, 250, (1, 2000)), 0.8, max_new_tokens=32, steps=4, stop_at_eos=False)


# ---- features that the device has no room for ----

KEEPING = [name for name in EVERY if name not in ("auto", "none")]
STREAMED = and_long(
    [
        *((policy, "short") for policy in KEEPING),
        *((policy, "padded batch") for policy in ("fast_dllm_dual", "elastic_cache")),
        *((policy, "guided") for policy in ("dllm_cache", "polestar")),
    ],
    product(KEEPING, ["short", "padded batch", "guided"]),
)


@pytest.mark.usefixtures("host_memory_apart")
@pytest.mark.parametrize(("policy", "call"), STREAMED)
def test_a_call_whose_features_are_streamed_allocates_what_it_books(policy: str, call: str):
    ids, options = call_of(call)
    made = make_policy(policy)
    if made.needs_order():
        options["remasking"] = "random"
    model = random_model(n_layers=6, n_kv_heads=2, vocab_size=512)
    ids = ids % 500
    sizes: dict[str, Any] = {"batch": len(ids), "guidance": "cfg_scale" in options, "answer": options["max_new_tokens"]}
    context = ids.shape[1] + options["max_new_tokens"]
    least = planned(Runtime(model, policy=made), context, MemoryBudget(device=0), **sizes)
    budget = MemoryBudget(device=least[Tier.DEVICE], host=least[Tier.HOST])
    runtime = Runtime(model, policy=made, ledger=Ledger(budget))
    # Bytes of clusters are booked for those that take most.
    out = generated(runtime, ids, 0.7 if policy == "polestar" else TIGHT, **options)
    assert out.memory.peak_device_bytes <= least[Tier.DEVICE]
    assert out.memory.tiers[Tier.HOST].peak <= least[Tier.HOST]
    assert out.memory.moved["host->device"]


# ---- a budget that is just enough ----

BUDGETS: dict[str, dict[str, Any]] = {
    "default": {},
    "few clusters": {**EVERYTHING, "clusters": 3},
    "many clusters": {**EVERYTHING, "clusters": 24, "codec": "raw", "cluster_layers": 1},
    "finished blocks appended": {**EVERYTHING, "refresh": "drift"},
    "on the device": {**EVERYTHING, "clusters": 12, "tier": "device"},
}


def budgeted(policy: str, budget: MemoryBudget, n_layers: int = 4) -> Runtime:
    made = variant(**BUDGETS[policy])
    return Runtime(random_model(n_layers=n_layers), policy=made, ledger=Ledger(budget))


@pytest.mark.parametrize(
    ("options", "seed"),
    and_long([(options, n % 2) for n, options in enumerate(BUDGETS)], product(BUDGETS, range(2))),
)
def test_a_call_runs_to_its_end_in_what_it_needs(options: str, seed: int):
    torch.manual_seed(seed)
    # Repeated tokens make clusters of very different sizes.
    ids = torch.randint(0, 3 + 500 * (seed % 2), (2, 150 + 37 * seed))
    needed = planned(budgeted(options, UNCAPPED), ids.shape[1] + 96, batch=2)
    runtime = budgeted(options, MemoryBudget(device=needed[Tier.DEVICE], host=needed[Tier.HOST]))
    out = runtime.generate(ids, max_new_tokens=96, steps=12, block_length=32, stop_at_eos=False)
    assert out.steps_by_kind["update"]
    assert {account for tier in Tier for account in runtime.ledger.accounts(tier)} <= {Account.SPARE}
    runtime.ledger.check_integrity()


@pytest.mark.parametrize(("options", "tier"), [("default", Tier.HOST), *((name, Tier.DEVICE) for name in BUDGETS)])
def test_a_byte_less_is_refused_before_any_work(options: str, tier: Tier, monkeypatch: pytest.MonkeyPatch):
    ids = torch.randint(0, 1000, (1, 150))
    needed = planned(budgeted(options, UNCAPPED), 150 + 64)
    # The host has room for hidden states alone, so nothing can be streamed instead.
    enough = MemoryBudget(device=needed[Tier.DEVICE], host=needed[Tier.HOST])
    runtime = budgeted(options, replace(enough, **{tier.value: needed[tier] - 1}))
    monkeypatch.setattr(LLaDA, "embed", lambda *_: pytest.fail("work has begun"))
    with pytest.raises(TierCapacityError, match="lower `clusters`") as caught:
        runtime.generate(ids, max_new_tokens=64, steps=8, block_length=32)
    assert caught.value.tier is tier and caught.value.needed == caught.value.available + 1
    assert {account for tier in Tier for account in runtime.ledger.accounts(tier)} <= {Account.SPARE}


@pytest.mark.parametrize("disk", [False, True])
def test_a_call_that_the_host_has_no_room_for_is_refused_with_a_host_that_fits(disk: bool, tmp_path: Path):
    """A disk tier has weights alone."""
    given: dict[str, Any] = {"disk": "1GiB", "disk_path": tmp_path} if disk else {}
    ids = torch.randint(0, 500, (1, 300))
    options: dict[str, Any] = {"max_new_tokens": 64, "steps": 2, "block_length": 32, "stop_at_eos": False}
    needed = planned(budgeted("many clusters", UNCAPPED, n_layers=6), 364)
    runtime = budgeted("many clusters", MemoryBudget(device=needed[Tier.DEVICE], host=1, **given), n_layers=6)
    with pytest.raises(TierCapacityError, match=r'a budget of "') as caught:
        runtime.generate(ids, **options)
    assert caught.value.tier is Tier.HOST and caught.value.total == needed[Tier.HOST]
    enough = MemoryBudget(device=needed[Tier.DEVICE], host=caught.value.total, **given)
    out = budgeted("many clusters", enough, n_layers=6).generate(ids, **options)
    assert not out.memory.tiers[Tier.DISK].peak


def test_a_layer_leaves_in_few_copies():
    """One a record, however many clusters lie there."""
    runtime = Runtime(random_model(n_layers=4), policy=make_policy("polestar", clusters=40, codec="raw"))
    out = runtime.generate(torch.randint(0, 1000, (1, 320)), max_new_tokens=32, steps=1, block_length=32)
    assert out.steps_by_kind["refresh"] == out.num_forwards == 1 and out.tiers is not None
    records_of = runtime.policy.needs(runtime._call.sizes(1, 352, 32)).records
    assert records_of is not None
    records = records_of()
    assert records.rows == 320 and records.record_rows == 128
    assert out.tiers.stored[Tier.HOST] == 320
    assert out.tiers.layers[1][Lane.STORE].copies == out.tiers.layers[1][Lane.STORE].jobs == 3


def test_a_call_that_fails_leaves_nothing_booked(monkeypatch: pytest.MonkeyPatch):
    runtime = budgeted("default", UNCAPPED)
    monkeypatch.setattr(StoredRows, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runtime.generate(torch.randint(0, 1000, (1, 150)), max_new_tokens=32, steps=2, block_length=32)
    assert {account for tier in Tier for account in runtime.ledger.accounts(tier)} <= {Account.SPARE}


# ---- soft-capped scores ----

# The policies and their options. Rows of a pass are cut where final tokens end, and are booked for the worst cut.
CAPPED: dict[str, dict[str, Any]] = {
    "none": {},
    "fast_dllm_prefix": {},
    "fast_dllm_dual": {},
    "uniform": {},
    "dkv_decode": {},
    "dllm_cache": {"response_interval": 2},
    "elastic_cache": {"window": 32, "hidden_tier": "device"},
    "polestar": {**EVERYTHING, "clusters": 4, "codec": "raw"},
}
ADAPTIVE: dict[str, Any] = {"commit": "adaptive", "tokens_per_step": 2, "block_steps": 3}
ANCESTRAL: dict[str, Any] = {"commit": "ancestral", "block_steps": 3, "temperature": 1.0}
CAPPED_CALLS: dict[str, dict[str, Any]] = {
    "short": {"prompt": 40, "max_new_tokens": 64, **ADAPTIVE},
    "long": {"prompt": 700, "max_new_tokens": 32, **ADAPTIVE},
    "padded batch": {"prompt": 300, "max_new_tokens": 32, "batch": 3, "pads": 100, **ADAPTIVE},
    "corrected": {"prompt": 300, "max_new_tokens": 32, "correction_steps": 2, "block_length": 16, **ADAPTIVE},
    "ancestral": {"prompt": 64, "max_new_tokens": 32, "batch": 2, **ANCESTRAL},
    "ancestral, cut": {"prompt": 64, "max_new_tokens": 32, "top_p": 0.9, **ANCESTRAL},
    "ancestral, one row": {"prompt": 64, "max_new_tokens": 2, "block_length": 1, **ANCESTRAL},
    "masks": {"prompt": 300, "max_new_tokens": 32, "batch": 2, "pads": 70, "steps": 4},
    "masks, drift-aware": {
        "prompt": 300,
        "max_new_tokens": 8,
        "block_length": 8,
        "batch": 2,
        "pads": 70,
        "commit": "drift_aware",
    },
}
CAPPED_MODELS: dict[str, dict[str, Any]] = {
    "wide": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "many heads": {"heads": 16},
}
# All scores at a time, or few of them: then other tensors of a layer take most.
CAPPED_CASES = and_long(
    [
        *((policy, "wide", "short", 1 << 20) for policy in CAPPED),
        *(("none", "wide", call, 1 << 20) for call in CAPPED_CALLS if call != "short"),
        *((policy, "wide", "masks", 1 << 20) for policy in ("dllm_cache", "polestar")),
        *((policy, "bfloat16", "ancestral", 1 << 20) for policy in ("none", "polestar")),
        *((policy, "bfloat16", "short", 1 << 12) for policy in ("none", "dllm_cache")),
        ("elastic_cache", "many heads", "padded batch", 1 << 16),
        ("polestar", "many heads", "masks, drift-aware", 1 << 16),
    ],
    [
        *product(CAPPED, ["wide"], ["short", "padded batch", "masks"], [1 << 20]),
        *product(CAPPED, ["bfloat16"], ["ancestral"], [1 << 20]),
        ("uniform", "many heads", "padded batch", 1 << 16),
    ],
)


@cache
def random_gidd(*, masks: bool, dtype: torch.dtype = torch.float32, heads: int = 4) -> Gidd:
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": heads, "head_dim": 128 // heads}
    tokens = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 4096}
    numbers = {"attn_soft_cap": 30.0, "resid_scale": 4.0, "weight_scaling": 1.0, "head_scaling": 4.0}
    noise = {"noise_type": -1000.0 if masks else 1000.0, "min_log_snr": -9.0, "max_log_snr": 9.0}
    model = Gidd.from_config({
        **sizes, **tokens, **numbers, **noise, "intermediate_size": 384, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False, "use_qk_norm": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    }).to(dtype)  # fmt: skip
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.usefixtures("host_memory_apart")
@pytest.mark.parametrize(("policy", "model", "call", "at_once"), CAPPED_CASES)
def test_a_call_with_capped_scores_allocates_what_it_books(
    policy: str, model: str, call: str, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(block_attention_ref, "PAIRS_AT_ONCE", at_once)
    monkeypatch.setitem(CALLS, call, CAPPED_CALLS[call])
    ids, options = call_of(call)
    options |= {"steps": CAPPED_CALLS[call].get("steps")}
    made = make_policy(policy, **CAPPED[policy])
    runtime = Runtime(random_gidd(masks="masks" in call, **CAPPED_MODELS[model]), policy=made)
    generated(runtime, ids, 0.75, **options)


# ---- keys and values in codes ----


# Tiles of columns, and of heads, that are decoded at a time: all there are, or a few.
@pytest.mark.usefixtures("host_memory_apart")
@pytest.mark.parametrize("kv", RowCode)
@pytest.mark.parametrize(
    ("policy", "model", "call", "tile"),
    [
        ("none", "multi-head", "short", (1 << 20, 1024)),
        ("fast_dllm_dual", "multi-head", "long", (1 << 20, 1024)),
        ("fast_dllm_dual", "grouped", "padded batch", (1 << 16, 100)),
        ("fast_dllm_dual", "bfloat16", "short", (1 << 14, 64)),
        ("dkv_decode", "grouped", "guided", (1 << 20, 64)),
    ],
)
def test_a_call_with_coded_keys_allocates_what_it_books(
    policy: str, model: str, call: str, tile: tuple[int, int], kv: RowCode, monkeypatch: pytest.MonkeyPatch
):
    for name, value in zip(("PAIRS_AT_ONCE", "CODED_AT_ONCE"), tile, strict=True):
        monkeypatch.setattr(block_attention_ref, name, value)
    ids, options = call_of(call)
    runtime = Runtime(random_model(**MODELS[model]), policy=make_policy(policy), kv=kv)
    generated(runtime, ids, 0.75, **options)


# Sequences, query heads, key heads, dtype, share of the room that comparing everything at once would take.
@pytest.mark.parametrize("room", [0.0, 0.1, 0.4, 2.0])
@pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads", "dtype"), [(1, 8, 8, "float32"), (3, 8, 2, "bfloat16"), (2, 6, 1, "float32")]
)
def test_comparing_attention_allocates_what_its_chunk_says(
    sequences: int, heads: int, kv_heads: int, dtype: str, room: float
):
    context, block_length, head_dim = 700, 16, 8
    shape = random_model(d_model=heads * head_dim, n_layers=1, n_heads=heads, n_kv_heads=kv_heads).shape
    sizes = CallShape(shape=shape, batch=sequences, block_length=block_length, context=context, dtype=dtype)
    chunk = attention_chunk(
        sizes,
        rows=sequences * block_length,
        room=int(room * 8 * 4 * sequences * heads * block_length * context),
    )
    drift = AttentionShift(torch.empty(sequences, heads, block_length, context), chunk)
    queries, keys = (
        torch.randn(sequences, n, rows, head_dim, dtype=getattr(torch, dtype))
        for n, rows in ((heads, block_length), (kv_heads, context))
    )
    rows = Rows.span(9, 9 + block_length)
    drift.begin_step(9, forget=[True] * sequences)
    drift.observe(rows, queries, keys, None)
    drift.begin_step(9, forget=[False] * sequences)
    with Allocations() as allocated:
        drift.observe(rows, queries, keys, None)
    assert not drift.shift.isnan().any()
    assert 0.8 * chunk.temporaries <= allocated.peak <= chunk.temporaries
    if room == 2.0:
        assert (chunk.sequences, chunk.heads) == (sequences, heads)
    if room == 0.0:
        assert (chunk.sequences, chunk.heads) == (1, 1)


RAGGED = {"max_new_tokens": 64, "block_length": 32, "confidence_threshold": 0.0012}
LONG_BLOCK = {"max_new_tokens": 128, "block_length": 128}


# A pass that widens on its way: the window's attention in one chunk and in many, and sequences with rows of their own.
@pytest.mark.parametrize(
    ("options", "sizes", "call"),
    [
        ({"similarity_threshold": 2.0}, {}, {"prompt": 4, "max_new_tokens": 64}),
        ({"similarity_threshold": 0.99, "tracked": 6}, {}, {"prompt": 30, "batch": 5, "pads": 20, **RAGGED}),
        ({"similarity_threshold": 2.0, "window": 128, "tracked": 3}, {"n_kv_heads": 1}, {"prompt": 1500, **LONG_BLOCK}),
        ({"similarity_threshold": 0.99, "refresh_interval": 3}, {}, {"prompt": 60, "batch": 3, "cfg_scale": 1.0}),
        ({"similarity_threshold": 2.0, "window": 48}, {"mlp_hidden_size": 64}, {"prompt": 60, "block_length": 48}),
    ],
)
def test_a_pass_that_widens_allocates_what_it_books(
    options: dict[str, Any], sizes: dict[str, Any], call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(CALLS, "widening", {"max_new_tokens": 48, "block_length": 16, **call})
    ids, generation = call_of("widening")
    policy = make_policy("elastic_cache", hidden_tier="device", **options)
    runtime = Runtime(random_model(n_layers=4, **sizes), policy=policy)
    generated(runtime, ids, **generation)


@pytest.mark.parametrize("columns", [None, (190, 200)])
@pytest.mark.parametrize("tiles", [False, True])
def test_logits_allocate_what_they_book(tiles: bool, columns: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch):
    if tiles:  # for a call of `generate`
        for name, most in (("WHOLE_LOGITS", 2**10), ("TILE_LOGITS", 2**10), ("VOCABULARY_TILE", 64)):
            monkeypatch.setattr(f"tiered.models.shape.{name}", most)
    runtime = Runtime(random_model(), policy=make_policy("none"))
    ids = torch.randint(0, 1000, (2, 200))
    runtime.ledger.restart_peaks()
    with Allocations() as allocated:
        runtime.logits(ids, columns=columns)
    booked = runtime.ledger.report().peak_device_bytes
    assert TIGHT * booked <= allocated.peak <= booked
