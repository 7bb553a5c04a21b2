"""The policies that are compared, all that are registered, and the calls that each is made for.

A part of bench/compare.py and bench/policy_cost.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tiered.policies.base import Policy
from tiered.policies.registry import POLICIES, PRESETS, make_policy
from tiered.runtime import Runtime

# Policies with a window of their own, which slides over an answer of one block.
ONE_BLOCK = frozenset({"elastic_cache"})
# What a policy is given where its defaults are those of another one. Composed: a prompt that is renewed at every other
# block, as in dLLM-Cache, with Polestar's updates between.
GIVEN: dict[str, dict[str, Any]] = {
    "composed": {"prompt_interval": "2 blocks", "response_interval": "block", "updates": {}},
}
WHOLE_WINDOWS: dict[str, dict[str, Any]] = {"elastic_cache": {"window": 32}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy or preset, and the call that it is compared in.

    Attributes:
        name: of the row.
        policy: name in the registry.
        given: options that are not at their defaults.
        one_block: the whole answer is one block.
        random_order: tokens are committed in random order, so that it is known beforehand which.
    """

    name: str
    policy: str
    given: Mapping[str, Any] = field(default_factory=dict)
    one_block: bool = False
    random_order: bool = False

    @property
    def reference(self) -> str:
        """The name of the variant of `none` that answers the same call."""
        ways = [way for way, given in (("one block", self.one_block), ("random order", self.random_order)) if given]
        return ", ".join(["none", *ways])

    def make(self) -> Policy:
        """The policy."""
        return make_policy(self.policy, **self.given)

    def answerer(self, runtime: Runtime) -> Runtime:
        """`runtime` under the policy."""
        return runtime.with_policy(self.make())

    def call(self, *, answer: int, block: int) -> dict[str, Any]:
        """Options of `generate` for `answer` tokens, in blocks of `block`."""
        options: dict[str, Any] = {"max_new_tokens": answer, "block_length": answer if self.one_block else block}
        return options | ({"remasking": "random", "seed": 0} if self.random_order else {})

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON: the call, and every option of the policy."""
        return {
            "policy": self.policy,
            "given": dict(self.given),
            "one_block": self.one_block,
            "random_order": self.random_order,
            "options": asdict(self.make()),
        }


def all_variants(*, slides: bool = True) -> list[Variant]:
    """Every policy and preset, and `none` in each call that one of them is made for.

    `slides`: False where noise makes tokens: no window slides over masks, and one that would has the whole block.
    """
    given = GIVEN if slides else GIVEN | WHOLE_WINDOWS
    variants = []
    for name in (*POLICIES, *PRESETS):
        policy = make_policy(name, **given.get(name, {}))
        variants.append(
            Variant(
                name=name,
                policy=name,
                given=given.get(name, {}),
                one_block=policy.name in ONE_BLOCK,
                random_order=policy.needs_order(),
            )
        )
    calls = {each.reference: {"one_block": each.one_block, "random_order": each.random_order} for each in variants}
    references = [Variant(name=name, policy="none", **call) for name, call in calls.items()]
    return [*references, *(variant for variant in variants if variant.name not in calls)]
