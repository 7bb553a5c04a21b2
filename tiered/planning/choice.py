"""The policy of a call with an "auto" option: decided before the call, always alike."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.forward.sizes import CallShape
from tiered.planning.workload import Workload, answer_of, prompt_of
from tiered.policies.attended import Attended
from tiered.policies.base import Policy
from tiered.policies.block_causal import BlockCausal
from tiered.policies.registry import Auto
from tiered.policies.row_schedule import LEAST_STALE_PROMPT, REFRESH_EVERY_4, row_schedule

# What `auto` is on a canvas, from LEAST_STALE_PROMPT tokens of the shortest prompt on: the least work of all policies
# that were measured to answer as `none` to every task, also where an answer needs a fresh look at the prompt. Answers:
# docs/measurements/ (drops, compare, frontier). Seconds: the map there (regimes), which tests/test_choice.py reads.
AUTO = Attended()
# By "auto" option: its value in calls of one block or a short prompt, and its value in all others.
REFRESHES: Mapping[str, tuple[Any, Any]] = {"refresh": ("full", "drift"), "refresh_blocks": (1, REFRESH_EVERY_4)}


@dataclass(frozen=True, slots=True, repr=False)
class Choice:
    """The policy of a call.

    Attributes:
        policy: the policy; none of its options is "auto".
        why: the reason if something was "auto", else "".
    """

    policy: Policy
    why: str = ""

    def __str__(self) -> str:
        return f"{self.policy}: {self.why}" if self.why else str(self.policy)

    def __repr__(self) -> str:
        return f"<Choice {self}>"

    def as_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.name, "policy_options": self.policy.options, "why": self.why}


def choose(policy: Policy, sizes: CallShape, budget: MemoryBudget, *, prompt: int | None = None) -> Choice:
    """The policy for a call of `sizes`: `policy` itself, unless one of its options is "auto". `prompt`: tokens of the
    shortest prompt; None for prompts that fill the canvas in front of the answer."""
    prompt, blocks = prompt_of(sizes) if prompt is None else prompt, answer_of(sizes) // sizes.block_length
    behind = f"{blocks} block{'s' * (blocks > 1)} after a prompt of {prompt} tokens"
    if not isinstance(policy, Auto):
        seldom = prompt >= LEAST_STALE_PROMPT and blocks > 1
        opened = {name: values[seldom] for name, values in REFRESHES.items() if getattr(policy, name, None) == "auto"}
        return Choice(replace(policy, **opened), behind) if opened else Choice(policy)
    if sizes.shape.block_causal:
        return Choice(BlockCausal(), "keys and values of finished blocks are exact")
    none = row_schedule("none")
    if prompt < LEAST_STALE_PROMPT:
        return Choice(none, f"the prompt has {prompt} tokens; caches lose answers below {LEAST_STALE_PROMPT}")
    if not Workload(AUTO, sizes).over(budget):
        return Choice(AUTO, f"measured to answer as `none`, for {behind}")
    none_fits = not Workload(none, sizes).over(budget)
    return Choice(none, "nothing else fits the budget" if none_fits else "nothing fits the budget")
