"""A plan counts what the runtime books, finds the largest context, and gives advice that works when it is followed."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from polestar_variants import variant
from torch.utils._python_dispatch import TorchDispatchMode

import tiered
from tiered.cli.main import main
from tiered.core.budget import MemoryBudget
from tiered.core.byte_size import format_bytes, format_count
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.forward.library_bytes import LARGEST_GPU, Gpu, library_buffers
from tiered.forward.sizes import CallShape
from tiered.models.families import family_of
from tiered.models.locate import read_config
from tiered.models.presets import PRESETS, read_preset
from tiered.offload.codec_bytes import Codec
from tiered.planning.card import Plan
from tiered.planning.plan import plan as plan_for
from tiered.policies.registry import make_policy, policies_for

ROOT = Path(__file__).parents[1]
GIB = 2**30
NOTHING = Tier.HOST, Tier.DISK


plan = partial(plan_for, device="cpu", weights="raw")
DUAL = "fast_dllm_dual"
# Presets whose rows see the whole canvas.
CANVASES = [name for name in PRESETS if not family_of(read_preset(name)).shape(read_preset(name)).block_causal]
MANY = 2**24  # positions: as many as a config.json may have
# A plan takes the config that would be loaded; a context beyond the model's own needs one that allows it.
LONG_LLADA = {**read_preset("llada-8b"), "max_sequence_length": MANY, "_name_or_path": "llada-8b"}


def stretched(model: str) -> dict[str, Any]:
    """The config of `model`, made for many positions."""
    config = read_config(model)
    key = "max_sequence_length" if config["model_type"] == "llada" else "max_position_embeddings"
    return {**config, key: MANY, "_name_or_path": model}


KEY_VALUE = (Account.KEY, Account.VALUE)


def alone(device: str | int) -> MemoryBudget:
    """So much of the device, and no host memory that features could be streamed from."""
    return MemoryBudget(device=device, host=0)


def device_bytes(made: Plan) -> int:
    return made.tiers[Tier.DEVICE].total


def test_libraries_are_planned_booked_and_capped_on_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.planning.plan.gpu_of", lambda device: LARGEST_GPU if device == "cuda" else None)
    sizes = {"context": 64, "block_length": 16, "policy": "fast_dllm_dual", "dtype": "bfloat16"}
    made, without = (plan_for("embedded", **sizes, device=device) for device in ("cuda", "cpu"))  # pyright: ignore[reportArgumentType]
    accounts, exact = made.tiers[Tier.DEVICE].accounts, without.tiers[Tier.DEVICE].accounts
    libraries = accounts[Account.LIBRARIES]
    assert libraries > LARGEST_GPU.workspace_bytes and accounts[Account.WEIGHTS] > exact[Account.WEIGHTS]
    assert {name: size for name, size in accounts.items() if name not in (Account.LIBRARIES, Account.WEIGHTS)} == {
        name: size for name, size in exact.items() if name is not Account.WEIGHTS
    }
    assert "libraries" in str(made) and "libraries" not in str(without)

    for module in ("tiered.call", "tiered.loading"):
        monkeypatch.setattr(f"{module}.gpu_of", lambda device: LARGEST_GPU)
    ids = torch.arange(5, 37)[None]
    for memory, fits in ((device_bytes(made), True), (device_bytes(made) - 1, False)):
        runtime = tiered.from_pretrained(
            "embedded", policy=DUAL, device="cpu", dtype="bfloat16", weights="raw",
            memory=MemoryBudget(device=memory, host=0),
        )  # fmt: skip
        with nullcontext() if fits else pytest.raises(TierCapacityError):
            out = runtime.generate(ids, max_new_tokens=32, block_length=16)
            assert out.memory.tiers[Tier.DEVICE].at_peak[Account.LIBRARIES] == libraries
        assert set(runtime.ledger.accounts(Tier.DEVICE)) == {Account.WEIGHTS}


def parts_of_keys(programs: int, slots: int, blocks: int) -> int:
    """Flash attention's own choice: the fewest parts that use 85 % of what the best number of them would."""
    if programs >= 0.8 * slots:
        return 1
    parts = range(1, min(128, slots, blocks) + 1)
    rounds = {n: programs * n / slots for n in parts if n == 1 or ceil(blocks / n) != ceil(blocks / (n - 1))}
    used = {n: of / ceil(of) for n, of in rounds.items()}
    return min(n for n, share in used.items() if share >= 0.85 * max(used.values()))


@pytest.mark.parametrize("multiprocessors", [20, 68, 132, 170])
@pytest.mark.parametrize(("batch", "context"), [(1, 130), (1, 1408), (1, 4096), (2, 1536), (3, 32768), (16, 700)])
def test_the_sums_of_attentions_parts_fit(multiprocessors: int, batch: int, context: int):
    shape, gpu = plan("llada-8b", context=64).shape, Gpu(workspace_bytes=0, multiprocessors=multiprocessors)
    sizes = CallShape(shape=shape, batch=batch, context=context, block_length=32, dtype="bfloat16", gpu=gpu)
    booked = sum(buffer.nbytes for buffer in library_buffers(sizes))
    most = min(context, 512 // batch)
    for rows in {min(64 * programs, most) for programs in range(1, 9)}:
        parts = parts_of_keys(batch * shape.heads * ceil(rows / 64), 2 * multiprocessors, ceil(context / 128))
        assert (parts > 1) * parts * batch * shape.heads * rows * (shape.head_dim + 1) * 4 <= booked, rows
    assert library_buffers(replace(sizes, gpu=None)) == []


def test_key_and_value_weigh_what_a_token_costs():
    made = plan("dream-7b", context=1000, batch=3, cfg=True, policy=DUAL)
    accounts = made.tiers[Tier.DEVICE].accounts
    assert accounts[Account.KEY] + accounts[Account.VALUE] == 6 * 1000 * made.kv_bytes_per_token
    assert made.kv_bytes_per_token == 56 * 1024


@pytest.mark.parametrize("dtype", ["float32", "torch.float32"])
def test_dtype(dtype: str):
    assert plan("llada-8b", context=64, dtype=dtype).tiers[Tier.DEVICE].accounts[Account.WEIGHTS] == 4 * 8_015_581_184


def test_a_policy_comes_by_name_or_as_an_object():
    by_name = plan("llada-8b", context=64, policy="fast_dllm_dual", refresh_interval=4)
    assert by_name == plan("llada-8b", context=64, policy=make_policy("fast_dllm_dual", refresh_interval=4))
    assert by_name.policy_options == {"refresh_interval": 4, "refresh_blocks": 1}


# ---- what fits ----


@patch("tiered.planning.plan.advise", lambda *_: [])  # which takes most of a plan's time
@settings(max_examples=25)
@given(
    st.sampled_from([*CANVASES, "embedded"]),
    st.integers(1, 20_000),
    st.integers(1, 8),
    st.sampled_from([1, 7, 32, 128]),
    st.integers(1, 200),
    # `auto` is another policy at another context.
    st.sampled_from([name for name in policies_for("canvas") if name != "auto"]),
)
def test_the_largest_context_fits_and_one_block_more_does_not(
    model: str, context: int, batch: int, block_length: int, percent: int, policy: str
):
    config = stretched(model)
    assume(config.get("noise_type", -1) < 0 or policy not in ("dkv_greedy", "elastic_cache"))
    options: dict[str, Any] = {"batch": batch, "block_length": block_length, "policy": policy}
    context = max(context, block_length)
    memory = device_bytes(plan(config, context=context, **options)) * percent // 100
    largest = plan(config, context=context, memory=memory, **options).largest_context
    assert largest is not None and largest % block_length == 0
    with patch("tiered.planning.plan._largest_context", lambda *_: None):  # a search, which is over
        if largest:
            assert plan(config, context=largest, memory=memory, **options).fits
        assert not plan(config, context=largest + block_length, memory=memory, **options).fits


def test_a_cap_is_met_to_the_byte():
    for policy in (DUAL, "polestar"):
        needed = {tier: planned.total for tier, planned in plan("llada-8b", context=4096, policy=policy).tiers.items()}
        device, host = needed[Tier.DEVICE], needed[Tier.HOST]
        assert plan("llada-8b", context=4096, policy=policy, memory=MemoryBudget(device=device, host=host)).fits
        for short in [MemoryBudget(device=device - 1, host=host)] + ([MemoryBudget(host=host - 1)] if host else []):
            assert not plan("llada-8b", context=4096, policy=policy, memory=short).fits


def test_without_a_cap_everything_fits():
    made = plan(LONG_LLADA, context=10**6, policy=DUAL, memory=MemoryBudget(host="1GiB"))
    assert made.fits and made.largest_context is None and made.advice == ()


# ---- advice ----

ADVISED: dict[str, tuple[dict[str, Any], set[tuple[str, ...]]]] = {
    "a context too long": (
        {"context": 32768, "memory": alone("24GiB"), "policy": DUAL},
        {("context",), ("policy",), ("weights",), ("memory",)},
    ),
    "a batch too large": (
        {"context": 2048, "batch": 16, "memory": alone("20GiB"), "policy": DUAL},
        {("batch",), ("context",), ("policy",), ("memory",)},
    ),
    "both too large": (
        {"context": 4096, "batch": 64, "memory": alone("16GiB"), "policy": DUAL},
        {("batch", "context"), ("memory",)},
    ),
    "too wide a dtype": (
        {"context": 1024, "dtype": "float32", "memory": alone("20GiB"), "policy": DUAL},
        {("dtype",), ("weights",), ("memory",)},
    ),
    "guidance": (
        {"context": 4096, "cfg": True, "memory": alone("18GiB"), "policy": DUAL},
        {("cfg",), ("context",), ("policy",), ("weights",), ("memory",)},
    ),
    "weights alone too large": (
        {"context": 1024, "memory": alone("8GiB"), "policy": DUAL},
        {("weights",), ("memory",)},
    ),
    "hidden states beside a cache that fits": (
        {
            "context": 4096,
            "memory": MemoryBudget(device="17.1GiB", host="380MiB"),
            "policy": "polestar",
            "cluster_layers": 1,
        },
        {("context",), ("policy",), ("weights",), ("memory",)},
    ),
    "too little host memory": (
        {"context": 4096, "batch": 2, "memory": MemoryBudget(host="530MiB"), "policy": "polestar", "cluster_layers": 1},
        {("batch",), ("context",), ("policy",), ("memory",)},
    ),
    "too little of both": (
        {
            "context": 4096,
            "memory": MemoryBudget(device="17.2GiB", host="100MiB"),
            "policy": "polestar",
            "cluster_layers": 1,
        },
        {("context",), ("policy",), ("memory",)},
    ),
}


def raised_caps(arguments: dict[str, Any], budget: MemoryBudget) -> list[str]:
    """What of `budget` is more than the plan had, as text."""
    caps = {tier: (budget.cap(tier), MemoryBudget.of(arguments["memory"]).cap(tier)) for tier in Tier}
    return [f"{cap // 2**20}MiB" for cap, had in caps.values() if cap is not None and cap != had]


def followed(arguments: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with `change`; another policy does not know the options of the present one."""
    gone = {"updates", "cluster_layers"} if "policy" in change else set()
    return {name: value for name, value in arguments.items() if name not in gone} | dict(change)


@pytest.mark.parametrize("case", ADVISED)
def test_advice_names_every_way_out_and_works_when_followed(case: str, monkeypatch: pytest.MonkeyPatch):
    arguments, expected = ADVISED[case]
    made = plan(LONG_LLADA, **arguments)
    json.dumps(made.as_dict())
    assert {tuple(advice.change) for advice in made.advice} == expected
    monkeypatch.setattr("tiered.planning.plan._largest_context", lambda *_: None)  # a search, which is over
    for advice in made.advice:
        assert plan(LONG_LLADA, **followed(arguments, advice.change)).fits, advice.text
        values = [
            size
            for value in advice.change.values()
            for size in (raised_caps(arguments, value) if isinstance(value, MemoryBudget) else [str(value)])
            if value is not False
        ]
        assert all(value in advice.text for value in values), advice.text


def test_advised_sizes_are_the_largest():
    arguments: dict[str, Any] = {"context": 2048, "batch": 16, "memory": alone("20GiB"), "policy": DUAL}
    sizes = {name: value for advice in plan(LONG_LLADA, **arguments).advice for name, value in advice.change.items()}
    assert not plan(LONG_LLADA, **{**arguments, "batch": sizes["batch"] + 1}).fits
    assert not plan(LONG_LLADA, **{**arguments, "context": sizes["context"] + 32}).fits
    assert sizes["memory"].device - device_bytes(plan("llada-8b", **arguments)) < 2**20


def test_advised_clusters_are_the_most():
    policy = variant("device", cluster_layers=1, clusters=60)
    arguments: dict[str, Any] = {"context": 4096, "memory": alone("17.45GiB"), "policy": policy}
    sizes = {name: value for advice in plan("llada-8b", **arguments).advice for name, value in advice.change.items()}
    more = replace(policy, clusters=sizes["clusters"] + 1)
    assert not plan("llada-8b", **{**arguments, "policy": more}).fits


# ---- below the device ----


def test_the_host_has_hidden_states_and_what_their_slots_waste():
    made = plan("llada-8b", context=4096, policy="polestar")
    host = made.tiers[Tier.HOST]
    assert set(host.accounts) == {Account.HIDDEN, Account.SPARE}
    assert host.total % 4096 == 0
    on_device = plan("llada-8b", context=4096, policy=variant("device"))
    assert on_device.tiers[Tier.HOST].total == 0
    assert on_device.tiers[Tier.DEVICE].accounts[Account.HIDDEN] == host.accounts[Account.HIDDEN]
    assert "host memory\n  hidden" in str(made)


@pytest.mark.parametrize("disk", [{}, {"disk": "4GiB", "disk_path": "/tmp"}])
def test_state_that_the_host_has_no_room_for_goes_to_no_disk(disk: dict[str, Any]):
    """The plan says what would fit."""

    def made(**host: Any) -> Plan:
        return plan("llada-8b", context=4096, policy="polestar", memory=MemoryBudget(**host, **disk))

    tight = made(host="60MiB")
    assert not tight.fits and not tight.tiers[Tier.DISK].accounts and tight.tiers[Tier.HOST].total > 60 * 2**20
    assert made(host=tight.tiers[Tier.HOST].total).fits


def test_the_host_limits_the_context():
    memory = MemoryBudget(host="1GiB")
    largest = plan(LONG_LLADA, context=4096, policy="polestar", memory=memory).largest_context
    assert largest
    assert plan(LONG_LLADA, context=largest, policy="polestar", memory=memory).fits
    assert not plan(LONG_LLADA, context=largest + 32, policy="polestar", memory=memory).tiers[Tier.HOST].fits
    on_device = plan("llada-8b", context=4096, policy=variant("device"), memory=memory)
    assert on_device.largest_context is None and on_device.fits


# ---- if hidden states were kept ----


LEADERS = 8  # of groups of four, in 32 layers but the first and the last


def test_hidden_states_weigh_what_their_codecs_say():
    hidden = plan("llada-8b", context=4096, policy=DUAL).hidden
    assert hidden is not None
    per_row = {codec.value: size / LEADERS / 4064 for codec, size in hidden.codecs.items()}  # all but a block
    assert per_row["raw"] == 8192
    assert per_row["nvfp4"] == per_row["nvfp4_delta"] == 2308
    assert hidden.clusters == 64 + 4064 // 256  # large ones are cut


@pytest.mark.parametrize("codec", Codec)
def test_what_would_be_kept_is_what_is_kept(codec: Codec):
    hidden = plan("llada-8b", context=4096, batch=2, policy=DUAL, memory="20GiB").hidden
    kept = plan("llada-8b", context=4096, batch=2, policy="polestar", codec=codec.value)
    host, device = kept.tiers[Tier.HOST].accounts, kept.tiers[Tier.DEVICE].accounts
    assert hidden is not None and kept.hidden is None
    assert host[Account.HIDDEN] == hidden.codecs[codec]
    if codec is Codec.NVFP4_DELTA:
        assert (device[Account.CENTROIDS], device[Account.STAGING]) == (hidden.centroids, hidden.staging)
    assert kept.as_dict()["if_hidden_states_were_kept"] is None
    assert "if hidden states were kept" not in str(kept)


@pytest.mark.parametrize("codec", ["raw", "nvfp4_delta"])
def test_contexts_grow_as_hidden_states_leave_the_device(codec: str):
    host, device = (
        plan(LONG_LLADA, context=4096, policy=variant(tier, codec=codec), memory="24GiB").largest_context
        for tier in ("host", "device")
    )
    assert host is not None and device is not None and host > 1.3 * device


@pytest.mark.parametrize("context", [4096, 16384, 32768])
def test_hidden_states_cost_the_device_less_than_one_percent_of_the_cache_and_two_rings(context: int):
    size: dict[str, Any] = {"context": context, "block_length": 32}
    polestar = plan(LONG_LLADA, policy="polestar", **size)
    device, host = (polestar.tiers[tier].accounts for tier in (Tier.DEVICE, Tier.HOST))
    cache = [plan(LONG_LLADA, policy=DUAL, **size).tiers[Tier.DEVICE].accounts[name] for name in KEY_VALUE]
    assert [device[name] for name in KEY_VALUE] == cache
    assert 0 < device[Account.CENTROIDS] < 0.0075 * sum(cache) and 0 < device[Account.STAGING] < 6 << 20
    assert 0.56 < host[Account.HIDDEN] / (LEADERS * (context - 32) * 4096) <= 0.58


def test_hidden_states_grow_with_the_sequences_and_are_in_no_total():
    alone = plan("llada-8b", context=512, policy=DUAL)
    one, four = alone.hidden, plan("llada-8b", context=512, batch=2, cfg=True, policy=DUAL).hidden
    assert one is not None and four is not None
    assert {codec: 4 * size for codec, size in one.codecs.items()} == four.codecs
    assert four.centroids == 4 * one.centroids
    assert Account.CENTROIDS not in alone.tiers[Tier.DEVICE].accounts
    nothing = plan("llada-8b", context=32, policy=DUAL).hidden
    assert nothing is not None and nothing.clusters == 0 == nothing.codecs[Codec.RAW]


# ---- how it is told ----


def test_the_card():
    made = plan(LONG_LLADA, context=32768, memory=alone("24GiB"), policy=DUAL)
    head, device, host, context, hidden, remarks = str(made).split("\n\n")
    assert head.splitlines() == [
        "for a CPU",
        "llada-8b",
        "LLaDA, 8.02B parameters, 32 layers, width 4096, 32 heads (32 key/value)",
        "context 32768, batch 1, block 32, bfloat16",
        "policy fast_dllm_dual, refresh_blocks=1",
    ]
    assert device.splitlines()[:4] == [
        "device memory",
        "  weights              14.93 GiB      16,031,162,368 B",
        "  key                   8.00 GiB       8,589,934,592 B",
        "  value                 8.00 GiB       8,589,934,592 B",
    ]
    assert host.splitlines()[0] == "host memory"
    over = (device_bytes(made) - 24 * GIB) / GIB
    assert device.endswith(f"cap                  24.00 GiB      25,769,803,776 B   DOES NOT FIT, {over:.2f} GiB over")
    assert context.splitlines() == [
        "KV per token          512.00 KiB",
        f"largest context     {made.largest_context} tokens",
    ]
    assert [line.split("  ")[0] for line in hidden.splitlines()[:1]] == [
        "if hidden states were kept, as policy polestar does to renew keys and values (not in the totals)"
    ]
    kept = made.hidden
    assert kept is not None
    centroids = f"{format_bytes(kept.centroids):>12}{kept.centroids:>20,} B"
    names = [line.split()[0] for line in hidden.splitlines()[1:-2]]
    assert names == list(Codec)
    delta = list(Codec).index(Codec.NVFP4_DELTA)
    assert [*hidden.splitlines()[1 + delta : 2 + delta], *hidden.splitlines()[-2:]] == [
        "  nvfp4_delta         576.44 MiB         604,437,504 B   18.01 KiB per token",
        f"  centroids         {centroids}   639 clusters a layer and sequence",
        "  slots                 2.82 MiB           2,954,240 B   10 for rows of nvfp4_delta",
    ]
    assert remarks.splitlines()[0] == "any one of these makes it fit:"
    assert f"  - lower the context to {made.largest_context}" in remarks.splitlines()


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", ["llada-8b", "gidd-unif-3b", str(ROOT / "tiered/embedded/assets")])
@pytest.mark.parametrize("policy", [DUAL, "polestar"])
@pytest.mark.parametrize("memory", [None, "1GiB", "17GiB", MemoryBudget(device="40TiB", host="1GiB")])
def test_the_card_fits_the_screen(model: str, policy: str, memory: MemoryBudget | str | None):
    cfg = not model.startswith("gidd")
    options: dict[str, Any] = {"batch": 3, "memory": memory, "cfg": cfg, "sampled": True, "policy": policy}
    made = plan(stretched(model), context=1_000_000, **options, refresh_blocks=12)
    lines = str(made).splitlines()
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if line != line.rstrip()]
    assert ("DOES NOT FIT" in str(made)) is not made.fits
    on_host = isinstance(memory, MemoryBudget) or made.streams is not None
    assert ("host memory\n" in str(made)) is (on_host or policy == "polestar")
    assert ("moved to the device" in str(made)) is (made.streams is not None)


def test_the_largest_context_is_one_that_the_model_was_made_for():
    made = plan("llada-8b", context=1024, memory="40GiB")
    assert (made.largest_context, made.warnings) == (4096, ())
    assert "largest context      4096 tokens   all that the model was trained on" in str(made).splitlines()
    assert plan("llada-8b", context=1024, memory="40GiB", block_length=96).largest_context == 42 * 96


SMALL = {"device": "rtx4090", "memory": "6GiB", "weights": "int4"}


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        (
            "llada-8b",
            {"rope_scaling": "ntk:32"},
            "largest context     131072 tokens   4096 trained, stretched by ntk:32",
        ),
        ("llada-8b", {"device": "rtx4090"}, "for rtx4090 (Ada whitepaper)"),
        ("llada-8b", {"device": "rtx4090"}, "  not measured), so a card of 24 GiB gets --memory 22.5GiB"),
        ("llada-8b", SMALL, "moved to the device in 254 of 256 forwards, all but refreshes: the layers that it has no"),
        ("llada-8b", SMALL, "  refresh: every row; update: also rows that the policy renews; step: the block's rows"),
        (
            "llada-8b",
            {"policy": "polestar"},
            "  spare               449.00 KiB             459,776 B   sizes that are rounded up",
        ),
        ("llada-8b", {"memory": "8GiB"}, "moved to the device in every forward: the layers that it "),
        (
            "llada-8b",
            {"device": "cuda"},
            'for a CUDA card of any kind. To plan for a card: --device rtx4090, or device="',
        ),
        (
            "llada-8b",
            {"device": "auto"},
            'for this machine: a CPU, no GPU. To plan for a card: --device rtx4090, or device="rtx4090"',
        ),
        (
            "nemotron-8b",
            {"device": "rtx4090", "memory": "16GiB", "context": 131072, "policy": "block_causal"},
            "warning: 0.6 tokens a second by this estimate, 1 a forward: a call of these sizes is too slow to be",
        ),
    ],
)
def test_the_card_says(model: str, arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.forward.library_bytes.pick_device", lambda _: torch.device("cpu"))
    call: dict[str, Any] = {"context": 4096, "memory": "400GiB", "policy": DUAL, **arguments}
    call |= {"refresh_blocks": 4} if call["policy"] == DUAL else {}
    made = plan(model, **call)
    assert [line for line in str(made).splitlines() if line.startswith(said)]


@pytest.mark.parametrize("device", ["cuda:zzz", "cudafoo", "mps"])
def test_a_device_that_cannot_be_is_named(device: str):
    with pytest.raises(ValueError, match=device):
        plan("llada-8b", context=64, device=device)


def test_a_gpu_that_is_here_is_named(monkeypatch: pytest.MonkeyPatch):
    here = Gpu(workspace_bytes=32 << 20, multiprocessors=132, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("tiered.planning.plan.gpu_of", lambda _: here)
    assert str(plan("llada-8b", context=64, device="auto")).startswith("for this machine: NVIDIA H100 80GB HBM3\n")


@pytest.mark.parametrize("memory", [None, "16GiB"])
def test_as_dict_survives_json(memory: str | None):
    made = plan(LONG_LLADA, context=32768, policy=DUAL, memory=memory)
    told = json.loads(json.dumps(made.as_dict()))
    assert told["fits"] is made.fits
    assert sum(told["tiers"]["device"]["accounts"].values()) == told["tiers"]["device"]["total"] == device_bytes(made)
    assert told["largest_context"] == made.largest_context
    assert [advice["text"] for advice in told["advice"]] == [advice.text for advice in made.advice]


@pytest.mark.parametrize(
    ("config", "name"),
    [({}, "a LLaDA config"), ({"_name_or_path": "acme/tiny"}, "acme/tiny")],
)
def test_a_config_is_planned_under_its_own_name(config: dict[str, str], name: str):
    assert plan({**read_preset("llada-8b"), **config}, context=64).model == name


@pytest.mark.parametrize(
    ("number", "text"), [(8_015_581_184, "8.02B"), (1_894_464, "1.89M"), (1000, "1.00K"), (999, "999"), (0, "0")]
)
def test_counts(number: int, text: str):
    assert format_count(number) == text


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"context": 0}, ValueError, "context = 0; an int of at least 1"),
        ({"context": -32}, ValueError, "context = -32"),
        ({"context": 64.0}, TypeError, "context = 64.0"),
        ({"context": True}, TypeError, "context = True"),
        ({"batch": 0}, ValueError, "batch = 0"),
        ({"block_length": 0}, ValueError, "block_length = 0"),
        ({"block_length": "32"}, TypeError, "block_length = '32'"),
        ({"dtype": "int4"}, ValueError, "unknown dtype 'int4'.* allowed: auto, bfloat16, float16, float32"),
        ({"cfg": 1.5}, TypeError, "cfg = 1.5; True or False"),
        ({"sampled": "yes"}, TypeError, "sampled = 'yes'"),
        ({"memory": "24 parsecs"}, ValueError, "24 parsecs"),
        ({"memory": 1.5}, TypeError, "1.5"),
        ({"policy": "fast_dlm_dual"}, ValueError, "did you mean 'fast_dllm_dual'"),
        ({"policy": "polestar", "refresh_block": 2}, ValueError, "did you mean 'refresh_blocks'"),
        ({"policy": "polestar", "refresh_blocks": 0}, ValueError, "refresh_blocks = 0"),
        ({"context": 10, "max_new_tokens": 64}, ValueError, "context = 10 has no room for a prompt and .* = 64"),
        ({"max_new_tokens": 64}, ValueError, "context = 64 has no room for a prompt and max_new_tokens = 64"),
        ({"context": 10, "block_length": 11}, ValueError, "context = 10 has no room for block_length = 11"),
        ({"path_or_config": {**LONG_LLADA, "rope_theta": 0}}, ValueError, "rope_theta = 0; a positive number"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        plan(**{"path_or_config": "llada-8b", "context": 64, **arguments})


# Of arguments that are not called so in their errors.
SAID = {
    "path_or_config": "model|config",
    "path_or_name": "model|checkpoint",
    "memory": "byte size",
    "inputs": "input|chat|string|ids|token|prompt",
}


def test_an_argument_of_another_type_is_named(monkeypatch: pytest.MonkeyPatch):
    runtime = tiered.from_pretrained(Path(__file__).parent / "goldens" / "llada" / "llada_tiny_gqa", policy="none")
    monkeypatch.setattr("tiered.loading.load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (plan_for, {"path_or_config": "embedded", "context": 64, "policy": "none"}),
        (tiered.from_pretrained, {"path_or_name": "embedded", "policy": "none"}),
        (runtime.generate, {"inputs": torch.tensor([[5, 6]]), "max_new_tokens": 1}),
    ]
    unnamed: list[str] = []
    for call, usual in calls:
        for name, parameter in signature(call).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            for value in (b"5", object(), {1}, "5" if name in ("context", "batch") else 1.5j):
                with pytest.raises((TypeError, ValueError)) as caught:
                    call(**{**usual, name: value})
                if not re.search(SAID.get(name, name), str(caught.value)):
                    unnamed.append(f"{call.__name__}({name}={value!r}): {caught.value}")
    assert not unnamed


@pytest.mark.parametrize(
    ("model", "policy", "context", "block_length", "answer", "message"),
    [
        ("embedded", "none", 4097, 32, 32, "4097 positions; the model was made for 4096"),
        ("embedded", "none", 64, 7, 8, "max_new_tokens = 8 is not a multiple of block_length = 7; 7 or 14 would be"),
        ("embedded-uniform", "dkv_greedy", 64, 32, 32, "must know them before.*'embedded-uniform' has uniform"),
        ("embedded-uniform", "elastic_cache", 64, 32, 32, "looks at 16 rows of a block in a step, but any of its 32"),
        ("embedded-uniform", "none", 64, 32, 32, "masks prompts, which 'embedded-uniform' would treat as final text"),
    ],
)
def test_a_plan_refuses_what_generate_refuses(
    model: str, policy: str, context: int, block_length: int, answer: int, message: str
):
    cfg = "masks prompts" in message
    with pytest.raises(ValueError, match=message):
        plan(model, policy=policy, context=context, block_length=block_length, max_new_tokens=answer, cfg=cfg)
    runtime = tiered.from_pretrained(model, policy=policy, device="cpu")
    ids = torch.zeros(1, context - answer, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        runtime.generate(ids, block_length=block_length, max_new_tokens=answer, cfg_scale=float(cfg))


def test_a_block_is_as_long_as_that_of_generate():
    sizes: list[dict[str, Any]] = [{"context": 64}, {"context": 64, "max_new_tokens": 8}, {"context": 10}]
    assert [plan("embedded", **size).sizes.block_length for size in sizes] == [32, 8, 10]


class NoTensor(TorchDispatchMode):
    """Fails at any operation on tensors, those that make them included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a tensor is made or read: {func}")


@pytest.mark.parametrize("policy", [name for name in policies_for("canvas") if name != "auto"])  # which rehearses calls
def test_a_plan_allocates_no_tensor(policy: str, capsys: pytest.CaptureFixture[str]):
    with NoTensor():
        with pytest.raises(AssertionError, match="aten"):
            torch.empty(1)
        arguments = [
            "--policy",
            policy,
            "--context",
            "4096",
            "--memory",
            "17GiB",
            "--host-memory",
            "2GiB",
            "--weights",
            "raw",
        ]
        assert main(["plan", "llada-8b", *arguments]) == 0
    assert "LLaDA, 8.02B parameters" in capsys.readouterr().out
