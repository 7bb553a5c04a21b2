"""Every policy by name, and presets: names for a policy with some of its options set."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

from tiered.core.aliases import POLICY_ALIASES
from tiered.core.checks import nearest, plain_number, unknown_name
from tiered.models.shape import Sight
from tiered.policies.auto import Auto
from tiered.policies.base import Policy
from tiered.policies.block_causal import BlockCausal
from tiered.policies.composed import Composed
from tiered.policies.dkv_cache import DKVPD, DKVDecode, DKVGreedy, DKVPrefill
from tiered.policies.dllm_cache.policy import DLLMCache
from tiered.policies.elastic_cache.policy import ElasticCache
from tiered.policies.fast_dllm import FastDLLMDual, FastDLLMPrefix
from tiered.policies.none import NoCache
from tiered.policies.polestar.policy import Polestar, PolestarWindow
from tiered.policies.uniform_cache import UniformCache

# A new policy is one file and one entry here.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Auto,
        NoCache,
        FastDLLMPrefix,
        FastDLLMDual,
        DKVDecode,
        DKVGreedy,
        DKVPrefill,
        DKVPD,
        DLLMCache,
        UniformCache,
        ElasticCache,
        Polestar,
        BlockCausal,
        Composed,
    )
}
# Options that a user gives go on top.
PRESETS: dict[str, tuple[type[Policy], dict[str, Any]]] = {
    # Exact under uniform noise with a noise mask; what it recomputes is the prefix cache's choice.
    "uniform_prefix": (FastDLLMPrefix, {}),
    # The paper's whole-context setting.
    "polestar-paper": (Polestar, {"clusters": 8, "top_m": 2, "update_threshold": 4, "cluster_layers": 1}),
    # The authors' code.
    "polestar-window": (PolestarWindow, {}),
}


def policies_for(sight: Sight) -> list[str]:
    """The policies for models whose rows see that, by name."""
    return [name for name, policy in POLICIES.items() if sight in policy.sights]


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """The policy of that name with these options, also under the names that official scripts use; a `Policy` object
    passes through.

    Raises:
        TypeError: neither a name nor a policy.
        ValueError: no such policy or option (names the nearest one), one option under two names with two values, or
            options beside a policy object.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} beside a policy object; set them in the object: {policy!r}")
        return policy
    kind, preset = _known(policy)
    allowed = [field.name for field in fields(kind)]
    given: dict[str, Any] = {}
    for option, value in options.items():
        name = option if option in allowed else POLICY_ALIASES.get(option, option)
        if kind is Auto:
            raise ValueError(f"option {option!r}: policy 'auto' has none; name the policy that it is one of")
        if name not in allowed:
            raise unknown_name(f"option of policy {policy!r}", option, allowed)
        if name in given and given[name] != value:
            raise ValueError(f"{option} = {value!r} contradicts {name} = {given[name]!r}; give one of them")
        given[name] = plain_number(value)
    return kind(**{**preset, **given})


def check_arguments(function: Callable[..., Any], policy: str | Policy, options: Iterable[str]) -> None:
    """Raise `ValueError` for one of `options`, given to `function` beside its own keywords and nearer to one of those
    than to any option of a policy. What is near an option is left to `make_policy`."""
    kind = type(policy) if isinstance(policy, Policy) else _known(policy)[0]
    own = [name for name, argument in signature(function).parameters.items() if argument.kind is argument.KEYWORD_ONLY]
    anywhere = {field.name for known in (kind, *POLICIES.values()) for field in fields(known)} | {*POLICY_ALIASES}
    for name in options:
        if name == "trust_remote_code":
            raise ValueError("trust_remote_code is no argument: no code that comes with a checkpoint is ever run")
        if name not in anywhere and nearest(name, [*own, *anywhere]) not in anywhere:
            known = [field.name for field in fields(kind)]
            raise unknown_name(f"argument of {function.__name__}", name, [*own, *known])


def _known(policy: object) -> tuple[type[Policy], Mapping[str, Any]]:
    """The class of that name, and the options that the name sets."""
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name or a Policy object, not {policy!r}")
    kind, preset = PRESETS[policy] if policy in PRESETS else (POLICIES.get(policy), {})
    if kind is None:
        raise unknown_name("policy", policy, (*POLICIES, *PRESETS))
    return kind, preset
