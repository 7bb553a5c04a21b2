"""One call of a random model: the seconds, rows, bytes and copies that a policy takes for it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from measuring.worker import refusing

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account
from tiered.core.ledger import Ledger
from tiered.forward.forward_bytes import kv_bytes_per_token, weight_bytes
from tiered.forward.library_bytes import gpu_of
from tiered.forward.sizes import CallSizes
from tiered.models.llada import LLaDA
from tiered.offload.device import pick_device
from tiered.offload.link import Link, LinkSpeed
from tiered.offload.thread_transport import ThreadTransport
from tiered.output import GenerationOutput
from tiered.planning.workload import Workload
from tiered.policies.fast_dllm import FastDLLMDual
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY, random_model

# What is fetched ahead and not wanted any more is given up on its way, so that a slow link moves fewer bytes.
TIMED = ("seconds", "copy_ms", "exposed_ms", "moved_bytes")
BLOCK = 32
_WARM = 256  # tokens of the prompt that goes first: it pays for thread pools, workspaces and whatever is imported late


def measure(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row.

    `settings` has "base", a policy's name, with its "options"; "width" and "layers" of the model; "context", tokens of
    the prompt; "blocks" of `BLOCK` tokens, with so many "steps" each; "block", the `block_length` that they are
    answered in, `BLOCK` or all of them; "budget", the share of the dual cache's keys and values that the device has
    room for beside all else that the dual cache takes (None: no cap); and "link", 10⁶ bytes a second in either
    direction between device and host (None: what the memory gives).
    """
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
    yield figures(out)


def caller(settings: Mapping[str, Any]) -> Runtime:
    """A random model under the policy, the budget and the link of `settings`."""
    device, share, link = pick_device(settings["device"]), settings["budget"], settings["link"]
    positions = settings["context"] + settings["blocks"] * BLOCK
    model = random_model(settings["width"], settings["layers"], positions).to(device)
    ledger = Ledger(MemoryBudget(device=None if share is None else budget_bytes(model, positions, share, device)))
    ledger.allocate({Account.WEIGHTS: weight_bytes(model.shape, model.shape.dtype)})
    speed = LinkSpeed() if link is None else LinkSpeed(bandwidth=1e6 * link)
    return Runtime(
        model,
        policy=make_policy(settings["base"], **settings["options"]),
        ledger=ledger,
        transport=None if link is None else lambda: ThreadTransport(link=Link(fetch=speed, store=speed)),
    )


def budget_bytes(model: LLaDA, positions: int, share: float, device: torch.device) -> int:
    """What the dual cache takes of the device, weights included, for a call of so many positions, with `share` of its
    keys and values."""
    shape, dtype = model.shape, model.shape.dtype
    sizes = CallSizes(
        shape=shape, batch=1, context=positions, block_length=BLOCK, dtype=dtype, gpu=gpu_of(device)
    )  # fmt: skip
    dual = Workload(FastDLLMDual(), sizes)
    return dual.total() - round((1 - share) * positions * kv_bytes_per_token(shape, dtype))


def figures(out: GenerationOutput) -> dict[str, Any]:
    """Columns of a row. "rows_computed": in all forwards of the call, on average over layers; "moved_bytes": between
    tiers, in all directions; bytes of tiers: peaks, weights included; copies: their time, and that which compute stood
    still for them."""
    ways = () if out.tiers is None else out.tiers.ways.values()
    return {
        "forwards": out.num_forwards,
        "passes": out.passes,
        "rows_computed": sum(out.rows_per_forward),
        "moved_bytes": sum(out.memory.moved.values()),
        "device_bytes": out.memory.peak_device_bytes,
        "host_bytes": out.memory.peak_host_bytes,
        "seconds": out.timings.total,
        "copy_ms": sum(way.busy_ns for way in ways) / 1e6,
        "exposed_ms": sum(way.exposed_ns for way in ways) / 1e6,
    }
