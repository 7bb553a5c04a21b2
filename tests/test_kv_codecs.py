"""Coded keys and values: what is kept is the same wherever it is, less moves, and answers hang on the codec alone."""

from typing import Any

import pytest
import torch

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Feature, Tier
from tiered.decoding.observers import Inspector
from tiered.embedded import tasks
from tiered.forward.sizes import kv_codec
from tiered.offload.codec_bytes import Codec
from tiered.offload.codecs import CODECS
from tiered.policies.registry import make_policy

LONG: dict[str, Any] = {"context": 4096, "policy": "fast_dllm_dual", "memory": "16GiB"}
CALL: dict[str, Any] = {"max_new_tokens": 32, "block_length": 16, "confidence_threshold": 0.9}


def test_what_is_streamed_takes_a_byte_an_element_and_one_a_row():
    raw, fp8, nvfp4 = plans = [tiered.plan("llada-8b", kv=kv, **LONG) for kv in ("raw", "fp8", "nvfp4")]
    by_element = {
        plan.sizes.kv: stream.record_bytes / (stream.layer_bytes / 2)
        for plan in plans
        for stream in ([] if plan.streams is None else plan.streams.streams)
    }
    assert by_element == {Codec.RAW: 2.0, Codec.FP8: 1 + 1 / 128, Codec.NVFP4_ROW: 0.5 + 1 / 16 + 1 / 128}
    assert nvfp4.tiers[Tier.HOST].accounts[Account.KEY] < 0.6 * fp8.tiers[Tier.HOST].accounts[Account.KEY]
    assert fp8.tiers[Tier.HOST].accounts[Account.KEY] < 0.51 * raw.tiers[Tier.HOST].accounts[Account.KEY]
    assert "keys and values fp8" in str(fp8) and fp8.as_dict()["kv"] == "fp8" and raw.as_dict()["kv"] == "raw"


@pytest.mark.parametrize("kv", ["fp8", "nvfp4"])
@pytest.mark.parametrize("policy", ["none", "fast_dllm_dual", "dkv_pd", "dllm_cache", "elastic_cache", "polestar"])
def test_what_a_layer_holds_comes_back_from_the_codec(policy: str, kv: str):
    """Every row that was written, of keys and of values."""
    runtime = tiered.from_pretrained("embedded", policy=policy, device="cpu", kv=kv)
    rounded, seen = CODECS[kv_codec(kv)].rounded, []  # pyright: ignore[reportAttributeAccessIssue]

    class Looks(Inspector):
        def device_bytes(self, *_: Any, **__: Any) -> dict[Account, int]:
            return {}

        def after_forward(self, step: Any, kind: Any, ids: Any, forward: Any, active: Any) -> None:
            for feature in (Feature.KEY, Feature.VALUE):
                kept = forward.store.view(feature, runtime.model.shape.layers - 1)
                seen.append(bool(((kept == rounded(kept)) | kept.isnan()).all()))  # NaN: not written yet

    runtime.generate("copy: ab cd", inspector=Looks(), **CALL)
    assert seen and all(seen)


@pytest.mark.parametrize("policy", ["fast_dllm_dual", "polestar"])
def test_answers_hang_on_no_budget(policy: str):
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


@pytest.mark.parametrize(
    ("kv", "message"), [("int4", "unknown kv 'int4'"), ("nvfp", "unknown kv 'nvfp'; did you mean 'nvfp4'")]
)
def test_other_codecs_are_refused_by_name(kv: str, message: str):
    for ask in (lambda: tiered.plan("embedded", context=64, kv=kv), lambda: tiered.from_pretrained("embedded", kv=kv)):
        with pytest.raises(ValueError, match=message):
            ask()


def test_every_policy_refreshed_at_every_step_answers_as_without_a_cache():
    """Whatever the codec makes of keys and values, it makes of all of them."""
    prompt = "sort: Nora Ben Ivan Cleo"
    none = tiered.from_pretrained("embedded", policy="none", device="cpu", kv="fp8").generate(prompt, **CALL)
    for name, options in (
        ("fast_dllm_dual", {"refresh_interval": 1}),
        ("dkv_decode", {"refresh_interval": 1}),
        ("polestar", {"refresh_interval": 1}),
    ):
        made = make_policy(name, **options)
        out = tiered.from_pretrained("embedded", policy=made, device="cpu", kv="fp8").generate(prompt, **CALL)
        assert torch.equal(out.sequences, none.sequences), name
