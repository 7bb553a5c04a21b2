"""The longest context that runs under a cap of the device's memory, and that one block more is refused beforehand."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cost_card import cost_card

from gpu_parts.capped_run import capped_run, refusal
from gpu_parts.policy_calls import BLOCK, PolicyCall, patient, planned, policy_of
from gpu_parts.random_llada import random_llada, random_runtime
from gpu_parts.setting import Setting
from gpu_parts.step_figures import copies, times
from gpu_parts.step_floors import measured_rates
from tiered.core.budget import MemoryBudget
from tiered.core.features import Tier
from tiered.policies.base import Policy

# Refresh, step, step, and where the policy updates an update: see `patient`.
CALL = PolicyCall(positions=1024, steps=4)
# Positions of a run, at most; a longer context is planned and refused, not run. Shorter ones are fallen back on.
_POSITIONS = (65536, 49152, 32768, 16384, 4096)
# Rough, to choose among those: what of the measured rate a refresh reaches, and bytes a second at which host memory is
# pinned, and pages come back.
_REACHED, _PINNED_A_SECOND, _PAGED_A_SECOND = 0.4, 4e9, 2e10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A policy, its budget of the host (0: nothing is streamed), and seconds that its run may be expected to take."""

    variant: str
    host: str
    seconds: float


_CASES = {
    "fast_dllm_dual, host 0": _Case(variant="fast_dllm_dual", host="0", seconds=10),
    "polestar_resident, host 0": _Case(variant="polestar_resident", host="0", seconds=10),
    "polestar_delta, host 64GiB": _Case(variant="polestar_delta", host="64GiB", seconds=12),
    "polestar_raw, host 64GiB": _Case(variant="polestar_raw", host="64GiB", seconds=14),
    "fast_dllm_dual, host 64GiB": _Case(variant="fast_dllm_dual", host="64GiB", seconds=12),
    # Last, since nothing waits behind it.
    "polestar_delta, host 64GiB, longer": _Case(variant="polestar_delta", host="64GiB", seconds=20),
}
_TINY_HOST = {"0": "0", "64GiB": "1MiB"}


def cases(setting: Setting) -> list[str]:
    """By policy and host budget."""
    return list(_CASES)


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """How far the plan says that the context goes, a call there, or as far as time allows, and one a block beyond."""
    of = _CASES[case]
    policy, budget = patient(policy_of(of.variant, setting)), budget_of(setting, of.host)
    longest = longest_context(setting, policy, budget)
    dual, dual_alike = (_longest_dual(setting, host) for host in ("0", of.host))
    row: dict[str, Any] = {
        "variant": of.variant,
        "device_budget_bytes": budget.device,
        "host_budget_bytes": budget.host,
        "longest_context": longest,
        "over_fast_dllm_dual": longest / dual,  # which streams nothing
        "over_fast_dllm_dual_same_host": longest / dual_alike,
    }
    if longest < 2 * BLOCK:
        return row | {"ok": False, "why": "no prompt fits"}
    positions, seconds = fitting_run(setting, policy, budget, longest, of.seconds)
    if case.endswith("longer") and positions == fitting_run(setting, policy, budget, longest, 12)[0] < longest:
        return row | {"skipped": f"no longer run than of {positions} positions fits the time"}
    _warm_up(setting, of.variant)
    call = replace(CALL, positions=positions)
    plan = planned(setting, policy, call, budget)
    measured, run, faults = capped_run(setting, policy, budget, call, plan)
    refused, unrefused = refusal(setting, policy, budget, replace(CALL, positions=longest + BLOCK))
    faults += unrefused
    return (
        row
        | {
            "ran_at": positions,
            "ran": "at the longest context" if positions == longest else "planned only; a shorter context was run",
            "ran_over_fast_dllm_dual": positions / dual,
            "expected_seconds": seconds,
            "streamed_layers": 0 if plan.streams is None else sum(len(of.layers) for of in plan.streams.streams),
            "forwards": dict(measured.out.passes),
            "kinds": {kind.value: times(milliseconds) for kind, milliseconds in measured.milliseconds().items()},
            "copies": copies(measured.out.tiers),
            **run,
            "refused_beyond": refused,
            "ok": not faults,
        }
        | ({"why": "; ".join(faults)} if faults else {})
    )


def budget_of(setting: Setting, host: str) -> MemoryBudget:
    """The cap that all policies are held against, with `host` beside it."""
    if setting.tiny:
        return MemoryBudget(device="2MiB", host=_TINY_HOST[host])
    return MemoryBudget(device="24GiB", host=host)


def longest_context(setting: Setting, policy: Policy, budget: MemoryBudget) -> int:
    """Positions, as `tiered.plan` finds them."""
    longest = planned(setting, policy, replace(CALL, positions=2 * BLOCK), budget).largest_context
    assert longest is not None, "a cap limits it"
    return longest


def fitting_run(
    setting: Setting, policy: Policy, budget: MemoryBudget, longest: int, most_seconds: float
) -> tuple[int, float]:
    """Positions of the run, and seconds that it will take, roughly: the longest context, or the next shorter one that
    is done in time."""
    first = min(longest, _POSITIONS[0])
    found = first, expected_seconds(setting, policy, budget, first)
    for positions in _POSITIONS:
        if found[1] <= most_seconds:
            break
        if positions < found[0]:
            found = positions, expected_seconds(setting, policy, budget, positions)
    return found


def expected_seconds(setting: Setting, policy: Policy, budget: MemoryBudget, positions: int) -> float:
    """Of a run: the arithmetic of its refresh, and host memory to pin and to stream."""
    plan, shape = planned(setting, policy, replace(CALL, positions=positions), budget), random_llada(setting).shape
    card = cost_card(shape, batch=1, context=positions, rows=positions, dtype_bytes=2, output_rows=BLOCK)
    streamed = 0 if plan.streams is None else plan.streams.moved
    return (
        card.flops / (_REACHED * measured_rates(setting).flops_per_second)
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
