"""A call under a budget, in which torch itself refuses more than the cap; and one that has to be refused beforehand."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_parts.call_memory import CallMemory
from gpu_parts.call_watch import Kinds
from gpu_parts.policy_calls import Measured, PolicyCall
from gpu_parts.random_llada import random_ids, random_runtime
from gpu_parts.setting import Setting
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.offload.errors import ArenaFullError
from tiered.planning.plan import Plan
from tiered.policies.base import Policy


def capped_run(
    setting: Setting, policy: Policy, budget: MemoryBudget, call: PolicyCall, plan: Plan
) -> tuple[Measured, dict[str, Any], list[str]]:
    """What came of `call` under `budget`, the figures of it, and what was wrong. Where torch refuses to hold as much as
    the ledger allows, that is wrong, and the call is repeated without torch's own limit.

    Raises:
        TierCapacityError: the runtime refuses what was planned.
    """
    runtime, faults = random_runtime(setting, policy, budget), []
    memory = CallMemory(setting.on)
    measured, began = None, time.perf_counter()
    try:
        with torch_limit(setting.on, budget.cap(Tier.DEVICE)):
            measured = call.run(runtime, setting)
    except (torch.OutOfMemoryError, ArenaFullError) as error:
        faults.append(f"torch refused what the ledger allows: {str(error).splitlines()[0]}")
    if measured is None:  # here, where the error is gone, and with it the frames that held the call's tensors
        gc.collect()
        runtime = random_runtime(setting, policy, budget)
        memory, began = CallMemory(setting.on), time.perf_counter()
        measured = call.run(runtime, setting)
    seconds = time.perf_counter() - began
    faults += [*measured.faults(runtime.model), *memory.faults(measured.out, budget.cap(Tier.DEVICE))]
    return measured, {"seconds": seconds, "memory": memory.figures(measured.out, plan)}, faults


@contextmanager
def torch_limit(device: torch.device, cap: int | None) -> Iterator[None]:
    """Torch's allocator holds no more than `cap` bytes meanwhile, what it holds for libraries included. The context of
    CUDA is beside that. Without CUDA or a cap: no limit."""
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
) -> tuple[dict[str, Any], list[str]]:
    """How `call`, which does not fit `budget`, is refused, and what is wrong about that: it has to be before any pass,
    and the books have to be as they were."""
    runtime, ids = random_runtime(setting, policy, budget), random_ids(setting, call.positions - call.answer)
    held = [runtime.ledger.accounts(tier) for tier in Tier]
    began = time.perf_counter()
    try:
        runtime.generate(ids, inspector=_Begun(), **call.options())
    except _NotRefusedError:
        return {"positions": call.positions}, [f"{call.positions} positions were not refused"]
    except TierCapacityError as error:
        row = {
            "positions": call.positions,
            "tier": error.tier.value,
            "needed_bytes": error.needed,
            "available_bytes": error.available,
            "refused_ms": 1000 * (time.perf_counter() - began),
        }
        left = [runtime.ledger.accounts(tier) for tier in Tier]
        return row, [] if left == held else [f"the refused call left {left} in the ledger, which held {held}"]
    raise AssertionError("a call begins or is refused")


class _NotRefusedError(Exception):
    """The call begins."""


class _Begun(Kinds):
    """Ends a call that begins."""

    def begin(self, *_: object) -> None:
        """See `tiered.decoding.observers.CallInspector`."""
        raise _NotRefusedError
