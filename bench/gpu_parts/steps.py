"""LLaDA-8B's shape under each policy, by context: the time of each kind of forward beside its floor, copies, bytes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from gpu_parts.policy_calls import BLOCK, NAMES, CallMemory, Measured, PolicyCall, planned, policy_of, small_records
from gpu_parts.random_llada import random_runtime
from gpu_parts.setting import Setting, checked, skipped
from gpu_parts.step_figures import by_kind, copies, measured_rates
from tiered.core.features import Tier
from tiered.runtime import Runtime

_CONTEXTS, _TINY_CONTEXTS = (1024, 4096, 16384, 32768), (96, 160)
_STEPS = 16  # steps of a call; Polestar has one refresh, ten plain steps and five updates
_WARM_UP = PolicyCall(positions=1024, steps=8)  # every kind of forward, and so every kernel, once
_QUICK = 1.0  # seconds; a shorter call is worth another one
_FULL = 0.97  # share of the device's memory that a call may be planned for
# Policies that must answer alike: the tier of records changes no bit.
_ALIKE = {"polestar_raw": "polestar_resident"}
_answers: dict[tuple[Setting, str, int], list[int]] = {}


def cases(setting: Setting) -> list[str]:
    """Every policy at every context, short ones first."""
    contexts = _TINY_CONTEXTS if setting.tiny else _CONTEXTS
    return [f"{variant} {positions}" for positions in contexts for variant in NAMES]


def call_of(variant: str, positions: int) -> PolicyCall:
    """A call of one block. Without a cache, a long context has fewer forwards. Uniform-Cache has two blocks, because it
    renews the next one beside the current."""
    steps = min(_STEPS, max(2, _CONTEXTS[-1] // positions)) if variant == "none" else _STEPS
    return PolicyCall(positions=positions, answer=2 * BLOCK if variant == "uniform" else BLOCK, steps=steps)


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """One call, and another one if it took less than a second: times are of the last."""
    with small_records(setting):
        return _measure(setting, case)


def _measure(setting: Setting, case: str) -> dict[str, Any]:
    variant, context = case.split()
    call = call_of(variant, int(context))
    plan = planned(setting, policy_of(variant, setting), call)
    if setting.on.type == "cuda" and (total := torch.cuda.mem_get_info()[1]) * _FULL < plan.tiers[Tier.DEVICE].total:
        return skipped(f"planned at {plan.tiers[Tier.DEVICE].total} bytes, the device has {total}")
    rates, runtime = measured_rates(setting), random_runtime(setting, policy_of(variant, setting))
    _warm_up(runtime, setting, call.positions)
    memory = CallMemory(setting.on)
    first = last = call.run(runtime, setting)
    figures = memory.figures(first.out, plan)
    # A rehearsal has no time for a second one at every context.
    if first.out.timings.total < _QUICK and not (setting.tiny and call.positions > _TINY_CONTEXTS[0]):
        last = call.run(runtime, setting)
    _answers[setting, variant, call.positions] = last.answer
    row = {"variant": variant, "policy": runtime.policy.name, "policy_options": runtime.policy.options}
    row |= {"positions": call.positions, "new_tokens": call.answer, "steps": call.steps}
    row |= {"forwards": dict(last.out.steps_by_kind), "kinds": by_kind(runtime.model.shape, call, first, last, rates)}
    row |= {"total_ms": 1000 * last.out.timings.total, "ms_per_forward": last.out.timings.ms_per_forward}
    row["tokens_per_second"] = call.answer / last.out.timings.total
    row |= {"bandwidth_gb_per_s": rates.bytes_per_second / 1e9, "tflop_per_s": rates.flops_per_second / 1e12}
    row |= {"copies": copies(last.out.tiers), "memory": figures}
    disagreements = _disagreements(setting, variant, call, first, last)
    return row | checked(*first.faults(runtime.model), *memory.faults(first.out), *disagreements)


@cache
def _warm_context(setting: Setting, positions: int) -> None:
    """Libraries may look up attention over so many keys once, whatever the policy."""
    call = PolicyCall(positions=positions, steps=2)
    call.run(random_runtime(setting, policy_of("fast_dllm_dual", setting)), setting)


def _warm_up(runtime: Runtime, setting: Setting, positions: int) -> None:
    replace(_WARM_UP, positions=min(positions, _WARM_UP.positions)).run(runtime, setting)
    if positions > _WARM_UP.positions:
        _warm_context(setting, positions)


def _disagreements(setting: Setting, variant: str, call: PolicyCall, first: Measured, last: Measured) -> Iterator[str]:
    if first.answer != last.answer:
        yield "two equal calls gave different tokens"
    other = _ALIKE.get(variant)
    answer = None if other is None else _answers.get((setting, other, call.positions))
    if answer is not None and answer != first.answer:
        differ = sum(one != two for one, two in zip(answer, first.answer, strict=True))
        yield f"{differ} of {len(answer)} tokens differ from those of {other}"
