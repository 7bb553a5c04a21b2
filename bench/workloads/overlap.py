"""Copies that an update hides, slowed down to a GPU's link beside this machine's attention.

On a GPU, the attention of a block over a long context takes as long as reading the keys and values. A copy takes as
long as its bytes over the link. Their ratio follows from data sheets. The attention of the model is timed here, and the
link is slowed down until one layer's copy takes the same share of it.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from measuring.worker import refusing
from simulation import Link, LinkSpeed, SimulatedThreads

from tiered.core.ops import Op
from tiered.core.spans import recording
from tiered.offload.codec_bytes import Codec
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.policies.polestar.policy import Polestar
from tiered.runtime import Runtime
from workloads.subjects import loaded, prompts
from workloads.timing import Timing

# Bytes a second: of the memory, from data sheets; of the link, as pinned copies reach of 31.5 and 63 GB/s.
GPUS = {
    "PCIe 4 beside 1008 GB/s (RTX 4090)": (1.008e12, 25e9),
    "PCIe 5 beside 3350 GB/s (H100)": (3.35e12, 52e9),
}
TOP_M, ROWS, LLADA_WIDTH = 4, 64, 4096
OF = ("layer",)
TIMED = ("copy_ms", "exposed_ms", "hidden_share", "update_ms", "attention_ms")


def copy_over_attention(context: int, memory: float, link: float) -> float:
    """The fetch of `TOP_M` records over the attention of a block, in one layer of LLaDA-8B in bfloat16."""
    copy = TOP_M * ROWS * Codec.NVFP4_DELTA.row_bytes(LLADA_WIDTH, 2) / link
    return copy / (2 * context * LLADA_WIDTH * 2 / memory)


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A row for each layer that fetches, and first one for all (`layer` -1), of a call that updates at every other
    step. `settings` has those of a model, "positions", "answer" (one block), "steps" and "link"."""
    ratio = copy_over_attention(settings["positions"], *GPUS[settings["link"]])
    with refusing():
        runtime = loaded(settings, paths, settings["positions"])
        width = runtime.model.shape.width
        _, attention = answered(runtime, settings, Link())
        nbytes = TOP_M * ROWS * Codec.NVFP4_DELTA.row_bytes(width, 4)
        out, _ = answered(runtime, settings, Link(fetch=LinkSpeed(bandwidth=nbytes / (ratio * attention))))
    assert out.tiers is not None, "the policy keeps hidden states"
    of_all = {"copy_over_attention": ratio, "updates": out.steps_by_kind.get("update", 0)}
    of_all |= {"attention_ms": 1e3 * attention, "update_ms": 1e3 * median(out.timings.steps[1:])}
    for name in ("ahead", "on_demand", "in_vain", "repairs"):  # clusters
        of_all[name] = sum(getattr(update, name) for update in out.updates)
    for layer, ways in ((-1, out.tiers.ways), *sorted(out.tiers.layers.items())):
        way = ways[Lane.FETCH]
        if layer == -1 or way.busy_ns:
            figures = {"copy_ms": way.busy_ns / 1e6, "exposed_ms": way.exposed_ns / 1e6, "bytes": way.nbytes}
            figures |= {"hidden_share": way.hidden_ns / max(1, way.busy_ns), "copies": way.jobs}
            yield {"layer": layer} | figures | (of_all if layer == -1 else {})


def answered(runtime: Runtime, settings: Mapping[str, Any], link: Link) -> tuple[GenerationOutput, float]:
    """The answer with copies over `link`, and seconds that the attention of a block takes in a layer."""
    policy = Polestar(top_m=TOP_M, update_threshold=1)
    runtime = Runtime(runtime.model, policy=policy, transport=lambda: SimulatedThreads(link=link))
    answer = settings["answer"]
    call = {"max_new_tokens": answer, "block_length": answer, "steps": settings["steps"], "stop_at_eos": False}
    timing = Timing()
    with recording(timing):
        out = runtime.generate(prompts(settings, settings["positions"] - answer), **call)
    # The first in a layer is the block's, the next that of renewed rows; and the first forward's is of all rows.
    of_block = dict[tuple[int, int | None], int]()
    for each in timing.ranges:
        if each.op is Op.ATTENTION and each.forward:
            of_block.setdefault((each.forward, each.layer), each.own_ns)
    return out, median(of_block.values()) / 1e9
