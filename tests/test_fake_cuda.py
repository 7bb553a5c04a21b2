"""Calls on a fake CUDA device (`fake_cuda`) answer as on the CPU. No operation mixes devices, the books cover every
byte on the device, and the host waits no more often than it has to."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import block_models
import pytest
import torch
import torch.nn.functional as F
from fake_cuda import DEVICE, FakeCuda, Inside, fake_cuda
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.core.spans import recording
from tiered.forward.library_bytes import gpu_of
from tiered.forward.together import shared_bytes
from tiered.forward.weight_bytes import WeightBytes
from tiered.kernels.choice import for_device
from tiered.kernels.gate_mul_ref import gate_mul
from tiered.kernels.host_values import on_device
from tiered.kernels.rms_norm_ref import rms_norm
from tiered.planning.call_bytes import CallBytes
from tiered.policies.registry import POLICIES, make_policy, policies_for
from tiered.prepare import PreparedCall
from tiered.runtime import Runtime
from tiered.serving.scheduler import Scheduler

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
LAYERS = 4
TOKENS = {"vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125, "torch_dtype": "float32"}
OFFICIAL = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2,
        "mlp_hidden_size": 48, "max_sequence_length": 256,
    } | TOKENS,
    "gidd": {"model_type": "gidd", **OFFICIAL, "max_position_embeddings": 256, "noise_type": 10.0} | TOKENS,
    "sdar": block_models.SDAR | {"num_hidden_layers": LAYERS, "torch_dtype": "float32"},
}  # fmt: skip
LENGTHS = (21, 13)
SIZES: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "polestar": {"clusters": 4, "top_m": 2, "update_threshold": 2},
    "elastic_cache": {"window": 6},
    "attended": {"attended_rows": 8},
}
RULES: dict[str, dict[str, Any]] = {
    "": {"steps": 6},
    "random": {"remasking": "random", "seed": 3, "steps": 6},
    "threshold": {"confidence_threshold": 0.3},
    "sampled": {"steps": 6, "temperature": 0.8, "top_p": 0.9, "seed": 5},
    "guided": {"steps": 6, "cfg_scale": 0.7},
    "adaptive": {"tokens_per_step": 2, "block_steps": 4, "seed": 3},
    "ancestral": {"commit": "ancestral", "block_steps": 4, "seed": 5},
}
# Waits outside of layers for each forward, and inside for each layer of one, at most: these numbers only fall. The
# first ones include waits at the begin and end of a call.
WAITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(policies_for("canvas"), (1.33, 0.0)),
    "dkv_decode": (2.17, 0.0),
    "dkv_greedy": (1.83, 0.0),
    "dkv_pd": (2.17, 0.0),
    "elastic_cache": (2.5, 0.0),
    "polestar": (2.0, 0.5),
}


class Case(NamedTuple):
    """`kv`, `weights`: their codes. `streamed`: the device has the least that a call runs under. `served`: a scheduler
    runs each prompt by itself, instead of one batch."""

    policy: str
    kv: str = "raw"
    weights: str = "raw"
    streamed: bool = False
    served: bool = False
    rule: str = ""
    family: str = "llada"

    def __str__(self) -> str:
        how = ["streamed"] * self.streamed + ["served"] * self.served
        return " ".join(filter(None, [self.family, self.policy, self.kv, self.weights, *how, self.rule]))


CASES = [
    *(
        Case(policy, rule="random" if make_policy(policy).needs_order() else "")
        for policy in POLICIES
        if policy not in ("auto", "block_causal")
    ),
    Case("none", weights="int8", streamed=True, rule="sampled"),
    Case("fast_dllm_prefix", "fp8", streamed=True),
    Case("fast_dllm_dual", "nvfp4", "nvfp4+head", streamed=True, served=True),
    Case("dkv_decode", weights="fp8", streamed=True),
    Case("dkv_greedy", "fp8", "int4", streamed=True, rule="random"),
    Case("dkv_prefill", "nvfp4", "int8", streamed=True, rule="guided"),
    Case("dkv_pd", streamed=True),
    Case("dllm_cache", "fp8", "nvfp4", streamed=True, served=True),
    Case("uniform", "nvfp4", "fp8", streamed=True),
    Case("elastic_cache", weights="int4", streamed=True),
    Case("polestar", "fp8", "int8", streamed=True, rule="threshold"),
    Case("none", "nvfp4", served=True, rule="threshold"),
    Case("dkv_pd", "fp8", "int4+head", served=True),
    Case("elastic_cache", served=True),
    Case("polestar", "nvfp4", served=True, streamed=True),
    Case("none", rule="adaptive", family="gidd"),
    Case("fast_dllm_prefix", "fp8", "int8", streamed=True, served=True, rule="adaptive", family="gidd"),
    Case("polestar", rule="ancestral", family="gidd"),
    Case("block_causal", family="sdar"),
    Case("block_causal", "fp8", "int8", streamed=True, rule="threshold", family="sdar"),
    Case("block_causal", "raw", "fp8", served=True, family="sdar"),
]


@pytest.fixture(scope="module")
def checkpoint(random_checkpoint: Callable[[Mapping[str, Any]], Path]) -> Callable[[str], Path]:
    """The checkpoint of a family."""
    return cache(lambda family: random_checkpoint(FAMILIES[family]))


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake


def load(case: Case, directory: Path, device: str, memory: MemoryBudget | None = None) -> Runtime:
    return tiered.from_pretrained(
        directory, policy=case.policy, kv=case.kv, weights=case.weights, device=device, memory=memory,
        **OPTIONS.get(case.policy, {}),
    )  # fmt: skip


def asked(runtime: Runtime, case: Case) -> list[PreparedCall]:
    if case.served:
        return [runtime.prepare(row[None], **RULES[case.rule], **SIZES) for row in block_models.prompts(LENGTHS)]
    ids, mask = block_models.batch(LENGTHS, left=True)
    return [runtime.prepare(ids, attention_mask=mask, **RULES[case.rule], **SIZES)]


def least(runtime: Runtime, case: Case) -> MemoryBudget:
    """Device memory for the largest of the calls."""
    needed = 0
    for call in asked(runtime, case):
        sizes = replace(call.sizes, gpu=gpu_of(DEVICE))
        weights = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights)
        bytes_ = CallBytes.of(runtime.policy, sizes, MemoryBudget(device=0), weights=weights)
        needed = max(needed, bytes_.total(Tier.DEVICE) + shared_bytes(sizes))
    return MemoryBudget(device=needed)


def answers(runtime: Runtime, case: Case) -> tuple[list[list[int]], int]:
    """Tokens, and forwards."""
    if not case.served:
        ids, mask = block_models.batch(LENGTHS, left=True)
        found = [runtime.generate(ids, attention_mask=mask, **RULES[case.rule], **SIZES)]
    else:
        scheduler = Scheduler(runtime)
        requests = [scheduler.submit(call) for call in asked(runtime, case)]
        scheduler.run()
        for request in requests:
            if request.error is not None:
                raise request.error
        found = [request.output for request in requests if request.output is not None]
    tokens = [row for out in found for row in out.sequences[:, -SIZES["max_new_tokens"] :].tolist()]
    return tokens, sum(out.num_forwards for out in found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls(case: Case, checkpoint: Callable[[str], Path], device: FakeCuda):
    on_cpu = load(case, checkpoint(case.family), "cpu")
    expected, _ = answers(on_cpu, case)
    runtime = load(case, checkpoint(case.family), str(DEVICE), least(on_cpu, case) if case.streamed else None)
    device.waits.clear()
    device.books, device.peak = runtime.ledger, device.live
    with recording(Inside()):
        found, forwards = answers(runtime, case)
    assert found == expected
    assert not device.strangers
    books = runtime.ledger.report().tiers[Tier.DEVICE]
    above, line = device.over
    if case.served:  # a request that is over is off the books before its round ends, with which its memory goes
        above = device.peak - books.peak + books.at_peak.get(Account.LIBRARIES, 0)
    # For codes the books have a chunk of the reference, which does not run; and requests peak one after the other.
    assert -books.peak * (0.2 if case.kv == "raw" and not case.served else 0.6) <= above <= 0, line
    inside = Counter({wait: count for wait, count in device.waits.items() if wait[2]})
    outside = device.waits - inside
    if not (case.streamed or case.served) and case.family == "llada":
        most = WAITS[case.policy]
        assert outside.total() / forwards <= most[0] + 0.005, outside
        assert inside.total() / forwards / LAYERS <= most[1] + 0.005, inside


def test_logits_are_of_ids_from_the_host(checkpoint: Callable[[str], Path], device: FakeCuda):
    case, (ids, mask) = Case("none"), block_models.batch(LENGTHS, left=True)
    expected, found = (load(case, checkpoint(case.family), at).logits(ids, mask) for at in ("cpu", str(DEVICE)))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["fast_dllm_dual", "elastic_cache", "polestar"])
def test_a_call_leaves_nothing_on_the_device(policy: str, checkpoint: Callable[[str], Path], device: FakeCuda):
    """Its memory is free when it is off the books, and not when Python next looks for cycles."""
    case = Case(policy)
    runtime = load(case, checkpoint(case.family), str(DEVICE))
    answers(runtime, case)
    gc.collect()
    before = device.live
    gc.disable()
    try:
        answers(runtime, case)
        assert device.live == before
    finally:
        gc.enable()


def test_the_schedulers_thread_alone_touches_the_device(checkpoint: Callable[[str], Path], device: FakeCuda):
    case = Case("dkv_pd")
    runtime = load(case, checkpoint(case.family), str(DEVICE))
    with Scheduler(runtime) as scheduler:
        assert scheduler._thread is not None
        device.owner = scheduler._thread.ident
        device.strangers.clear()
        requests = [scheduler.submit(runtime.prepare(row[None], **SIZES)) for row in block_models.prompts(LENGTHS)]
        while not all(request.over for request in requests):
            time.sleep(0.01)
    assert all(request.output is not None for request in requests)
    assert not device.strangers


OF_HOST = torch.ones(4)


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda there: there + 1, []),
        (lambda there: there * torch.tensor(2.0), []),
        (lambda there: there + OF_HOST, None),
        (lambda there: F.linear(there, OF_HOST[None]), None),
        (lambda there: there.tolist(), ["tolist"]),
        (lambda there: bool(there[0] > 0), ["_local_scalar_dense"]),
        (lambda there: there.nonzero(), ["nonzero"]),
        (lambda there: there[there > 0], ["index"]),
        (lambda there: there[[0, 2]], ["copy"]),
        (lambda there: there.new_tensor(1.0), ["copy"]),
        (lambda there: torch.tensor([1, 2], device=DEVICE), ["copy"]),
        (lambda there: there.cpu(), ["copy"]),
        (lambda there: there.to(DEVICE), []),
        (lambda there: there.copy_(OF_HOST), ["copy"]),
        (lambda there: there.copy_(OF_HOST, non_blocking=True), ["copy"]),
        (lambda there: there.copy_(OF_HOST.pin_memory(), non_blocking=True), []),
        (lambda there: on_device([1, 2], DEVICE), []),
        (lambda there: for_device(gate_mul, DEVICE)(there, there), []),
        (lambda there: for_device(rms_norm, DEVICE)(there[None, None], OF_HOST, 1e-6), None),
    ],
)
def test_the_device_sees(run: Callable[[Tensor], object], waits: list[str] | None, device: FakeCuda):
    """`waits`: the waits of the host. It is None if `run` mixes devices."""
    there = torch.ones(4, device=DEVICE)
    mixed = pytest.raises(RuntimeError, match=r"same device|cannot be accessed")
    with mixed if waits is None else nullcontext():
        run(there)
    assert [what for what, *_ in device.waits.elements()] == (waits or [])
    del there
    assert device.live == 0 or waits is None  # the error has the frames
