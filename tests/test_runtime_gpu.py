"""Whole calls on a CUDA device, and the same bodies on the CPU, where they are proved.

In float32 without TF32 a device adds in another order than the CPU, so bits differ. Tokens do not, for prompts like
these: they stay the same when every weight moves by a few parts in a million. On one device, bits are compared if only
tiers and copies differ, and tokens if shapes do.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from allocations import Allocations
from cached_rows import Stores
from gpu_parts.slow_transports import random_delays, transport
from host_waits import host_waits
from polestar_variants import variant
from torch import Tensor
from training.tasks import sample, score

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.spans import Recorder, recording
from tiered.forward import stream_bytes
from tiered.forward.sizes import CallShape
from tiered.models.base import DiffusionModel
from tiered.offload.codec_bytes import Codec
from tiered.offload.transport import Transport
from tiered.output import GenerationOutput
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Two tokens a step, and an update behind more than two: refresh, step, update, step in either block.
SIZES: dict[str, Any] = {
    "max_new_tokens": 16, "block_length": 8, "steps": 8, "stop_at_eos": False, "output_history": True
}  # fmt: skip
UPDATES: dict[str, Any] = {"clusters": 6, "top_m": 2, "update_threshold": 2}
OFTEN = UPDATES | {"update_threshold": 1, "cluster_layers": 2}
POLICIES: dict[str, dict[str, Any]] = {
    "polestar delta": {**UPDATES, "refresh": "drift"},
    "polestar raw": {**UPDATES, "codec": "raw"},
    "fast_dllm_dual": {},
    "none": {},
}
REFRESHED: dict[str, dict[str, Any]] = {
    "fast_dllm_prefix": {"refresh_interval": 1},
    "dllm_cache": {"prompt_interval": 1, "response_interval": 1},
    "elastic_cache": {"refresh_interval": 1},
    "uniform": {"refresh_interval": 1},
    "polestar": {"codec": "raw", "top_m": 1000, "update_threshold": 0},
}
REWRITING: dict[str, Any] = {"commit": "adaptive", "tokens_per_step": 2, "block_steps": 6, "steps": None, "seed": 3}
ROUNDING = 1 << 18  # CUDA's allocator rounds every tensor up to 512 bytes; some hundred are alive at a time
READS = ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def on_each_device(cases: Iterable[Any]) -> list[Any]:
    """(device, case): all on a GPU; on the CPU, where other tests have the rest, the first, and all in the long run."""
    cases = [*cases]
    on_the_cpu = [
        pytest.param("cpu", case, marks=[pytest.mark.long] if number else []) for number, case in enumerate(cases)
    ]
    return on_the_cpu + [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in cases]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_bytes, "FEWEST_CHUNK_ROWS", 32)


@cache
def loaded(name: str, device: str) -> Runtime:
    return tiered.from_pretrained(name, dtype="float32", device=device, policy="none")


@cache
def prompts() -> dict[str, tuple[Tensor, list[int]]]:
    """Two lookups of different lengths as they are padded on each side; and the lengths."""
    tokenizer = loaded("embedded", "cpu").tokenizer
    assert tokenizer is not None
    chats = [[{"role": "user", "content": example.prompt}] for example in examples()]
    each = [
        torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        for chat in chats
    ]
    longest = max(map(len, each))
    sides = {}
    for side in ("left", "right"):
        ids, mask = torch.zeros(len(each), longest, dtype=torch.long), torch.zeros(len(each), longest, dtype=torch.long)
        for row, one in enumerate(each):
            at = slice(longest - len(one), None) if side == "left" else slice(0, len(one))
            ids[row, at], mask[row, at] = one, 1
        sides[side] = torch.stack([ids, mask])
    return {side: (both, [len(one) for one in each]) for side, both in sides.items()}


def examples():
    return [sample("lookup", "test", seed, size=size, asked=2) for seed, size in ((0, 84), (1, 66))]


def answer(runtime: Runtime, side: str = "left", **options: Any) -> GenerationOutput:
    ids, mask = prompts()[side][0]
    return runtime.generate(ids, attention_mask=mask, **{**SIZES, **options})


def history(out: GenerationOutput) -> Tensor:
    assert out.history is not None
    return torch.stack([state.cpu() for state in out.history])


def under(policy: str, device: str, **changes: Any) -> Runtime:
    return loaded("embedded", device).with_policy(policy.split()[0], **{**POLICIES.get(policy, {}), **changes})


@cache
def on_the_cpu(policy: str) -> GenerationOutput:
    return answer(under(policy, "cpu"))


@pytest.mark.parametrize(("device", "policy"), on_each_device(POLICIES))
def test_tokens_are_those_of_the_cpu_and_right(device: str, policy: str):
    out = answer(under(policy, device))
    assert torch.equal(history(out), history(on_the_cpu(policy)))
    assert out.steps_by_kind == on_the_cpu(policy).steps_by_kind and (
        policy.startswith("polestar") == ("update" in out.steps_by_kind)
    )
    assert out.sequences.device.type == device
    tokenizer = loaded("embedded", "cpu").tokenizer
    assert tokenizer is not None
    for row, example in zip(out.sequences[:, -16:].tolist(), examples(), strict=True):
        kept = row[: row.index(tokenizer.eos_token_id)]
        assert score(example, tokenizer.batch_decode([kept], skip_special_tokens=True)[0])


@pytest.mark.parametrize(("device", "policy"), on_each_device(REFRESHED))
def test_refreshing_every_step_equals_none(device: str, policy: str):
    fresh = answer(loaded("embedded", device).with_policy(policy, **REFRESHED[policy]))
    assert torch.equal(history(fresh), history(answer(under("none", device))))


def test_renewing_every_cluster_equals_none(device: str):
    everything = answer(under("polestar", device, clusters=6, codec="raw", top_m=1000, update_threshold=0))
    assert everything.steps_by_kind["update"] == 6
    assert torch.equal(history(everything), history(answer(under("none", device))))


def left_by(runtime: Runtime) -> tuple[GenerationOutput, Tensor]:
    stores = Stores()
    out = answer(runtime, inspector=stores)
    return out, torch.stack(stores.left).view(torch.int32)


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize(("device", "codec"), on_each_device([Codec.NVFP4_DELTA, Codec.RAW]))
def test_tiers_and_delays_of_rows_change_no_bit(device: str, codec: Codec):
    model, policy = loaded("embedded", device).model, partial(variant, **OFTEN, codec=codec)
    out, resident = left_by(Runtime(model, policy=policy("device")))
    ways: dict[str, Callable[[], Transport] | None] = {
        "on time": None,
        "late": lambda: transport(torch.device(device), delay=random_delays(torch.device(device), 1)),
    }
    for way, make in ways.items():
        offloaded, stores = left_by(Runtime(model, policy=policy(), transport=make))
        assert torch.equal(stores, resident), way
        assert torch.equal(history(offloaded), history(out))
        assert offloaded.tiers is not None and set(offloaded.tiers.asked) == {Tier.HOST}
        assert offloaded.memory.moved["host->device"] > 0
    assert out.tiers is not None and set(out.tiers.asked) == {Tier.DEVICE}


def bytes_of(model: DiffusionModel, policy: Policy, budget: MemoryBudget) -> CallBytes:
    length = prompts()["left"][0].shape[-1] + SIZES["max_new_tokens"]
    sizes = CallShape(
        shape=model.shape, batch=2, context=length, block_length=SIZES["block_length"], dtype="float32",
        answer=SIZES["max_new_tokens"],
    )  # fmt: skip
    return CallBytes.of(policy, sizes, budget)


@pytest.mark.parametrize(("device", "policy"), on_each_device(["polestar delta", "fast_dllm_dual", "dllm_cache"]))
def test_a_budget_holds_and_changes_no_bit(device: str, policy: str, small_chunks: None):
    model, made = loaded("embedded", device).model, make_policy(policy.split()[0], **POLICIES.get(policy, {}))
    resident = answer(Runtime(model, policy=made))
    cap = resident.memory.peak_device_bytes - 65536
    ledger = Ledger(MemoryBudget(device=cap))
    runtime = Runtime(model, policy=made, ledger=ledger)
    assert torch.equal(history(answer(runtime)), history(resident))  # and so kernels and workspaces are there
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with Allocations() if device == "cpu" else torch.no_grad() as allocations:
        out = answer(runtime)
    ledger.check_integrity()
    assert {account for tier in Tier for account in ledger.accounts(tier)} <= {Account.SPARE}
    assert torch.equal(history(out), history(resident))
    assert out.memory.peak_device_bytes <= cap and out.memory.moved["host->device"] > 0
    if allocations is None:
        assert out.memory.allocator_peak is not None
        assert out.memory.allocator_peak - before <= out.memory.peak_device_bytes + ROUNDING
    else:  # where both tiers are ordinary memory
        assert allocations.peak <= out.memory.peak_device_bytes + out.memory.peak_host_bytes


@pytest.mark.parametrize(("device", "policy"), on_each_device(["polestar delta", "none", "polestar raw"]))
def test_a_padded_batch_answers_as_each_alone(device: str, policy: str):
    runtime = under(policy, device, **({"refresh": "full"} if "delta" in policy else {}))
    (ids, mask), _ = prompts()["left"]
    each = [one[here.bool()][None] for one, here in zip(ids, mask, strict=True)]
    alone = [runtime.generate(one, **SIZES).sequences[0, -16:] for one in each]
    for side in ("left", "right"):
        assert torch.equal(answer(runtime, side).sequences[:, -16:], torch.stack(alone)), side


@pytest.mark.usefixtures("few_slots")
def test_uniform_noise_with_capped_attention(device: str):
    runtime = loaded("embedded-uniform", device)
    exact = answer(runtime, **REWRITING)
    expected = answer(loaded("embedded-uniform", "cpu"), **REWRITING)
    assert torch.equal(history(exact), history(expected))
    everything = {"clusters": 6, "codec": "raw", "top_m": 1000, "update_threshold": 0}
    renewed = answer(runtime.with_policy("polestar", **everything), **REWRITING)
    assert renewed.steps_by_kind["update"] > 3 and torch.equal(history(renewed), history(exact))
    often: dict[str, Any] = UPDATES | {"cluster_layers": 1}
    host, resident = (answer(runtime.with_policy(variant(tier, **often)), **REWRITING) for tier in ("host", "device"))
    assert torch.equal(history(host), history(resident)) and host.memory.moved["host->device"] > 0


@contextmanager
def reads(at: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """No call waits on a CPU: count the calls that would."""
    found: Counter[str] = Counter()

    def noted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            found[at()] += 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in READS:
            patched.setattr(Tensor, name, noted(getattr(Tensor, name)))
        yield found


@pytest.mark.parametrize(("device", "policy"), on_each_device(["polestar delta", "fast_dllm_dual", "polestar raw"]))
def test_no_wait_inside_the_layers_of_a_plain_step(device: str, policy: str, monkeypatch: pytest.MonkeyPatch):
    runtime, recorder = under(policy, device), Recorder()
    answer(runtime, output_history=False)

    def at() -> str:
        now = recorder.innermost
        inside = "layers" if now is not None and now.layer is not None else "elsewhere"
        return f"{inside} of {'nothing' if now is None else recorder.kinds[-1]}"

    found: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    with recording(recorder):
        if device == "cpu":
            with reads(at, monkeypatch) as found:
                answer(runtime, output_history=False)
        else:
            with host_waits(at) as waits:
                answer(runtime, output_history=False)
            for wait, count in waits.items():
                found[wait.at] += count
                lines[f"{wait.at}: {wait.line}"] += count
    assert recorder.kinds.count("step") >= 4
    assert not found["layers of step"], lines
    # The counter does see something: a commit is read, and so is the drift of an update.
    assert found["elsewhere of step"] > 0
    assert (found["layers of update"] > 0) == policy.startswith("polestar")
