"""A random model in files, and a runtime of it whose layers stream under a budget, over a transport."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tiered.core.budget import MemoryBudget
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.forward.sizes import CallShape
from tiered.forward.weight_bytes import LOAD_SLOTS, WeightBytes
from tiered.loading import load_weights
from tiered.models.checkpoint import Checkpoint
from tiered.models.families import family_of
from tiered.models.locate import read_config
from tiered.models.shape import ModelShape
from tiered.models.weight_form import RAW_WEIGHTS, WeightForm
from tiered.offload.device import pick_device
from tiered.offload.transport import Transport
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.runtime import Runtime
from workloads.models import save_random


@contextmanager
def random_files(width: int, layers: int, context: int) -> Iterator[Path]:
    """The folder of a random model in float32, gone behind the `with`."""
    with TemporaryDirectory() as folder:
        save_random(Path(folder), width, layers, context)
        yield Path(folder)


def shape_of(folder: Path) -> ModelShape:
    """The shape of the model in `folder`."""
    config = read_config(folder)
    return family_of(config).shape(config)


def sizes_of(shape: ModelShape, context: int, form: WeightForm, *, block: int | None = None) -> CallShape:
    """Sizes of a call of one sequence of `context` positions whose answer is a `block`; None for one plain forward."""
    return CallShape(
        shape=shape, batch=1, context=context, block_length=block or context, answer=block, dtype=shape.dtype,
        weights=form,
    )  # fmt: skip


def all_streamed(policy: Policy, sizes: CallShape) -> int:
    """The device bytes in which a call has just room if all layers stream, and no feature does."""
    weights = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights)
    needed = CallBytes.of(policy, sizes, MemoryBudget(), weights=weights)
    return replace(needed, weights=weights.streaming(weights.most)).total(Tier.DEVICE)


def least_host(sizes: CallShape) -> int:
    """The host bytes in which streamed layers just pass by: a ring, and the slot through which a code is written."""
    slot = WeightBytes.of(sizes.shape, sizes.dtype, sizes.weights).slot_bytes
    return (LOAD_SLOTS + (sizes.weights.code is not None)) * slot


def opened(
    folder: Path,
    policy: Policy,
    budget: MemoryBudget,
    *,
    device: str,
    form: WeightForm = RAW_WEIGHTS,
    transport: Callable[[], Transport] | None = None,
) -> Runtime:
    """The model in `folder` as `tiered.from_pretrained` would have it, with copies by `transport`."""
    config, target = read_config(folder), pick_device(device)
    family, shape = family_of(config), shape_of(folder)
    with torch.device("meta"):
        model: Any = family.resolve_loader().from_config(config)
    checkpoint, ledger = Checkpoint(folder, shape, config), Ledger(budget)
    of: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": target, "transport": transport}
    weights = load_weights(model, checkpoint, ledger, form=form, **of)
    return Runtime(model, policy=policy, ledger=ledger, transport=transport, weights=weights)
