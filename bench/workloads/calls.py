"""One call of a random model: the seconds, rows, bytes and copies that a policy takes for it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from measuring.worker import refusing
from simulation import Link, LinkSpeed, SimulatedThreads

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account
from tiered.core.ledger import Ledger
from tiered.forward.forward_bytes import kv_bytes_per_token
from tiered.forward.library_bytes import gpu_of
from tiered.forward.sizes import RAW, CallShape
from tiered.kernels.row_code import RowCode
from tiered.models.shape import ModelShape
from tiered.models.weight_form import FIXED_WEIGHTS, weight_bytes
from tiered.offload.device import pick_device
from tiered.output import GenerationOutput
from tiered.planning.workload import Workload
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY, random_model

# A fetch ahead that is not wanted any more is given up on its way, so that a slow link moves fewer bytes.
TIMED = ("seconds", "copy_ms", "exposed_ms", "moved_bytes")
BLOCK = 32
_WARM = 256  # tokens of the prompt that goes first: it pays for thread pools, workspaces and late imports


def measure(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row.

    `settings` has "base", a policy's name, with its "options"; "width" and "layers" of the model; "context", tokens of
    the prompt. It has "blocks" of `BLOCK` tokens, with "steps" each; "block" is the `block_length` of the call.
    "budget" is the share of the dual cache's keys and values that fits the device beside its other bytes; None for no
    cap. `settings` may have "kv", the codec of keys and values. "link" has 10⁶ bytes a second in either direction
    between device and host; None for no simulated link.
    """
    yield figures(answered(settings)[1])


def answered(settings: Mapping[str, Any]) -> tuple[Runtime, GenerationOutput]:
    """The runtime that answered the call of `settings`, as `measure` takes them, and its output."""
    context, blocks = settings["context"], settings["blocks"]
    generator = torch.Generator().manual_seed(settings["seed"])
    prompt = torch.randint(0, VOCABULARY - 2, (1, context), generator=generator)
    with refusing():
        runtime = caller(settings)
        runtime.generate(prompt[:, :_WARM], max_new_tokens=BLOCK, steps=settings["steps"], stop_at_eos=False)
        out = runtime.generate(
            prompt,
            max_new_tokens=blocks * BLOCK,
            block_length=settings["block"],
            steps=blocks * settings["steps"],
            stop_at_eos=False,
        )
    return runtime, out


def caller(settings: Mapping[str, Any]) -> Runtime:
    """A random model under the policy, the budget and the link of `settings`."""
    device, link = pick_device(settings["device"]), settings.get("link")
    positions = settings["context"] + settings["blocks"] * BLOCK
    model = random_model(settings["width"], settings["layers"], positions).to(device)
    ledger = Ledger(budget_of(settings, model.shape))
    ledger.allocate({Account.WEIGHTS: weight_bytes(model.shape, model.shape.dtype)})
    speed = LinkSpeed() if link is None else LinkSpeed(bandwidth=1e6 * link)
    return Runtime(
        model,
        policy=make_policy(settings["base"], **settings["options"]),
        ledger=ledger,
        transport=None if link is None else lambda: SimulatedThreads(link=Link(fetch=speed, store=speed)),
        kv=sizes_of(settings, model.shape).kv,
    )


def sizes_of(settings: Mapping[str, Any], shape: ModelShape) -> CallShape:
    """The sizes of the call of `settings`."""
    answer, kv = settings["blocks"] * BLOCK, settings.get("kv", RAW)
    return CallShape(
        shape=shape, batch=1, context=settings["context"] + answer, block_length=settings["block"], answer=answer,
        dtype=shape.dtype, kv=None if kv == RAW else RowCode(kv), gpu=gpu_of(pick_device(settings["device"])),
        weights=FIXED_WEIGHTS,
    )  # fmt: skip


def budget_of(settings: Mapping[str, Any], shape: ModelShape) -> MemoryBudget:
    """The device bytes of the dual cache, weights included, with a share of its keys and values, which are raw."""
    if (share := settings["budget"]) is None:
        return MemoryBudget()
    sizes = sizes_of({**settings, "block": BLOCK, "kv": "raw"}, shape)
    spared = round((1 - share) * sizes.context * kv_bytes_per_token(shape, sizes.dtype))
    return MemoryBudget(device=Workload(make_policy("fast_dllm_dual"), sizes).total() - spared)


def size_of(text: str, first: str) -> dict[str, Any]:
    """Settings of a call's size, PROMPT:BLOCKS:STEPS; `first`: setting for the tokens of the prompt. Raises
    `ValueError`."""
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"size = {text!r}; PROMPT:BLOCKS:STEPS is allowed, as 2048:4:32")
    return {"size": text} | dict(zip((first, "blocks", "steps"), map(int, parts), strict=True))


def figures(out: GenerationOutput) -> dict[str, Any]:
    """Columns of a row. "rows_computed": rows in all forwards of the call, on average over layers; "moved_bytes": bytes
    between tiers, in all directions. Bytes of tiers are peaks, weights included. Copies have their time, and the time
    for which compute stood still."""
    ways = () if out.tiers is None else out.tiers.ways.values()
    return {
        "forwards": out.num_forwards,
        "passes": out.steps_by_kind,
        "rows_computed": sum(out.rows_per_step),
        "moved_bytes": sum(out.memory.moved.values()),
        "device_bytes": out.memory.peak_device_bytes,
        "host_bytes": out.memory.peak_host_bytes,
        "seconds": out.timings.total,
        "copy_ms": sum(way.busy_ns for way in ways) / 1e6,
        "exposed_ms": sum(way.exposed_ns for way in ways) / 1e6,
    }
