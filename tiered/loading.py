"""Loading a checkpoint: config, budget, weights, tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account
from tiered.core.ledger import Ledger
from tiered.models.weight_form import weight_bytes
from tiered.forward.sizes import kv_code
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import load_weights
from tiered.models.config_source import read_config
from tiered.models.families import family_of
from tiered.models.locate import checkpoint_directory
from tiered.models.rotation import stretched
from tiered.models.shape import BYTES_PER_ELEMENT
from tiered.models.tokenizer import load_tokenizer
from tiered.offload.device import pick_device
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.policies.registry import check_arguments, make_policy
from tiered.runtime import Runtime
from tiered.tiers.opening import check_disk


def from_pretrained(
    path_or_name: str | Path,
    *,
    policy: str | Policy = DEFAULT_POLICY,
    memory: MemoryBudget | int | str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kv: str = "raw",
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    **policy_options: Any,
) -> Runtime:
    """Load a checkpoint.

    Args:
        path_or_name: a directory in Hugging Face's layout, the id of a model in the local hub cache, "embedded" or
            "embedded-uniform".
        policy: caching policy, by name (with `policy_options`) or as an object; "auto": chosen before each call
            (`Runtime.choose`).
        memory: hard cap on what the runtime holds: a size of the device tier, or a `MemoryBudget`; None: no cap.
        dtype: of weights, features and activations: "float32", "bfloat16", "float16"; "auto": the checkpoint's.
        device: "cpu", "cuda", "cuda:N"; "auto": CUDA where there is any.
        kv: how keys and values are kept: "raw", in `dtype`; "fp8", a byte an element, or "nvfp4", half of one and a
            little: answers depend on it, and on no budget. "auto": raw, but fp8 in calls whose raw ones do not fit the
            budget, or would slow steps down by having to be streamed; such a call warns.
        rope_theta: another base of the rotation, for contexts past the trained one, or of a checkpoint that was trained
            further; None: the config's.
        rope_scaling: in place of the config's, as config.json has it ("linear", "ntk", "yarn"), or as "yarn:4";
            "default": none; None: the config's. `generate` then takes so many times the trained positions.

    Raises:
        TierCapacityError: the weights alone exceed the device budget, or the disk has less free than the disk budget;
            nothing has been loaded.
        OSError: no file can be made in the budget's `disk_path`.
        NonFiniteError: a weight is NaN or infinite, or would be in `dtype`.
        ValueError, TypeError, FileNotFoundError: anything wrong with the checkpoint or an argument, named.
    """
    check_arguments(from_pretrained, policy, policy_options)
    chosen = make_policy(policy, **policy_options)
    budget = MemoryBudget.of(memory)
    check_disk(budget)
    ledger = Ledger(budget)
    target = pick_device(device)
    directory = checkpoint_directory(path_or_name)
    config = stretched(read_config(directory), rope_theta, rope_scaling)
    family = family_of(config)
    shape = family.shape(config)
    code = kv_code(kv, shape)
    dtype_name = shape.dtype if dtype == "auto" else str(dtype).removeprefix("torch.")
    if dtype_name not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype = {dtype!r}; allowed: 'auto', {', '.join(map(repr, BYTES_PER_ELEMENT))}")
    with torch.device("meta"):
        model: DiffusionModel = family.resolve_loader().from_config(config)
    tokenizer = load_tokenizer(directory, vocab_size=shape.vocab_size)
    ledger.allocate(
        {Account.WEIGHTS: weight_bytes(shape, dtype_name)},
        hint="raise `memory`, or load the weights in a smaller dtype",
    )
    load_weights(model, directory, dtype=getattr(torch, dtype_name), device=target)
    return Runtime(model, policy=chosen, ledger=ledger, tokenizer=tokenizer, name=str(path_or_name), kv=code)
