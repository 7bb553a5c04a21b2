"""What `--model_args` say: the model and its policy to load, and how it answers where a request does not say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiered.core.aliases import resolve_aliases
from tiered.core.budget import MemoryBudget
from tiered.core.checks import unknown_name
from tiered.evaluation.gen_kwargs import GENERATION_NAMES, LENGTH_NAMES
from tiered.loading import from_pretrained
from tiered.options import OPTION_NAMES
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.runtime import Runtime

POLICY_PREFIX = "policy_"


def split_options(options: Mapping[str, Any], named: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the policy, without the prefix `policy_`, and options of `generate`.

    `named`: the arguments beside them, for the error's list.

    Raises:
        ValueError: an option that is neither (names the nearest).
    """
    allowed = (*named, *dict.fromkeys((*GENERATION_NAMES, *LENGTH_NAMES)))
    policy, generation = {}, {}
    for name, value in options.items():
        if name.startswith(POLICY_PREFIX):
            policy[name.removeprefix(POLICY_PREFIX)] = value
        elif name in allowed:
            generation[name] = value
        else:
            error = unknown_name("model argument", name, allowed)
            raise ValueError(f"{error}; an option of the policy is written {POLICY_PREFIX}<option>")
    return policy, generation


def split_length(generation: Mapping[str, Any], *, mask_token_id: int) -> tuple[dict[str, Any], int | None]:
    """Options of `generate` under their own names, and the length that they name; None: they name none.

    Raises:
        ValueError: two lengths that differ, or as `resolve_aliases`.
    """
    lengths = {name: value for name in LENGTH_NAMES if (value := generation.get(name)) is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the answer's length is given as {lengths}; give one of them")
    others = {name: value for name, value in generation.items() if name not in LENGTH_NAMES}
    options = resolve_aliases(others, OPTION_NAMES, mask_token_id=mask_token_id)
    # GIDD's scripts call it max_length.
    length = options.pop("max_new_tokens", None)
    return options, next(iter(lengths.values()), length)


def load(
    pretrained: str | Path | Runtime,
    *,
    policy: str | Policy | None,
    policy_options: Mapping[str, Any],
    memory: MemoryBudget | int | str | None,
    host_memory: int | str | None,
    disk_memory: int | str | None,
    disk_path: str | Path | None,
    dtype: str | torch.dtype,
    device: str | torch.device,
) -> Runtime:
    """The runtime: `pretrained` itself where it is one, under another policy if one is given.

    Raises:
        TierCapacityError, TypeError, ValueError, FileNotFoundError: as `tiered.from_pretrained`; also a budget, a dtype
            or a device beside a model that is loaded already.
    """
    if isinstance(pretrained, Runtime):
        if any(size is not None for size in (memory, host_memory, disk_memory)) or (dtype, device) != ("auto", "auto"):
            raise ValueError("the runtime is loaded already: its memory, dtype and device are those it was loaded with")
        if policy is None and not policy_options:
            return pretrained
        return pretrained.with_policy(policy or pretrained.policy, **policy_options)
    budget = memory
    if not isinstance(memory, MemoryBudget):
        budget = MemoryBudget(device=memory, host=host_memory, disk=disk_memory, disk_path=disk_path)
    return from_pretrained(
        pretrained, policy=policy or DEFAULT_POLICY, memory=budget, dtype=dtype, device=device, **policy_options
    )
