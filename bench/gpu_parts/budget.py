"""The longest context that runs under a cap of the device's memory, and the refusal of one block more."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from gpu_parts.policy_calls import BLOCK, CallMemory, Kinds, Measured, PolicyCall, patient, planned, policy_of
from gpu_parts.random_llada import random_ids, random_llada, random_runtime
from gpu_parts.setting import Setting, checked, skipped
from gpu_parts.step_figures import copies, measured_rates, times, work_of
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.offload.errors import NoRoomError
from tiered.planning.plan import Plan
from tiered.policies.base import Policy

# Refresh, step, step, and an update if the policy updates: see `patient`.
CALL = PolicyCall(positions=1024, steps=4)
# Most positions of a run, then fewer, if time is short. A longer context is planned and refused, not run.
_POSITIONS = (65536, 49152, 32768, 16384, 4096)
# Rough figures to choose among those: share of the measured rate that a refresh reaches, and bytes a second at which
# host memory is pinned, and streamed.
_REACHED, _PINNED_A_SECOND, _PAGED_A_SECOND = 0.4, 4e9, 2e10


# Most expected seconds of a run, by policy and budget of the host (0: nothing is streamed).
_CASES = {
    "fast_dllm_dual, host 0": 10,
    "polestar_resident, host 0": 10,
    "polestar_delta, host 64GiB": 12,
    "polestar_raw, host 64GiB": 14,
    "fast_dllm_dual, host 64GiB": 12,
    "polestar_delta, host 64GiB, longer": 20,  # last, because no case waits behind it
}
_TINY_HOST = {"0": "0", "64GiB": "1MiB"}


def cases(setting: Setting) -> list[str]:
    """The cases by policy and host budget."""
    return list(_CASES)


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """The longest context of the plan, a call there, or as far as time allows, and a refused call of one block more."""
    variant, host, *longer = case.replace("host ", "").split(", ")
    policy, budget = patient(policy_of(variant, setting)), budget_of(setting, host)
    longest = longest_context(setting, policy, budget)
    dual, dual_alike = (_longest_dual(setting, host) for host in ("0", host))
    row: dict[str, Any] = {"variant": variant, "longest_context": longest}
    row |= {"device_budget_bytes": budget.device, "host_budget_bytes": budget.host}
    # The first of them streams nothing.
    row |= {"over_fast_dllm_dual": longest / dual, "over_fast_dllm_dual_same_host": longest / dual_alike}
    if longest < 2 * BLOCK:
        return row | checked("no prompt fits")
    positions, seconds = fitting_run(setting, policy, budget, longest, _CASES[case])
    if longer and positions == fitting_run(setting, policy, budget, longest, 12)[0] < longest:
        return row | skipped(f"no longer run than of {positions} positions fits the time")
    _warm_up(setting, variant)
    call = replace(CALL, positions=positions)
    plan = planned(setting, policy, call, budget)
    measured, run, faults = capped_run(setting, policy, budget, call, plan)
    refused, unrefused = refusal(setting, policy, budget, replace(CALL, positions=longest + BLOCK))
    ran = "at the longest context" if positions == longest else "planned only; a shorter context was run"
    row |= {"ran_at": positions, "ran": ran, "ran_over_fast_dllm_dual": positions / dual, "expected_seconds": seconds}
    row["streamed_layers"] = 0 if plan.streams is None else sum(len(of.layers) for of in plan.streams.streams)
    row["forwards"] = dict(measured.out.steps_by_kind)
    row["kinds"] = {kind.value: times(milliseconds) for kind, milliseconds in measured.milliseconds().items()}
    row |= {"copies": copies(measured.out.tiers), **run, "refused_beyond": refused}
    return row | checked(*faults, unrefused)


def budget_of(setting: Setting, host: str) -> MemoryBudget:
    """The cap that all policies are held against, with `host` beside it."""
    if setting.tiny:
        return MemoryBudget(device="2MiB", host=_TINY_HOST[host])
    there = torch.cuda.mem_get_info(setting.on)[1] if setting.on.type == "cuda" else 24 << 30
    return MemoryBudget(device=min(24, int(0.9 * there) >> 30) << 30, host=host)


def longest_context(setting: Setting, policy: Policy, budget: MemoryBudget) -> int:
    """Positions of the longest context, by `tiered.plan`."""
    longest = planned(setting, policy, replace(CALL, positions=2 * BLOCK), budget).largest_context
    assert longest is not None, "a cap limits it"
    return longest


def fitting_run(
    setting: Setting, policy: Policy, budget: MemoryBudget, longest: int, most_seconds: float
) -> tuple[int, float]:
    """Positions of the run, and seconds that it will take, roughly. The run has the longest context, else the next
    shorter one that ends in time, else the shortest."""
    first = min(longest, _POSITIONS[0])
    found = [(first, expected_seconds(setting, policy, budget, first))]
    for positions in _POSITIONS:
        if positions < first and found[-1][1] > most_seconds:
            found.append((positions, expected_seconds(setting, policy, budget, positions)))
    return found[-1]


def expected_seconds(setting: Setting, policy: Policy, budget: MemoryBudget, positions: int) -> float:
    """Seconds of a run: the arithmetic of its refresh, and host memory to pin and to stream."""
    plan = planned(setting, policy, replace(CALL, positions=positions), budget)
    streamed = 0 if plan.streams is None else plan.streams.moved
    flops = work_of(random_llada(setting).shape, positions, positions).flops
    return (
        flops / (_REACHED * measured_rates(setting).flops_per_second)
        + plan.tiers[Tier.HOST].total / _PINNED_A_SECOND
        + CALL.steps * streamed / _PAGED_A_SECOND
    )


@cache
def _longest_dual(setting: Setting, host: str) -> int:
    return longest_context(setting, policy_of("fast_dllm_dual", setting), budget_of(setting, host))


@cache
def _warm_up(setting: Setting, variant: str) -> None:
    """Libraries take their workspaces, and kernels are compiled, before a cap counts."""
    call = replace(CALL, positions=96) if setting.tiny else CALL
    call.run(random_runtime(setting, patient(policy_of(variant, setting))), setting)


def capped_run(
    setting: Setting, policy: Policy, budget: MemoryBudget, call: PolicyCall, plan: Plan
) -> tuple[Measured, dict[str, Any], list[str]]:
    """The results of `call` under `budget`, its figures, and its faults. If torch refuses to hold as much as the ledger
    allows, that is a fault, and the call is repeated without torch's own limit.

    Raises:
        TierCapacityError: the runtime refuses what was planned.
    """
    cap, faults = budget.cap(Tier.DEVICE), list[str]()

    def once(limit: int | None) -> tuple[Measured, CallMemory, float]:
        gc.collect()
        runtime, memory, began = random_runtime(setting, policy, budget), CallMemory(setting.on), time.perf_counter()
        with torch_limit(setting.on, limit):
            return call.run(runtime, setting), memory, time.perf_counter() - began

    try:
        ran = once(cap)
    except (torch.OutOfMemoryError, NoRoomError) as error:
        faults.append(f"torch refused what the ledger allows: {str(error).splitlines()[0]}")
        ran = None
    # Only here the error is gone, and with it the frames that held the call's tensors.
    measured, memory, seconds = ran or once(None)
    faults += [*measured.faults(random_llada(setting)), *memory.faults(measured.out, cap)]
    return measured, {"seconds": seconds, "memory": memory.figures(measured.out, plan)}, faults


@contextmanager
def torch_limit(device: torch.device, cap: int | None) -> Iterator[None]:
    """Torch's allocator holds no more than `cap` bytes meanwhile, memory for libraries included. The context of CUDA is
    beside that. Without CUDA or a cap there is no limit."""
    if device.type != "cuda" or cap is None:
        yield
        return
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def refusal(
    setting: Setting, policy: Policy, budget: MemoryBudget, call: PolicyCall
) -> tuple[dict[str, Any], str | None]:
    """The refusal of `call`, which does not fit `budget`, and its fault. The refusal has to come before any pass, and
    the books have to be as they were."""
    runtime, ids = random_runtime(setting, policy, budget), random_ids(setting, call.positions - call.answer)
    held = [runtime.ledger.accounts(tier) for tier in Tier]
    began = time.perf_counter()
    try:
        runtime.generate(ids, inspector=_Begun(), **call.options())
    except _NotRefusedError:
        return {"positions": call.positions}, f"{call.positions} positions were not refused"
    except TierCapacityError as error:
        row = {"positions": call.positions, "tier": error.tier.value, "needed_bytes": error.needed}
        row |= {"available_bytes": error.available, "refused_ms": 1000 * (time.perf_counter() - began)}
        left = [runtime.ledger.accounts(tier) for tier in Tier]
        return row, None if left == held else f"the refused call left {left} in the ledger, which held {held}"
    raise AssertionError("a call begins or is refused")


class _NotRefusedError(Exception):
    """The call begins."""


class _Begun(Kinds):
    """Ends a call that begins."""

    def begin(self, *_: object) -> None:
        """See `tiered.decoding.observers.CallInspector`."""
        raise _NotRefusedError
