"""Weights that the device has no room for: the same answers to the bit, within the budget, whatever copies do."""

import gc
import json
import os
import random
import re
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations
from simulation import Point, SimulatedThreads
from torch import Tensor
from workloads.models import save_random

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.forward.forward import Forward
from tiered.forward.sizes import CallShape
from tiered.forward.streamed_experts import StreamedExperts
from tiered.forward.streamed_weights import StreamedWeights
from tiered.forward.weight_bytes import FEWEST, WeightBytes
from tiered.forward.weight_records import WeightRecords
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.projection import adjoining
from tiered.kernels.row_code import RowCode, WeightCode
from tiered.loading import load_weights
from tiered.models.checkpoint import Checkpoint
from tiered.models.families import family_of
from tiered.models.weight_form import ALIGNED, CODES, RAW_WEIGHTS, WeightForm
from tiered.offload.chunk import Chunk
from tiered.offload.errors import PinError, TransferError
from tiered.offload.lane import Lane
from tiered.offload.size_class import UNIT
from tiered.offload.thread_transport import ThreadTransport
from tiered.output import GenerationOutput
from tiered.planning.call_bytes import CallBytes
from tiered.policies.registry import make_policy, policies_for
from tiered.runtime import Runtime
from tiered.serving.scheduler import Scheduler
from tiered.tiers.host_pool import HostPool
from tiered.tiers.stats import TierStats

LAYERS, PROMPT, CPU = 6, 44, torch.device("cpu")
SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 16, "seed": 0}
TOKENS = {"vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125}
LLAMA = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 160}
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2,
        "mlp_hidden_size": 160, "max_sequence_length": 256,
    },
    "dream": {"model_type": "Dream", **LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 256},
    "gidd": {
        "model_type": "gidd", **LLAMA, "max_position_embeddings": 256, "attention_bias": True, "mlp_bias": True,
        "noise_type": 10.0,
    },
    "llada-moe": {  # the second layer has no mixture, and no record
        "model_type": "lladamoe", **LLAMA, "max_position_embeddings": 256, "dense_intermediate_size": 96,
        "num_experts": 5, "num_experts_per_tok": 2, "expert_intermediate_size": 48,
        "moe_layer_freq": [1, 0, *[1] * (LAYERS - 2)],
        "shared_expert_intermediate_size": 32, "moe_router_enable_expert_bias": True,
    },
    "llada2": {
        "model_type": "llada2_moe", **LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 256, "n_group": 4,
        "topk_group": 2, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
    },
    "sdar-moe": {
        "model_type": "sdar_moe", **LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    },
    "diffusion-gemma": {
        "model_type": "diffusion_gemma", "canvas_length": 16, "text_config": {
            **LLAMA, **TOKENS, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 12,
            "max_position_embeddings": 256, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 48,
        },
    },
}  # fmt: skip
BLOCKS = ("llada2", "sdar-moe", "diffusion-gemma")  # which their rows see
OPTIONS: dict[str, dict[str, Any]] = {"polestar": {"clusters": 5, "top_m": 2, "update_threshold": 0}}
# Policies that must know what a step commits go with no rule that rewrites.
FORMS = ("raw", *CODES, "int4+head")
# Each policy of each family, whose weights have each form in turn.
CASES = [
    (family, policy, FORMS[(number + place) % len(FORMS)])
    for number, family in enumerate(FAMILIES)
    for place, policy in enumerate(policies_for("blocks" if family in BLOCKS else "canvas"))
    if policy != "auto" and not (family == "gidd" and make_policy(policy).needs_order())
]
Delay = Callable[[Point, Lane | None], float]


@pytest.fixture(scope="module")
def checkpoints(random_checkpoint: Callable[[Mapping[str, Any]], Path]) -> Callable[[str], Path]:
    """The checkpoint of a family, in float32."""
    return cache(lambda family: random_checkpoint({**FAMILIES[family], **TOKENS, "torch_dtype": "float32"}))


def loaded(
    directory: Path,
    policy: str = "fast_dllm_dual",
    *,
    form: str = "raw",
    budget: MemoryBudget | None = None,
    delay: Delay | None = None,
    kv: RowCode | None = None,
) -> Runtime:
    config = json.loads((directory / "config.json").read_text())
    family = family_of(config)
    with torch.device("meta"):
        model = family.resolve_loader().from_config(config)
    ledger, checkpoint = Ledger(budget), Checkpoint(directory, model.shape, config)

    def transport() -> ThreadTransport:
        return SimulatedThreads(delay=delay)

    weights = load_weights(
        model, checkpoint, ledger, dtype=torch.float32, device=CPU, form=WeightForm.of(form), transport=transport
    )
    made = make_policy(policy, **OPTIONS.get(policy, {}))
    return Runtime(model, policy=made, ledger=ledger, transport=transport, weights=weights, kv=kv)


def sizes_of(runtime: Runtime) -> CallShape:
    space = runtime._call
    return space.sizes(2, PROMPT + SIZES["max_new_tokens"], SIZES["block_length"], answer=SIZES["max_new_tokens"])


def budget_for(runtime: Runtime, streamed: int, **lower: Any) -> MemoryBudget:
    """With which so many layers of the weights have to be streamed, or more where features are not."""
    sizes = replace(sizes_of(runtime), kv=runtime._call.kv)
    weights = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights)
    call = CallBytes.of(runtime.policy, sizes, MemoryBudget(device=0))
    streaming = replace(call, weights=weights.streaming(streamed))
    return MemoryBudget(device=streaming.total(Tier.DEVICE), **lower)


def answer(runtime: Runtime, *, alone: bool = True, **options: Any) -> GenerationOutput:
    """`alone`: no other thread has a call meanwhile, so that the books of the layers stand still behind it."""
    generator = torch.Generator().manual_seed(4)
    ids, mask = torch.randint(0, 120, (2, PROMPT), generator=generator), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :13] = 0
    if runtime.model.shape.noise == "uniform":
        options = {"tokens_per_step": 4, "block_steps": 3, "seed": 3, **options}
    elif runtime.policy.needs_order():
        options = {"remasking": "random", "seed": 3, "steps": 8, **options}
    else:
        options = {"steps": 8, **options}
    out = runtime.generate(ids, attention_mask=mask, stop_at_eos=False, output_history=True, **{**SIZES, **options})
    weights = runtime._call.weights
    assert weights is not None
    if alone:
        runtime.ledger.check_integrity()
        weights.check_integrity()
    return out


def same(one: GenerationOutput, other: GenerationOutput) -> bool:
    assert one.history is not None and other.history is not None
    return torch.equal(torch.stack(one.history), torch.stack(other.history))


def streamed_layers(runtime: Runtime) -> WeightBytes:
    weights = runtime._call.weights
    assert weights is not None
    return weights.now


def late(seed: int) -> Delay:
    """Copies come late, now and then, in an order of its own."""
    draw = random.Random(seed)
    return lambda point, lane: draw.choice([0, 0, 0.0005]) if point is Point.COPY else 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_projections_of_the_same_rows_adjoin(checkpoints: Callable[[str], Path], family: str, form: str):
    """On the device and in a slot, unless the record aligns the next one behind a gap."""
    runtime = loaded(checkpoints(family), form=form)
    weights = runtime._call.weights
    assert weights is not None
    records, block = weights.records, runtime.model.blocks[1]
    slot = dict(zip(records.names, records.views(torch.zeros(records.record.nbytes, dtype=torch.uint8)), strict=True))
    for names in (("q_proj", "k_proj", "v_proj"), ("ff_proj", "up_proj")):
        resident = [getattr(block, name).weight for name in names]
        aligned = all(weight.nbytes % ALIGNED == 0 for weight in resident[:-1])
        assert aligned or form != "raw"
        assert (adjoining(resident) is not None) is (adjoining([slot[name] for name in names]) is not None) is aligned


@pytest.mark.covering(1)
@pytest.mark.parametrize(("family", "policy", "form"), CASES)
def test_streamed_weights_answer_as_resident_ones(
    checkpoints: Callable[[str], Path], family: str, policy: str, form: str
):
    number = CASES.index((family, policy, form))
    resident = loaded(checkpoints(family), policy, form=form)
    whole = streamed_layers(resident)
    # Blocks that count from each prompt's first token take other columns than the budget is for.
    # A single expert is less than what a call may leave of its budget.
    counts = range(whole.fewest if whole.experts is None else whole.most // 2, whole.most + 1)
    count = counts[0] if family in BLOCKS else counts[number % len(counts)]
    steps: dict[str, Any] = {} if family == "gidd" else {"steps": 4}
    expected = answer(resident, **steps)
    assert expected.weights is None and not streamed_layers(resident).layers
    budget = budget_for(resident, count)
    runtime = loaded(checkpoints(family), policy, form=form, budget=budget, delay=late(number))
    out = answer(runtime, **steps)
    assert same(out, expected)
    now = streamed_layers(runtime)
    assert now.count >= (now.fewest if family in BLOCKS else count)
    assert out.weights is not None and budget.device is not None
    fetched = out.weights.ways[Lane.FETCH].nbytes
    if now.experts is None:  # each forward moves each of them once; the next call's first two may be on their way
        assert 0 <= fetched - out.num_forwards * now.moved() <= 2 * now.record
    else:
        assert fetched and fetched % now.record == 0
    assert out.memory.peak_device_bytes <= int(budget.device)
    runtime.close()
    assert all(runtime.ledger.held(tier) == 0 for tier in Tier)


@pytest.mark.parametrize(
    ("family", "form"), [*(("llada", form) for form in FORMS), ("llada-moe", "raw"), ("llada-moe", "int4")]
)
def test_what_the_host_has_no_room_for_comes_from_disk(
    checkpoints: Callable[[str], Path], family: str, form: str, tmp_path: Path
):
    resident = loaded(checkpoints(family), "none", form=form)
    expected, whole = answer(resident), streamed_layers(resident)
    slot = whole.slot_bytes
    raw = form == "raw"  # of which the checkpoint's own file has the bytes, so that there is no other
    disk = {} if raw else {"disk": (whole.of_records - 2) * slot, "disk_path": tmp_path}
    budget = budget_for(resident, whole.most, host=4 * slot, **disk)
    runtime = loaded(checkpoints(family), "none", form=form, budget=budget)
    out = answer(runtime)
    assert same(out, expected)
    assert streamed_layers(runtime).below == streamed_layers(runtime).streamed - 2 and out.memory.moved["disk->host"]
    assert out.memory.tiers[Tier.HOST].peak <= 4 * slot
    assert (out.memory.tiers[Tier.DISK].peak == 0) == raw


def test_host_memory_that_was_refused_once_is_off_the_books(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The system pins no memory for the first layer that leaves the device. The next call finds the host as it was."""
    resident = loaded(checkpoints("llada"), "none", form="int8")
    expected, whole = answer(resident), streamed_layers(resident)
    slot = whole.slot_bytes
    budget = budget_for(resident, whole.fewest, host=3 * slot, disk=whole.of_records * slot, disk_path=tmp_path)
    runtime = loaded(checkpoints("llada"), "none", form="int8", budget=budget)
    runtime.generate(torch.tensor([[5, 6]]), max_new_tokens=4, block_length=4)
    assert not streamed_layers(runtime).layers
    take, taken = HostPool.take, list[int]()

    def refusing(pool: HostPool, nbytes: int) -> Chunk:
        taken.append(nbytes)
        if len(taken) == 2:  # the first is for the ring
            raise PinError(nbytes, "the system refused")
        return take(pool, nbytes)

    with monkeypatch.context() as once, pytest.raises((PinError, TierCapacityError)):
        once.setattr(HostPool, "take", refusing)
        answer(runtime)
    assert not {*runtime.ledger.accounts(Tier.HOST)} - {Account.SPARE}
    assert same(answer(runtime), expected) and streamed_layers(runtime).layers


@pytest.mark.parametrize("kv", RowCode)
def test_features_and_weights_are_streamed_together(checkpoints: Callable[[str], Path], kv: RowCode | None):
    resident = loaded(checkpoints("llada"), "dkv_decode", kv=kv)
    sizes = replace(sizes_of(resident), kv=kv)
    weights = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights)
    least = CallBytes.of(resident.policy, sizes, MemoryBudget(device=1), weights=weights)
    assert least.streams is not None and least.weights is not None and len(least.weights.layers) == LAYERS
    budget = MemoryBudget(device=least.total(Tier.DEVICE))
    runtime = loaded(checkpoints("llada"), "dkv_decode", kv=kv, budget=budget, delay=late(1))
    assert same(answer(runtime), answer(resident))


@pytest.mark.parametrize("family", ["llada", "llada-moe"])
def test_a_layer_comes_back_where_a_call_leaves_it_room(checkpoints: Callable[[str], Path], family: str):
    resident = loaded(checkpoints(family))
    most = streamed_layers(resident).most
    runtime = loaded(checkpoints(family), budget=budget_for(resident, most))
    small: dict[str, Any] = {"max_new_tokens": 16, "block_length": 16, "steps": 4}
    ids = torch.randint(0, 120, (1, 5), generator=torch.Generator().manual_seed(1))
    expected = resident.generate(ids, **small).sequences, answer(resident)
    for _ in range(2):
        assert same(answer(runtime), expected[1])
        assert streamed_layers(runtime).count == most
        assert torch.equal(runtime.generate(ids, **small).sequences, expected[0])
        assert streamed_layers(runtime).count < most
    assert torch.equal(runtime.logits(ids), resident.logits(ids))


class FormerOwner:
    """Kernels that still write where new memory is: they end when a copy waits for them, and spoil what came before."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._ended = memory, False

    def done(self) -> bool:
        return self._ended

    def synchronize(self) -> None:
        if not self._ended:
            self._memory.fill_(0x55)
        self._ended = True


def test_a_copy_waits_for_those_who_had_its_memory_before(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    owners: list[FormerOwner] = []

    def obtained(device: torch.device) -> Callable[[int], Chunk]:
        def allocate(nbytes: int) -> Chunk:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            owners.append(FormerOwner(memory))
            return Chunk(memory, pinned=False, actual_bytes=nbytes, earlier=(owners[-1],))

        return allocate

    resident = loaded(checkpoints("llada"))
    runtime = loaded(checkpoints("llada"), budget=budget_for(resident, LAYERS))
    ids = torch.randint(0, 120, (1, 5), generator=torch.Generator().manual_seed(1))
    expected = resident.logits(ids)
    for module in ("tiered.forward.weight_records", "tiered.tiers.tiers"):
        monkeypatch.setattr(f"{module}.device_chunks", obtained)
    for _ in range(2):
        answer(runtime, steps=2)
        assert torch.equal(runtime.logits(ids), expected)
        assert len(streamed_layers(runtime).layers) < LAYERS and owners
        for owner in owners:
            owner.synchronize()
        assert torch.equal(runtime.logits(ids), expected)
        owners.clear()


@pytest.mark.parametrize("streamed", [LAYERS - 1, LAYERS])
def test_two_slots_take_turns_so_a_recorded_step_serves_every_other_one(
    streamed: int, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    """Every one, if an even number of layers streams: slots and homes stay in place, as a CUDA graph needs them."""
    runtime = loaded(checkpoints("llada"), budget=budget_for(loaded(checkpoints("llada")), streamed))
    used: list[tuple[int, int, int]] = []
    show = WeightRecords.show

    def shown(records: WeightRecords, layer: int, record: Tensor) -> None:
        weights = runtime._call.weights
        assert isinstance(weights, StreamedWeights) and weights._homes is not None
        memory = weights._homes.residency.home(layer).memory
        assert memory is not None, "it is in host memory"
        if records._shown != layer:
            used.append((layer, record.data_ptr(), memory.data_ptr()))
        show(records, layer, record)

    monkeypatch.setattr(WeightRecords, "show", shown)
    answer(runtime)
    steps = [used[first : first + streamed] for first in range(0, len(used), streamed)]
    turns = 1 + streamed % 2
    assert len(steps) >= 8 and steps[turns:] == steps[:-turns]
    assert (steps[1:] == steps[:-1]) == (turns == 1) and len({slot for _, slot, _ in used}) == 2


def test_loading_and_calls_may_differ_in_their_mode(checkpoints: Callable[[str], Path]):
    resident = loaded(checkpoints("llada"))
    ids = torch.randint(0, 120, (1, 5), generator=torch.Generator().manual_seed(1))
    expected = resident.logits(ids)
    for loading in (True, False):
        with torch.inference_mode(loading):
            runtime = loaded(checkpoints("llada"), budget=budget_for(resident, LAYERS))
        for calling in (True, False):
            with torch.inference_mode(calling):
                answer(runtime, steps=2)
                assert torch.equal(runtime.logits(ids), expected)
                assert len(streamed_layers(runtime).layers) < LAYERS


def test_a_layer_that_is_elsewhere_cannot_be_used(checkpoints: Callable[[str], Path]):
    resident = loaded(checkpoints("llada"))
    runtime = loaded(checkpoints("llada"), budget=budget_for(resident, LAYERS))
    answer(runtime)
    gone = [layer for layer in range(LAYERS) if runtime.model.blocks[layer].q_proj.weight is None]
    assert len(gone) >= LAYERS - 1


@pytest.mark.parametrize("family", ["llada", "llada-moe"])
def test_a_copy_that_fails_is_told_and_the_next_call_answers(checkpoints: Callable[[str], Path], family: str):
    resident = loaded(checkpoints(family))
    failing = iter([False] * 9 + [True])

    def delay(point: Point, lane: Lane | None) -> float:
        if point is Point.COPY and lane is Lane.FETCH and next(failing, False):
            raise OSError("the link is down")
        return 0

    runtime = loaded(checkpoints(family), budget=budget_for(resident, streamed_layers(resident).most), delay=delay)
    with pytest.raises(TransferError, match="link is down"):
        answer(runtime)
    assert same(answer(runtime), answer(resident))


@pytest.mark.parametrize("family", ["llada", "llada-moe"])
def test_a_checkpoint_that_changes_under_the_runtime_is_told(
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    write_checkpoint: Callable[..., Path],
    family: str,
):
    config = {**FAMILIES[family], **TOKENS, "torch_dtype": "float32"}
    directory = write_checkpoint(config, random_weights(config))
    resident = loaded(directory, "none")
    slot = streamed_layers(resident).slot_bytes
    runtime = loaded(directory, "none", budget=budget_for(resident, streamed_layers(resident).most, host=3 * slot))
    assert same(answer(runtime), answer(resident))
    file = directory / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\0\0")
    os.utime(file, ns=(1, 1))
    with pytest.raises(TransferError, match="changed since it was loaded"):
        answer(runtime)


def test_less_than_two_layers_and_a_forward_is_refused_before_anything_is_read(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    resident = loaded(checkpoints("llada"))
    sizes = resident._call.sizes(1, 1, 1)
    weights = WeightBytes.of(sizes.shape, sizes.dtype, RAW_WEIGHTS)
    least = CallBytes.of(make_policy("none"), sizes, MemoryBudget(device=1), weights=weights).total(Tier.DEVICE)
    rest = sizes.shape.parameters * 4 - LAYERS * weights.record
    assert least <= rest + 2 * weights.slot_bytes + 16 * UNIT  # embedding, head and norms; two layers; a forward
    assert tiered.from_pretrained(checkpoints("llada"), weights="raw", memory=least).ledger.held(Tier.HOST)
    monkeypatch.setattr(Checkpoint, "read", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(TierCapacityError, match="weights = 'fp8'") as error:
        tiered.from_pretrained(checkpoints("llada"), weights="raw", memory=least - 1)
    assert error.value.tier is Tier.DEVICE and error.value.needed == least


@pytest.mark.parametrize("form", ["int8", "int4+head"])
def test_what_is_not_refused_has_room_for_the_raw_tensor_of_a_code(form: str, tmp_path: Path):
    save_random(tmp_path, width=256, layers=4, context=64)  # matrices that are larger than a call of one token
    with pytest.raises(TierCapacityError) as error:
        tiered.from_pretrained(tmp_path, weights=form, memory=1)
    for more in range(0, 4):
        tiered.from_pretrained(tmp_path, weights=form, memory=(error.value.total or 0) + more * 700_000).close()


# ---- what codes would save ----


def test_raw_weights_stay_raw_and_one_warning_says_what_a_code_would_save(checkpoints: Callable[[str], Path]):
    directory = checkpoints("llada")
    whole = tiered.plan(directory, context=64, policy="none").tiers[Tier.DEVICE].total
    assert not tiered.plan(directory, context=64, memory=whole, policy="none").warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiered.from_pretrained(directory, memory=whole).close()
    tight = whole - 2 * WeightBytes.of(loaded(directory).model.shape, "float32", RAW_WEIGHTS).record
    said = r".* come to the device in every step; weights = 'int8' would bring 0 B, and changes answers"
    (warning,) = tiered.plan(directory, context=64, memory=tight, policy="none").warnings
    assert re.match(said, warning)
    with pytest.warns(UserWarning, match=said) as told, tiered.from_pretrained(directory, memory=tight) as runtime:
        assert runtime.model.shape.layers and len(told) == 1
        assert not any(isinstance(vars(each).get("weight"), CodedRows) for each in runtime.model.modules())


@pytest.mark.parametrize("name", ["auto", "int5", "fp8+", "head", "int4 + head"])
def test_a_form_that_is_none_is_named(checkpoints: Callable[[str], Path], name: str):
    with pytest.raises(ValueError, match="weights"):
        tiered.from_pretrained(checkpoints("llada"), weights=name)
    with pytest.raises(ValueError, match="weights"):
        tiered.plan("llada-8b", context=64, weights=name)


@pytest.mark.parametrize("family", ["dream", "llada-moe"])
@pytest.mark.parametrize("form", ["raw", *CODES, *(f"{code}+head" for code in WeightCode)])
def test_a_plan_counts_what_is_loaded(checkpoints: Callable[[str], Path], family: str, form: str):
    directory = checkpoints(family)
    runtime = tiered.from_pretrained(directory, weights=form, policy="none")
    held = sum(parameter.nbytes for parameter in runtime.model.parameters())
    coded = [vars(module).get("weight") for module in runtime.model.modules()]
    held += sum(weight.nbytes for weight in coded if isinstance(weight, CodedRows))
    planned = tiered.plan(directory, context=64, weights=form, policy="none").tiers[Tier.DEVICE]
    assert planned.accounts[Account.WEIGHTS] == held == runtime.ledger.held(Tier.DEVICE, Account.WEIGHTS)


@pytest.mark.parametrize("form", [*CODES, "int4+head"])
def test_a_call_over_coded_weights_allocates_what_it_books(
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]], write_checkpoint: Callable[..., Path], form: str
):
    wide = {"d_model": 256, "n_layers": 2, "mlp_hidden_size": 512, "vocab_size": 2048}
    config = {**FAMILIES["llada"], **TOKENS, **wide, "torch_dtype": "float32"}
    runtime = loaded(write_checkpoint(config, random_weights(config)), form=form)
    with Allocations() as allocated:
        out = answer(runtime)
    booked = out.memory.peak_device_bytes - runtime.ledger.held(Tier.DEVICE, Account.WEIGHTS)
    assert 0.6 * booked <= allocated.peak <= booked


def test_experts_that_all_fit_come_back_and_those_that_rows_pick_again_stay(checkpoints: Callable[[str], Path]):
    resident = loaded(checkpoints("llada-moe"), "none")
    whole, weights = streamed_layers(resident), CallBytes.of(resident.policy, sizes_of(resident), MemoryBudget())
    runtime = loaded(checkpoints("llada-moe"), "none", budget=budget_for(resident, 1))
    first, again = answer(runtime), answer(runtime)
    assert same(first, again) and again.weights is not None and first.weights is not None and weights.weights is None
    # All but one have a slot: they come once, and one that is missing is the only one to take another's place.
    assert streamed_layers(runtime).slots == whole.of_records - 1
    assert first.weights.asked[Tier.HOST] >= whole.of_records > again.weights.asked[Tier.HOST]
    used, there = again.weights.experts_used, again.weights.experts_resident
    assert used == sum(round(count * len(whole.recorded)) for count in again.experts_per_step)
    assert there >= 0.9 * used and 0.5 * used <= again.weights.experts_foreseen <= used
    # A call that leaves room for all of them has no slots.
    small = runtime.generate(torch.arange(5)[None], max_new_tokens=16, block_length=16, steps=4)
    assert small.weights is None and runtime.model.blocks[0].experts_in.weight is not None


@pytest.mark.parametrize("right", [True, False])
def test_experts_are_fetched_ahead_as_long_as_guesses_are_right(
    right: bool,
    write_checkpoint: Callable[..., Path],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
):
    config = {**FAMILIES["llada2"], **TOKENS, "num_experts": 64, "torch_dtype": "float32"}
    directory = write_checkpoint(config, random_weights(config))
    call = {"max_new_tokens": 32, "block_length": 4, "stop_at_eos": False}
    picked: list[tuple[int, list[int]]] = []
    groups_of = StreamedExperts.groups
    with loaded(directory, "block_causal") as resident, monkeypatch.context() as patched:
        patched.setattr(Forward, "note_picks", lambda _, layer, experts, these: picked.append((layer, these)))
        expected = resident.generate(torch.arange(5)[None], **call).sequences
        budget = budget_for(resident, streamed_layers(resident).of_records - 40)

    def streamed(guess: Callable[[set[int]], set[int]]) -> TierStats:
        following = iter([*picked[1:], (0, [])])

        def groups(self: StreamedExperts, layer: int, experts: list[int], _: object) -> object:
            then, later = next(following)
            guesses = sorted(guess({*later})) if then == layer + 1 else []
            likely = dict.fromkeys(guesses, 1) | dict.fromkeys(guesses[:1], 65 - len(guesses))  # of as many picks
            return groups_of(self, layer, experts, likely)

        monkeypatch.setattr(StreamedExperts, "groups", groups)
        with loaded(directory, "block_causal", budget=budget) as runtime:
            out = runtime.generate(torch.arange(5)[None], **call)
            assert torch.equal(out.sequences, expected) and out.weights is not None
            return out.weights

    without = streamed(lambda _: set())
    told = streamed(lambda experts: experts if right else {*range(64)} - experts)
    fetched, more = (each.asked[Tier.HOST] for each in (without, told))
    if right:
        assert told.experts_resident > 0.8 * told.experts_used > without.experts_resident and more <= 1.2 * fetched
    else:
        assert told.experts_foreseen == 0 and more == fetched


@pytest.mark.parametrize("family", ["llada", "llada-moe"])
def test_a_runtime_that_is_dropped_gives_everything_back_at_once(checkpoints: Callable[[str], Path], family: str):
    # A cycle would hold its memory and its threads until the collector comes.
    budget = budget_for(loaded(checkpoints(family)), FEWEST)

    def called() -> weakref.ref[Any]:
        runtime = loaded(checkpoints(family), budget=budget)
        answer(runtime, steps=2)
        assert streamed_layers(runtime).layers
        return weakref.ref(runtime.model)

    called()  # what a process makes once
    gc.collect()
    gc.disable()
    try:
        assert called()() is None
    finally:
        gc.enable()


def test_weights_that_another_call_uses_stay_where_they_are(checkpoints: Callable[[str], Path]):
    resident = loaded(checkpoints("llada"))
    runtime = loaded(checkpoints("llada"), budget=budget_for(resident, FEWEST))
    space = runtime._call
    with space.booked(runtime.policy, space.sizes(1, 32, 16, answer=16)):
        before = streamed_layers(runtime)
        with pytest.raises(TierCapacityError):
            answer(runtime)
        assert streamed_layers(runtime) == before
    assert isinstance(space.weights, StreamedWeights) and same(answer(runtime), answer(resident))


# ---- several threads ----


@pytest.mark.parametrize("streamed", [0, LAYERS])
def test_threads_that_call_one_runtime_get_what_each_gets_alone(checkpoints: Callable[[str], Path], streamed: int):
    runtime = resident = loaded(checkpoints("llada"))
    if streamed:
        runtime = loaded(checkpoints("llada"), budget=budget_for(resident, streamed))
    expected, ids = answer(runtime, steps=4), torch.randint(0, 120, (1, 21), generator=torch.Generator().manual_seed(6))
    logits, got = resident.logits(ids), []

    def calls() -> None:
        for _ in range(2):
            got.append(answer(runtime, steps=4, alone=False))
            assert torch.equal(runtime.logits(ids), logits)
        got.append(None)

    threads = [threading.Thread(target=calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outs = [out for out in got if out is not None]
    assert len(outs) == 4 and len(got) == 6 and all(same(out, expected) for out in outs)
    assert same(answer(runtime, steps=4), expected)
    runtime.close()
    assert all(runtime.ledger.held(tier) == 0 for tier in Tier)


@pytest.mark.parametrize(
    ("family", "policy"), [("llada", "attended"), ("llada-moe", "fast_dllm_dual"), ("llada2", "block_causal")]
)
def test_layers_make_room_for_requests_that_wait(checkpoints: Callable[[str], Path], family: str, policy: str):
    """Streamed layers pass once for all of them, and each gets what it gets alone."""
    resident = loaded(checkpoints(family), policy)
    generator = torch.Generator().manual_seed(8)
    calls = [
        {"inputs": torch.randint(0, 120, (1, 11 + 7 * number), generator=generator), "max_new_tokens": 16, "steps": 4}
        for number in range(5)
    ]
    alone = [resident.generate(**call, block_length=8) for call in calls]
    most = streamed_layers(resident).most  # of which less is streamed to one of these calls than to `answer`'s
    budget = budget_for(resident, most if family == "llada" else most // 2)
    runtime = loaded(checkpoints(family), policy, budget=budget)
    in_turn = 0
    for call in calls:
        out = runtime.generate(**call, block_length=8)
        assert out.weights is not None
        in_turn += out.weights.ways[Lane.FETCH].nbytes
    before = streamed_layers(runtime).count
    scheduler = Scheduler(runtime)
    requests = [scheduler.submit(runtime.prepare(**call, block_length=8)) for call in calls]
    scheduler.step()
    assert scheduler.running > 1 and streamed_layers(runtime).count > before
    scheduler.run()
    for request, expected in zip(requests, alone, strict=True):
        assert request.output is not None and torch.equal(request.output.sequences, expected.sequences)
    if family != "llada2":  # forwards of block-causal models pass one by one
        last = requests[-1].output
        assert last is not None and last.weights is not None
        assert last.weights.ways[Lane.FETCH].nbytes < in_turn
    assert runtime.ledger.report().tiers[Tier.DEVICE].peak <= int(budget.device or 0)
    runtime.ledger.check_integrity()
    runtime.close()
    assert all(runtime.ledger.held(tier) == 0 for tier in Tier)


def test_a_call_that_waits_for_another_thread_can_be_interrupted(checkpoints: Callable[[str], Path]):
    resident = loaded(checkpoints("llada"))
    runtime = loaded(checkpoints("llada"), budget=budget_for(resident, LAYERS))
    space, begun, over = runtime._call, threading.Event(), threading.Event()

    def call() -> None:
        with space.booked(runtime.policy, space.sizes(1, 32, 16, answer=16)):
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(60)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background have it ignored
    threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        answer(runtime, steps=2)
    signal.signal(signal.SIGINT, before)
    over.set()
    thread.join()
    assert answer(runtime, steps=2).num_forwards
