"""Coded keys and values: they are the same in every tier, fewer bytes move, and answers depend on the codec alone."""

from typing import Any

import pytest
import torch
from training import tasks

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.byte_size import format_bytes
from tiered.core.features import Account, Feature, Tier
from tiered.decoding.observers import Inspector
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import RowCode
from tiered.policies.registry import make_policy

LONG: dict[str, Any] = {"context": 4096, "policy": "fast_dllm_dual"}
CALL: dict[str, Any] = {"max_new_tokens": 32, "block_length": 16, "confidence_threshold": 0.9}


def test_a_plan_counts_coded_rows_by_the_bytes_of_their_codes():
    names, elements = ("raw", "fp8", "nvfp4"), 4096 * 32 * 4096
    free = [tiered.plan("llada-8b", kv=kv, **LONG) for kv in names]
    by_element = {plan.sizes.kv: plan.tiers[Tier.DEVICE].accounts[Account.KEY] / elements for plan in free}
    assert by_element == {None: 2.0, RowCode.FP8: 1 + 4 / 128, RowCode.NVFP4: 0.5 + 1 / 16 + 4 / 128}
    raw, fp8, nvfp4 = (tiered.plan("llada-8b", kv=kv, memory="16.5GiB", **LONG) for kv in names)
    assert raw.streams is not None and fp8.streams is None and nvfp4.streams is None
    assert "keys and values fp8" in str(fp8) and fp8.as_dict()["kv"] == "fp8" and raw.as_dict()["kv"] == "raw"


@pytest.mark.parametrize("kv", ["fp8", "nvfp4"])
@pytest.mark.parametrize("policy", ["none", "fast_dllm_dual", "dkv_pd", "dllm_cache", "elastic_cache", "polestar"])
def test_rows_of_a_layer_are_values_of_the_codec(policy: str, kv: str):
    """Every row that was written, of keys and of values."""
    runtime = tiered.from_pretrained("embedded", policy=policy, device="cpu", kv=kv)
    seen = []

    class Looks(Inspector):
        def after_forward(self, step: Any, kind: Any, ids: Any, forward: Any, active: Any) -> None:
            for feature in (Feature.KEY, Feature.VALUE):
                kept = forward.store.view(feature, runtime.model.shape.layers - 1)
                again = CodedRows.of(kept.nan_to_num(), RowCode(kv)).values()
                seen.append(bool(((kept == again) | kept.isnan()).all()))  # NaN: not written yet

    runtime.generate("copy: ab cd", inspector=Looks(), **CALL)
    assert seen and all(seen)


@pytest.mark.parametrize("policy", ["fast_dllm_dual", "polestar"])
def test_a_budget_changes_no_answer(policy: str):
    examples = [tasks.sample("lookup", "test", number, size=200).prompt for number in range(2)]
    free = tiered.from_pretrained("embedded", policy=policy, device="cpu", kv="fp8")
    call: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8}
    out = free.generate(examples, **call)
    held = out.memory.tiers[Tier.DEVICE]
    least = held.required - held.at_peak[Account.KEY] // 2
    tight = tiered.from_pretrained("embedded", policy=policy, device="cpu", kv="fp8", memory=MemoryBudget(device=least))
    again = tight.generate(examples, **call)
    assert torch.equal(out.sequences, again.sequences)
    assert again.memory.moved["host->device"] > out.memory.moved.get("host->device", 0)


def test_a_plan_warns_of_bytes_that_a_code_would_save():
    asked: dict[str, Any] = {"context": 32768, "policy": "fast_dllm_dual", "rope_scaling": "ntk:8", "memory": "24GiB"}
    plan = tiered.plan("llada-8b", **asked)
    assert plan.sizes.kv is None and plan.streams is not None
    (found,) = [warning for warning in plan.warnings if "kv =" in warning]
    coded = tiered.plan("llada-8b", kv="fp8", **asked)
    moved = [format_bytes(0 if each.streams is None else each.streams.moved) for each in (plan, coded)]
    assert found.startswith(f"{moved[0]} come to the device in every step")
    assert found.endswith(f"; kv = 'fp8' would bring {moved[1]}, and changes answers")
    assert not any("kv =" in warning for warning in coded.warnings)
    del asked["memory"]
    assert not any("kv =" in warning for warning in tiered.plan("llada-8b", **asked).warnings)


@pytest.mark.parametrize(
    ("kv", "message"),
    [("int4", "unknown kv 'int4'"), ("auto", "unknown kv 'auto'"), ("nvfp", "unknown kv 'nvfp'; did you mean 'nvfp4'")],
)
def test_other_codecs_are_refused_by_name(kv: str, message: str):
    for ask in (lambda: tiered.plan("embedded", context=64, kv=kv), lambda: tiered.from_pretrained("embedded", kv=kv)):
        with pytest.raises(ValueError, match=message):
            ask()


def test_every_policy_refreshed_at_every_step_answers_as_without_a_cache():
    """The codec changes all keys and values alike."""
    prompt = "sort: Nora Ben Ivan Cleo"
    none = tiered.from_pretrained("embedded", policy="none", device="cpu", kv="fp8").generate(prompt, **CALL)
    for name, options in (
        ("fast_dllm_dual", {"refresh_interval": 1}),
        ("dkv_decode", {"refresh_interval": 1}),
        ("polestar", {"codec": "raw", "top_m": 1000, "update_threshold": 0}),
    ):
        made = make_policy(name, **options)
        out = tiered.from_pretrained("embedded", policy=made, device="cpu", kv="fp8").generate(prompt, **CALL)
        assert torch.equal(out.sequences, none.sequences), name
