"""The policies that are compared (all registered ones), the calls that each is made for, and commit rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tiered
from tiered.policies.base import Policy
from tiered.policies.registry import PRESETS, Auto, make_policy, policies_for

# Policies with a window of their own, which slides over an answer of one block.
ONE_BLOCK = frozenset({"elastic_cache"})
WHOLE_WINDOWS: dict[str, dict[str, Any]] = {"elastic_cache": {"window": 32}}
# Policies by the names of options with which fewer blocks begin with a full pass than by default.
REFRESH_EVERY_4: dict[str, tuple[str, dict[str, Any]]] = {
    "fast_dllm_dual-seldom": ("fast_dllm_dual", {"refresh_blocks": 64}),
    "polestar-drift": ("polestar", {"refresh": "drift", "refresh_blocks": 64}),
    "polestar-auto": ("polestar", {"refresh": "auto"}),
}
# Forms of keys and values: raw, and in codes.
KV = ("raw", "fp8", "nvfp4")
# By noise, for answers of 32 tokens: a slow rule and a fast one, as options of `generate`. Under uniform noise there
# are twice as many steps as tokens, and a block ends as soon as a step has nothing to change.
RULES: dict[str, dict[str, dict[str, Any]]] = {
    "mask": {"one a step": {}, "threshold 0.9": {"confidence_threshold": 0.9}},
    "uniform": {"one a step": {"steps": 64}, "three a step": {"steps": 64, "tokens_per_step": 3}},
}


def noise_of(model: str) -> str:
    """The noise that `model` was trained on, a key of `RULES`; read from its config."""
    return tiered.plan(model, context=64, policy="none").shape.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy or preset, and the call that it is compared in.

    Attributes:
        name: name of the row.
        policy: name in the registry.
        given: options that are not at their defaults.
        one_block: the whole answer is one block.
        random_order: tokens are committed in random order, so that the order is known beforehand.
    """

    name: str
    policy: str
    given: Mapping[str, Any] = field(default_factory=dict)
    one_block: bool = False
    random_order: bool = False

    def make(self) -> Policy:
        """The policy."""
        return make_policy(self.policy, **self.given)

    def call(self, *, answer: int, block: int) -> dict[str, Any]:
        """Options of `generate` for `answer` tokens, in blocks of `block`."""
        options: dict[str, Any] = {"max_new_tokens": answer, "block_length": answer if self.one_block else block}
        return options | ({"remasking": "random", "seed": 0} if self.random_order else {})


def all_variants(*, slides: bool = True) -> list[Variant]:
    """Every policy and preset, and `none` in each call that one of them is made for. `auto`, which is one of the
    others, is left out.

    `slides`: False if noise makes tokens. Then no window slides over masks, and it has the whole block.
    """
    given = {} if slides else WHOLE_WINDOWS
    variants: list[Variant] = []
    references: dict[str, Variant] = {}
    for name in (*policies_for("canvas"), *PRESETS):
        if name == Auto.name:
            continue
        policy = make_policy(name, **given.get(name, {}))
        one_block, random_order = policy.name in ONE_BLOCK, policy.needs_order()
        way = Variant(name=name, policy=name, given=given.get(name, {}), one_block=one_block, random_order=random_order)
        variants.append(way)
        ways = ["none", *["one block"] * one_block, *["random order"] * random_order]
        references.setdefault(", ".join(ways), replace(way, name=", ".join(ways), policy="none", given={}))
    return [*references.values(), *(variant for variant in variants if variant.name not in references)]
