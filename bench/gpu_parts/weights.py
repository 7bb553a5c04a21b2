"""LLaDA-8B's shape with less room than its weights need: streamed, in codes, at the longest context, and offloaded by
accelerate."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
from baselines.bidirectional_llama import forward, llama_of
from measuring.device_timer import device_times
from torch import Tensor

import tiered
from gpu_parts.budget import torch_limit
from gpu_parts.policy_calls import BLOCK, CallMemory, Measured, PolicyCall
from gpu_parts.random_llada import draw, llada_config, random_ids, random_llada, without_weights
from gpu_parts.setting import Setting, checked, skipped
from gpu_parts.step_figures import copies, measured_rates, times, work_of
from tiered.core.budget import MemoryBudget
from tiered.core.extras import needing
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import WeightCode
from tiered.loading import load_weights
from tiered.models.checkpoint import Checkpoint
from tiered.models.shape import ModelShape
from tiered.models.weight_form import read_bytes
from tiered.offload.lane import Lane
from tiered.planning.plan import Plan
from tiered.policies.base import StepKind
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

POLICY = make_policy("fast_dllm_dual")
CALL = PolicyCall(positions=1024, steps=16)
LONGEST, THEIRS, HOST = "int4 longest", "accelerate", "64GiB"
_MOST = 32768  # positions of a run; a longer context is planned alone
_ROUNDS = 5
_TINY = {"12GiB": "1100KiB", "24GiB": "2MiB"}
_forward_ms: dict[str, float] = {}  # milliseconds of an uncached forward over a block, by case


def cases(setting: Setting) -> list[str]:
    """The cases by the form of weights and the cap of the device."""
    forms = ("raw", "int8", "int4", LONGEST, THEIRS)
    return [*(f"{form}, 12GiB" for form in forms), f"{LONGEST}, 24GiB"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """The second of two equal calls, and uncached forwards over a block, which accelerate runs as well."""
    form, cap = case.split(", ")
    budget = MemoryBudget(device=_TINY[cap] if setting.tiny else cap, host=HOST)
    if form == THEIRS:
        return _offloaded(setting, budget)
    plan = _planned(setting, budget, form.split()[0], 96 if setting.tiny else CALL.positions)
    if form == LONGEST:
        assert plan.largest_context is not None, "a cap limits it"
        plan = _planned(setting, budget, "int4", min(_MOST, plan.largest_context))
    call = PolicyCall(positions=plan.sizes.context, steps=CALL.steps)
    row = {"form": str(plan.sizes.weights), "positions": call.positions, "longest_context": plan.largest_context}
    measured_rates(setting)  # now: its buffers have no room beside the weights under the limit
    with torch_limit(setting.on, budget.cap(Tier.DEVICE)), closing(_runtime(setting, plan, budget)) as runtime:
        call.run(runtime, setting)  # kernels are compiled, and libraries have their workspaces
        memory = CallMemory(setting.on)
        measured = call.run(runtime, setting)
        row |= {"memory": memory.figures(measured.out, plan), **_step(setting, plan, measured)}
        faults = [*measured.faults(runtime.model), *memory.faults(measured.out, budget.cap(Tier.DEVICE))]
        row["forward_ms"] = _forward_ms[case] = _asked(setting, runtime.logits)
    return row | checked(*faults)


def _planned(setting: Setting, budget: MemoryBudget, form: str, positions: int) -> Plan:
    sizes: dict[str, Any] = {"context": positions, "max_new_tokens": CALL.answer, "block_length": BLOCK}
    return tiered.plan(
        llada_config(setting), policy=POLICY, memory=budget, device=setting.device, weights=form, **sizes
    )


def _step(setting: Setting, plan: Plan, measured: Measured) -> dict[str, Any]:
    """Times of a plain step, over the longer of its copies and of its floor with resident weights."""
    shape, form, out = plan.sizes.shape, plan.sizes.weights, measured.out
    work, rates = work_of(shape, plan.sizes.context, BLOCK), measured_rates(setting)
    nbytes = read_bytes(shape, shape.dtype, form) + work.kv_bytes
    floor = 1e3 * max(nbytes / rates.bytes_per_second, work.flops / rates.flops_per_second)
    copy = 0.0 if out.weights is None else out.weights.ways[Lane.FETCH].busy_ns / 1e6 / out.num_forwards
    step = times(measured.milliseconds()[StepKind.STEP])
    figures = {"floor_ms": floor, "copy_ms": copy, "over_bound": step["median_ms"] / max(floor, copy)}
    return {"step": step, "copies": copies(out.weights), **figures}


def _asked(setting: Setting, logits: Callable[[Tensor], Tensor]) -> float:
    """Milliseconds of an uncached forward over a block."""
    ids = random_ids(setting, BLOCK).to(setting.on)
    return 1e3 * min(device_times(partial(logits, ids), setting.on, rounds=_ROUNDS, warm_up=1))


def _offloaded(setting: Setting, budget: MemoryBudget) -> dict[str, Any]:
    """accelerate's hooks, which bring a layer when it is called, for the layers without room."""
    if setting.on.type != "cuda":
        return skipped("accelerate offloads from a GPU alone")
    try:
        with needing("accelerate"):
            accelerate: Any = importlib.import_module("accelerate")
    except ModuleNotFoundError as error:
        return skipped(str(error))
    llama = llama_of(random_llada(setting))
    most = {0: budget.device, "cpu": HOST}
    places = accelerate.infer_auto_device_map(llama, most, no_split_module_classes=["LlamaDecoderLayer"])
    offloaded = accelerate.dispatch_model(llama, places, main_device=0)
    every = torch.arange(BLOCK, device=setting.on)
    ask = partial(forward, offloaded, mask=None, positions=every[None], output=every)
    took, ours = _asked(setting, ask), _forward_ms.get("raw, 12GiB")
    below = sum(place == "cpu" for place in places.values())
    row = {"forward_ms": took, "version": accelerate.__version__, "modules_below": below}
    return row | ({} if ours is None else {"ours_over_it": ours / took})


class _Drawn:
    """A checkpoint for `load_weights`, with weights that are drawn as they are read."""

    def __init__(self, setting: Setting, shape: ModelShape) -> None:
        self._shapes, self._setting = shape.weight_shapes, setting

    def order(self) -> Iterator[str]:
        """See `Checkpoint`."""
        return iter(self._shapes)

    def extent(self, name: str, dtype: torch.dtype) -> None:
        """Returns None, because the weights are in no file."""

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        code: WeightCode | None = None,
        into: Tensor | None = None,
    ) -> Tensor | CodedRows:
        """See `Checkpoint`."""
        weight = torch.empty(self._shapes[name], dtype=dtype, device=device)
        draw(weight, torch.Generator(device).manual_seed(self._setting.seed))
        if code is not None:
            return CodedRows.of(weight, code, None if into is None else into.view(len(weight), -1))
        return weight if into is None else into.view(dtype).view(weight.shape).copy_(weight)


def _runtime(setting: Setting, plan: Plan, budget: MemoryBudget) -> Runtime:
    """A runtime with weights in the form of `plan`, of which a call streams as many layers as it has to."""
    model, ledger, shape = without_weights(llada_config(setting)), Ledger(budget), plan.sizes.shape
    checkpoint = cast(Checkpoint, _Drawn(setting, shape))
    of: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": setting.on, "form": plan.sizes.weights}
    weights = load_weights(model, checkpoint, ledger, **of)
    return Runtime(model, policy=POLICY, ledger=ledger, name="random LLaDA", weights=weights)
