"""LLaDA-8B's shape behind a scheduler: sixteen clients together beside one request at a time."""

from typing import Any

from workloads.load import served

from gpu_parts.policy_calls import BLOCK, one_after_another
from gpu_parts.random_llada import random_ids, random_runtime
from gpu_parts.setting import Setting, checked
from tiered.policies.registry import make_policy

CLIENTS, CONTEXT, ANSWER, STEPS = 16, 512, 64, 16


def cases(setting: Setting) -> list[str]:
    """One case: all clients together, with two requests each."""
    return ["together"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """The same requests, one at a time, and as many together as there are clients."""
    runtime, clients = random_runtime(setting, make_policy("fast_dllm_dual")), 2 if setting.tiny else CLIENTS
    context, answer, steps = (32, 2 * BLOCK, 4) if setting.tiny else (CONTEXT, ANSWER, STEPS)
    asked = [
        runtime.prepare(random_ids(setting, context + number), **one_after_another(answer, steps))
        for number in range(2 * clients)
    ]
    served(runtime, asked[:clients], clients=clients, max_running=clients)  # kernels are compiled
    alone, together = (served(runtime, asked, clients=clients, max_running=most) for most in (1, clients))
    over = {
        f"{name}_over_one_at_a_time": together[name] / alone[name]
        for name in ("tokens_per_second", "first_p50_ms", "forwards_per_token")
    }
    row = {"clients": clients, "one_at_a_time": alone, "together": together, **over}
    return row | checked(
        *(f"{each['tokens']} tokens" for each in (alone, together) if each["tokens"] != 2 * clients * answer)
    )
