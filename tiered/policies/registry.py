"""Every policy by name, and presets, which are names of a policy with some options set."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar

from tiered.core.aliases import POLICY_ALIASES
from tiered.core.checks import nearest, plain_number, unknown_name
from tiered.models.shape import BLOCK_CAUSAL, CANVAS, Sight
from tiered.policies.attended import Attended
from tiered.policies.base import Policy, PolicyState
from tiered.policies.block_causal import BlockCausal
from tiered.policies.dllm_cache.policy import DLLMCache
from tiered.policies.elastic_cache.policy import ElasticCache
from tiered.policies.polestar.policy import Polestar, PolestarWindow
from tiered.policies.row_schedule import SCHEDULES, row_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Policy):
    """Placeholder of the policy that `tiered.planning.choice` names for the prompt of a call."""

    name: ClassVar[str] = "auto"
    sights: ClassVar[frozenset[Sight]] = CANVAS | BLOCK_CAUSAL

    def start(self) -> PolicyState:
        raise TypeError("policy 'auto' cannot run: call tiered.planning.choice.choose first, which names the policy")


# A new policy is one file and one entry here: a function that makes it from its options.
POLICIES: dict[str, Callable[..., Policy]] = {
    Auto.name: Auto,
    **{name: partial(row_schedule, name) for name in SCHEDULES},
    **{policy.name: policy for policy in (Attended, DLLMCache, ElasticCache, Polestar, BlockCausal)},
}
# A policy and some of its options. Options of the user override them.
PRESETS: dict[str, tuple[Callable[..., Policy], dict[str, Any]]] = {
    # Exact under uniform noise with a noise mask; recomputes the same rows as the prefix cache.
    "uniform_prefix": (POLICIES["fast_dllm_prefix"], {}),
    # The paper's whole-context setting.
    "polestar-paper": (Polestar, {"clusters": 8, "top_m": 2, "update_threshold": 4, "cluster_layers": 1}),
    # Finds the single rows that must follow the answer, anywhere on the canvas, at every commit.
    "polestar-fresh": (
        Polestar,
        {
            "clusters": "rows",
            "update_threshold": 0,
            "cluster_layers": 1,
            "from_below": "beside",
            "drift": "output",
            "codec": "raw",
        },
    ),
    # The authors' code.
    PolestarWindow.name: (PolestarWindow, {}),
}


def policies_for(sight: Sight) -> list[str]:
    """Names of the policies for models whose rows see `sight`."""
    return [name for name, make in POLICIES.items() if sight in make().sights]


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """The policy named `policy` with these options, which may have their names in official scripts; or `policy` itself,
    if it is a `Policy`.

    Raises:
        TypeError: `policy` is neither a name nor a `Policy`, or an option of a wrong type.
        ValueError: an unknown policy or option, an option out of range or with two values, or options beside a
            `Policy`.
        ImportError: `kmeans` = "faiss" without faiss.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} beside a policy object; set them in the object: {policy}")
        return policy
    make, preset = _known(policy)
    return with_options(make, policy, preset, options)


def with_options(
    make: Callable[..., Policy], policy: str, preset: Mapping[str, Any], options: Mapping[str, Any]
) -> Policy:
    """The policy that `make` returns, with `preset` overridden by `options`. `policy`: its name in messages. Raises as
    `make_policy`."""
    allowed = make().options
    given: dict[str, Any] = {}
    for option, value in options.items():
        name = option if option in allowed else POLICY_ALIASES.get(option, option)
        if make is Auto:
            raise ValueError(f"option {option!r}: policy 'auto' has no options; name a policy that has this one")
        if name not in allowed:
            raise unknown_name(f"option of policy {policy!r}", option, allowed)
        if name in given and given[name] != value:
            raise ValueError(f"{option} = {value!r} contradicts {name} = {given[name]!r}; give one of them")
        given[name] = plain_number(value)
    return make(**{**preset, **given})


def check_arguments(function: Callable[..., Any], policy: str | Policy, options: Iterable[str]) -> None:
    """Raise `ValueError` for an unknown name in `options` that is nearer to a keyword of `function` than to any option
    of a policy. `make_policy` checks the others."""
    known = (policy if isinstance(policy, Policy) else _known(policy)[0]()).options
    own = [name for name, argument in signature(function).parameters.items() if argument.kind is argument.KEYWORD_ONLY]
    anywhere = {*known, *POLICY_ALIASES}.union(*(make().options for make in POLICIES.values()))
    for name in options:
        if name == "trust_remote_code":
            raise ValueError("trust_remote_code is not an argument: code in a checkpoint is never run; leave it out")
        if name not in anywhere and nearest(name, [*own, *anywhere]) not in anywhere:
            raise unknown_name(f"argument of {function.__name__}", name, [*own, *known])


def _known(policy: object) -> tuple[Callable[..., Policy], Mapping[str, Any]]:
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name or a Policy object, not {policy!r}")
    if policy in PRESETS:
        return PRESETS[policy]
    if policy not in POLICIES:
        raise unknown_name("policy", policy, (*POLICIES, *PRESETS))
    return POLICIES[policy], {}
