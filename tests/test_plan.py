"""A plan counts what the runtime books, finds the largest context, and gives advice that works when it is followed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiered
from tiered.budget import MemoryBudget
from tiered.byte_size import parse_bytes
from tiered.errors import TierCapacityError
from tiered.features import Account, Tier
from tiered.models.presets import PRESETS
from tiered.planning.card import format_count
from tiered.planning.costs import call_bytes, weight_bytes
from tiered.planning.plan import Plan, plan
from tiered.policies.fast_dllm import FastDLLMDual
from tiered.policies.registry import POLICIES

ROOT = Path(__file__).parents[1]
GIB = 2**30
NOTHING = Tier.HOST, Tier.DISK


def device_bytes(made: Plan) -> int:
    return made.tiers[Tier.DEVICE].total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampled", [False, True])
def test_the_device_holds_weights_and_what_a_call_books(policy: str, sampled: bool):
    made = plan("llada-8b", context=4096, batch=2, policy=policy, cfg=True, block_length=64, sampled=sampled)
    features = POLICIES[policy]().features(made.shape)
    booked = call_bytes(made.shape, features, batch=4, context=4096, block_length=64, dtype="bfloat16", sampled=sampled)
    assert made.tiers[Tier.DEVICE].accounts == {Account.WEIGHTS: weight_bytes(made.shape, "bfloat16"), **booked}
    assert device_bytes(made) == weight_bytes(made.shape, "bfloat16") + sum(booked.values())
    assert all(made.tiers[tier].total == 0 for tier in NOTHING)


def test_a_plan_is_what_a_run_reserves():
    runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual", device="cpu")
    out = runtime.generate("copy: Ada Ben", max_new_tokens=32, block_length=16)
    made = plan("embedded", context=out.sequences.shape[1], block_length=16)
    assert out.memory.tiers[Tier.DEVICE].peak == device_bytes(made)


def test_key_and_value_weigh_what_a_token_costs():
    made = plan("dream-7b", context=1000, batch=3, cfg=True)
    accounts = made.tiers[Tier.DEVICE].accounts
    assert accounts[Account.KEY] + accounts[Account.VALUE] == 6 * 1000 * made.kv_bytes_per_token
    assert made.kv_bytes_per_token == 56 * 1024


@pytest.mark.parametrize("dtype", ["float32", "torch.float32"])
def test_dtype(dtype: str):
    assert plan("llada-8b", context=64, dtype=dtype).tiers[Tier.DEVICE].accounts[Account.WEIGHTS] == 4 * 8_015_581_184


def test_a_policy_comes_by_name_or_as_an_object():
    by_name = plan("llada-8b", context=64, policy="fast_dllm_dual", refresh_interval=4)
    assert by_name == plan("llada-8b", context=64, policy=FastDLLMDual(refresh_interval=4))
    assert by_name.policy_options == {"refresh_interval": 4}


# ---- what fits ----


@given(
    st.sampled_from([*PRESETS, "embedded"]),
    st.integers(1, 20_000),
    st.integers(1, 8),
    st.sampled_from([1, 7, 32, 128]),
    st.integers(1, 200),
    st.sampled_from(list(POLICIES)),
)
def test_the_largest_context_fits_and_one_block_more_does_not(
    model: str, context: int, batch: int, block_length: int, percent: int, policy: str
):
    options: dict[str, Any] = {"batch": batch, "block_length": block_length, "policy": policy}
    memory = device_bytes(plan(model, context=context, **options)) * percent // 100
    largest = plan(model, context=context, memory=memory, **options).largest_context
    assert largest is not None and largest % block_length == 0
    if largest:
        assert plan(model, context=largest, memory=memory, **options).fits
    assert not plan(model, context=largest + block_length, memory=memory, **options).fits


def test_a_cap_is_met_to_the_byte():
    needed = device_bytes(plan("llada-8b", context=4096))
    assert plan("llada-8b", context=4096, memory=needed).fits
    assert not plan("llada-8b", context=4096, memory=needed - 1).fits


def test_without_a_cap_everything_fits():
    made = plan("llada-8b", context=10**6, memory=MemoryBudget(host="1GiB"))
    assert made.fits and made.largest_context is None and made.advice == ()
    made.require_fit()


def test_require_fit_says_what_is_needed_and_what_to_do():
    made = plan("llada-8b", context=32768, memory="24GiB")
    with pytest.raises(TierCapacityError) as caught:
        made.require_fit()
    error = caught.value
    assert (error.needed, error.available, error.tier) == (device_bytes(made), 24 * GIB, Tier.DEVICE)
    assert f"lower the context to {made.largest_context}" in error.hint


# ---- advice ----

ADVISED: dict[str, tuple[dict[str, Any], set[tuple[str, ...]]]] = {
    "a context too long": ({"context": 32768, "memory": "24GiB"}, {("context",), ("policy",), ("memory",)}),
    "a batch too large": (
        {"context": 2048, "batch": 16, "memory": "20GiB"},
        {("batch",), ("context",), ("policy",), ("memory",)},
    ),
    "both too large": (
        {"context": 4096, "batch": 64, "memory": "16GiB"},
        {("batch", "context"), ("memory",)},
    ),
    "too wide a dtype": (
        {"context": 1024, "dtype": "float32", "memory": "20GiB"},
        {("dtype",), ("memory",)},
    ),
    "guidance": (
        {"context": 4096, "cfg": True, "memory": "18GiB"},
        {("cfg",), ("context",), ("policy",), ("memory",)},
    ),
    "weights alone too large": ({"context": 1024, "memory": "8GiB"}, {("memory",)}),
}


@pytest.mark.parametrize("case", ADVISED)
def test_advice_names_every_way_out(case: str):
    arguments, expected = ADVISED[case]
    assert {tuple(advice.change) for advice in plan("llada-8b", **arguments).advice} == expected


@pytest.mark.parametrize("case", ADVISED)
def test_advice_works_when_followed(case: str):
    arguments, _ = ADVISED[case]
    for advice in plan("llada-8b", **arguments).advice:
        assert plan("llada-8b", **{**arguments, **advice.change}).fits, advice.text
        assert all(str(value) in advice.text for value in advice.change.values() if value is not False)


def test_advised_sizes_are_the_largest():
    arguments: dict[str, Any] = {"context": 2048, "batch": 16, "memory": "20GiB"}
    sizes = {name: value for advice in plan("llada-8b", **arguments).advice for name, value in advice.change.items()}
    assert not plan("llada-8b", **{**arguments, "batch": sizes["batch"] + 1}).fits
    assert not plan("llada-8b", **{**arguments, "context": sizes["context"] + 32}).fits
    assert parse_bytes(sizes["memory"]) - device_bytes(plan("llada-8b", **arguments)) < 2**20


# ---- if hidden states were kept ----


def test_hidden_states_weigh_what_their_codecs_say():
    hidden = plan("llada-8b", context=4096).hidden
    per_token = {codec.value: size / 4096 / 1024 for codec, size in hidden.codecs.items()}
    assert per_token["raw"] == 256  # KiB: 32 layers of 4096 elements of 2 bytes
    assert per_token["nvfp4"] == pytest.approx(72, rel=1e-4)
    assert per_token["nvfp4_delta"] == pytest.approx(72, rel=2e-3)
    assert hidden.clusters == 64
    assert hidden.centroids == 32 * 64 * 4096 * 2
    assert hidden.staging == 2 * (4 * 64 * (2304 + 2) + 4 * 4)


@pytest.mark.parametrize(("model", "percent"), [("llada-8b", 0.8), ("dream-7b", 5.5)])
def test_centroids_are_small_beside_the_cache(model: str, percent: float):
    made = plan(model, context=8192)
    assert 100 * made.hidden.centroids / (8192 * made.kv_bytes_per_token) == pytest.approx(percent, abs=0.05)


def test_hidden_states_grow_with_the_sequences_and_are_in_no_total():
    one, four = (plan("llada-8b", context=512, batch=batch, cfg=batch > 1).hidden for batch in (1, 2))
    assert {codec: 4 * size for codec, size in one.codecs.items()} == four.codecs
    assert (four.centroids, four.staging) == (4 * one.centroids, 4 * one.staging)
    assert plan("llada-8b", context=32).hidden.clusters == 1


# ---- how it is told ----


def test_the_card():
    made = plan("llada-8b", context=32768, memory="24GiB")
    head, device, context, hidden, remarks = str(made).split("\n\n")
    assert head.splitlines() == [
        "llada-8b",
        "LLaDA, 8.02B parameters, 32 layers, width 4096, 32 heads (32 key/value)",
        "context 32768, batch 1, block 32, bfloat16",
        "policy fast_dllm_dual",
    ]
    assert device.splitlines()[:4] == [
        "device memory",
        "  weights              14.93 GiB      16,031,162,368 B",
        "  key                   8.00 GiB       8,589,934,592 B",
        "  value                 8.00 GiB       8,589,934,592 B",
    ]
    over = (device_bytes(made) - 24 * GIB) / GIB
    assert device.endswith(f"cap                  24.00 GiB      25,769,803,776 B   DOES NOT FIT, {over:.2f} GiB over")
    assert context.splitlines() == [
        "KV per token          512.00 KiB",
        f"largest context     {made.largest_context} tokens   beyond the 4096 that the model was made for",
    ]
    assert hidden.splitlines() == [
        "if the hidden states of the whole context were kept (no part of the totals above)",
        "  raw                   8.00 GiB       8,589,934,592 B   256.00 KiB per token",
        "  fp8                   4.00 GiB       4,299,161,600 B   128.12 KiB per token",
        "  nvfp4                 2.25 GiB       2,415,984,640 B   72.00 KiB per token",
        "  nvfp4_delta           2.25 GiB       2,418,081,792 B   72.06 KiB per token",
        "  centroids           128.00 MiB         134,217,728 B   512 clusters a layer and sequence",
        "  staging ring          1.13 MiB           1,180,704 B   2 slots of 4 nvfp4_delta records",
    ]
    assert remarks.splitlines()[0].startswith("warning: a context of 32768 is beyond the 4096 positions")
    assert f"  - lower the context to {made.largest_context}" in remarks.splitlines()


@pytest.mark.parametrize("model", [*PRESETS, "embedded", str(ROOT / "tiered/embedded/assets")])
@pytest.mark.parametrize("memory", [None, "1GiB", "17GiB", MemoryBudget(device="40TiB", host="1GiB")])
def test_the_card_fits_the_screen(model: str, memory: MemoryBudget | str | None):
    made = plan(model, context=1_000_000, batch=3, memory=memory, cfg=True, sampled=True, refresh_interval=12)
    lines = str(made).splitlines()
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if line != line.rstrip()]
    assert ("DOES NOT FIT" in str(made)) is not made.fits
    assert ("host memory" in str(made)) is isinstance(memory, MemoryBudget)


@pytest.mark.parametrize(
    ("model", "context", "warnings"),
    [
        ("llada-8b", 4096, []),
        ("llada-8b", 4097, ["beyond the 4096 positions"]),
        ("dream-7b", 4096, ["Dream can be planned, but not loaded yet"]),
        ("gidd-unif-3b", 2049, ["beyond the 2048 positions", "GIDD can be planned"]),
    ],
)
def test_warnings(model: str, context: int, warnings: list[str]):
    made = plan(model, context=context)
    assert len(made.warnings) == len(warnings)
    assert all(part in warning for part, warning in zip(warnings, made.warnings, strict=True))
    assert str(made).count("warning: ") == len(warnings)


@pytest.mark.parametrize("memory", [None, "16GiB"])
def test_as_dict_survives_json(memory: str | None):
    made = plan("llada-8b", context=32768, memory=memory)
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
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_sequence_length": 64}
    assert plan({"model_type": "llada", **sizes, **config}, context=64).model == name


@pytest.mark.parametrize(
    ("number", "text"), [(8_015_581_184, "8.02B"), (1_894_464, "1.89M"), (1000, "1.00K"), (999, "999"), (0, "0")]
)
def test_counts(number: int, text: str):
    assert format_count(number) == text


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"context": 0}, ValueError, "context = 0; a positive int"),
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
        ({"refresh_intervall": 2}, ValueError, "did you mean 'refresh_interval'"),
        ({"refresh_interval": 0}, ValueError, "refresh_interval = 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        plan("llada-8b", **{"context": 64, **arguments})


def test_planning_is_imported_without_torch():
    code = "import sys, tiered.planning.plan, tiered.planning.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
