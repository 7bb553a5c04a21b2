"""Layers that stream over a slowed link, beside resident ones and a loop that waits for every copy.

On a GPU the ratio of a forward of LLaDA-8B and the copy of its layers follows from data sheets (`tiered.core.rates`).
The forward is timed here, and the link slowed down until its copy has the same ratio to it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from measuring.worker import refusing
from simulation import Link, LinkSpeed, SimulatedThreads
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.rates import rates_of
from tiered.models.weight_form import RAW_WEIGHTS, layer_bytes
from tiered.offload.fence import Event
from tiered.offload.lane import Lane
from tiered.offload.transport import Copy, TransferEvent
from tiered.output import GenerationOutput
from tiered.planning.times import forward_seconds
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from tiered.tiers.stats import WayStats
from workloads.models import VOCABULARY
from workloads.streamed_model import all_streamed, opened, random_files, shape_of, sizes_of

AS_LONG = "as long"
# The GPU of each link between host and device; None if a copy takes as long as the forward.
LINKS: dict[str, str | None] = {"PCIe 4 (RTX 4090)": "rtx4090", "PCIe 5 (H100)": "h100", AS_LONG: None}
CONTEXT, BLOCK = 4096, 32  # of the call on a GPU
TIMED = (
    "resident_ms", "streamed_ms", "synchronous_ms", "bound_ms", "copy_ms", "exposed_ms", "hidden_share", "over_bound",
    "over_synchronous",
)  # fmt: skip


def copy_over_forward(policy: str, link: str) -> float:
    """The copy of all layers of LLaDA-8B over the most frequent forward of `policy`. That is a full pass without a
    cache, else a step over a block, of one sequence of `CONTEXT` positions in bfloat16."""
    if (gpu := LINKS[link]) is None:
        return 1.0
    made, rates = make_policy(policy), rates_of(gpu)
    sizes = tiered.plan("llada-8b", context=CONTEXT, block_length=BLOCK, policy=policy, device=gpu).sizes
    seconds, _ = forward_seconds(made, sizes, CONTEXT if policy == "none" else BLOCK, 0, rates)
    return sizes.shape.layers * layer_bytes(sizes.shape, sizes.dtype) / rates.link_bytes_per_second / seconds


class WaitingTransport(SimulatedThreads):
    """Every copy blocks its caller: a layer is fetched, computed, and the next one fetched."""

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        event = super().copy(lane, copies, after)
        event.synchronize()
        return event


def measure(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row: the same call with resident layers, with all of them streamed, and with every copy waited for.

    `settings` has "policy", "link", "width" and "layers" of the model, "context" (tokens of the prompt) and "steps" of
    one block of `BLOCK` tokens. For the columns see `figures`.
    """
    policy, device, steps = make_policy(settings["policy"]), settings["device"], settings["steps"]
    ratio = copy_over_forward(settings["policy"], settings["link"])
    draws = torch.Generator().manual_seed(settings["seed"])
    prompt = torch.randint(0, VOCABULARY - 2, (1, settings["context"]), generator=draws)
    positions = settings["context"] + BLOCK
    with refusing(), random_files(settings["width"], settings["layers"], positions) as folder:
        sizes = sizes_of(shape_of(folder), positions, RAW_WEIGHTS, block=BLOCK)
        nbytes = sizes.shape.layers * layer_bytes(sizes.shape, sizes.dtype)
        resident = answered(opened(folder, policy, MemoryBudget(), device=device), prompt, steps)
        # A cache begins the block with a full pass, of which there are few in a long answer.
        copy = ratio * median(resident.timings.steps[settings["policy"] != "none" :])
        link = Link(fetch=LinkSpeed(bandwidth=nbytes / copy))
        cap = MemoryBudget(device=all_streamed(policy, sizes))
        streamed, waiting = (
            answered(opened(folder, policy, cap, device=device, transport=partial(kind, link=link)), prompt, steps)
            for kind in (SimulatedThreads, WaitingTransport)
        )
    for other in (streamed, waiting):
        assert torch.equal(other.sequences, resident.sequences), "streamed layers answer as resident ones do"
    assert streamed.weights is not None, "there is no room for resident layers"
    way, asked = streamed.weights.ways[Lane.FETCH], sum(streamed.weights.asked.values())
    # Of records, not of bytes: the copies at the call's edges end now in it, now before or behind it.
    assert asked >= sizes.shape.layers * streamed.num_forwards, "all layers stream"
    alone, beside, one_by_one = (out.timings.steps for out in (resident, streamed, waiting))
    yield figures(alone, beside, one_by_one, [copy] * len(alone), way) | {"forward_ratio": ratio}


def figures(
    resident: Sequence[float],
    streamed: Sequence[float],
    waiting: Sequence[float],
    copies: Sequence[float],
    way: WayStats,
) -> dict[str, float]:
    """Columns of a row, by seconds of all forwards of three calls. `copies`: seconds of each forward's copies, by the
    speed of the link; `way`: copies of the `streamed` call. Times are of a forward, on average.

    "bound_ms": forward by forward the longer of computing, as with resident layers, and of copying. "hidden_share":
    hidden time over the time that computing could hide. That is, forward by forward, the shorter of computing and of
    the copies as they went. If copies take longer than computing, the rest cannot be hidden.
    """
    count, total = len(resident), sum(streamed)
    busy = way.busy_ns / 1e9
    slower = busy / sum(copies)
    could = sum(min(each, slower * copy) for each, copy in zip(resident, copies, strict=True))
    bound = sum(max(each, copy) for each, copy in zip(resident, copies, strict=True))
    means = {"resident": sum(resident), "streamed": total, "synchronous": sum(waiting), "bound": bound}
    return {f"{name}_ms": 1e3 * seconds / count for name, seconds in means.items()} | {
        "copy_ms": 1e3 * busy / count,
        "exposed_ms": way.exposed_ns / 1e6 / count,
        # Beside copies computing may take longer than without.
        "hidden_share": min(1.0, way.hidden_ns / 1e9 / could),
        "over_bound": total / bound,
        "over_synchronous": total / sum(waiting),
    }


def answered(runtime: Runtime, prompt: Tensor, steps: int) -> GenerationOutput:
    """The answer to `prompt`, after another one that pays for thread pools and workspaces."""
    call = {"max_new_tokens": BLOCK, "block_length": BLOCK, "stop_at_eos": False}
    with runtime:
        runtime.generate(prompt, steps=2, **call)
        return runtime.generate(prompt, steps=steps, **call)
