"""Every policy by name."""

from dataclasses import fields
from typing import Any

from tiered.names import unknown_name
from tiered.policies.base import Policy
from tiered.policies.fast_dllm import FastDLLMDual, FastDLLMPrefix
from tiered.policies.none import NoCache

# A new policy is one file and one entry here.
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (NoCache, FastDLLMPrefix, FastDLLMDual)}


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """The policy of that name with these options; a `Policy` object passes through.

    Raises:
        TypeError: neither a name nor a policy.
        ValueError: no such policy or option (names the nearest one), or options beside a policy object.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} beside a policy object; set them in the object: {policy}")
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name or a Policy object, not {policy!r}")
    if policy not in POLICIES:
        raise unknown_name("policy", policy, POLICIES)
    allowed = [field.name for field in fields(POLICIES[policy])]
    for option in options:
        if option not in allowed:
            raise unknown_name(f"option of policy {policy!r}", option, allowed)
    return POLICIES[policy](**options)
