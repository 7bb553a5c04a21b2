"""Measure what of the copies an update hides, with copies slowed down to a GPU's link beside this machine's attention.

    python bench/overlap.py [--quick] [--out FILE.json]

On a GPU, the attention of a block over a long context takes as long as reading the keys and values, and a copy as long
as its bytes over the link. Their ratio follows from data sheets; the attention of a random model is timed here, and the
link is slowed down until one layer's copy takes the same share of it. Nothing here is a measurement of a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from step_cost import BLOCK_LENGTH, VOCABULARY, random_model

from tiered.core.provenance import provenance
from tiered.core.rows import Rows
from tiered.core.whole_file import write_then_rename
from tiered.forward.forward import Forward
from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.offload.lane import Lane
from tiered.offload.link import Link, LinkSpeed
from tiered.offload.thread_transport import ThreadTransport
from tiered.policies.polestar.policy import Polestar
from tiered.runtime import Runtime

# Bytes a second: of the memory, from data sheets; of the link, what pinned copies reach of 31.5 and 63 GB/s.
GPUS = {
    "PCIe 4 beside 1008 GB/s (RTX 4090)": (1.008e12, 25e9),
    "PCIe 5 beside 3350 GB/s (H100)": (3.35e12, 52e9),
}
TOP_M, ROWS = 4, 64
LLADA_WIDTH = 4096


def copy_over_attention(context: int, memory: float, link: float) -> float:
    """The fetch of `TOP_M` records over the attention of a block, in one layer of LLaDA-8B in bfloat16."""
    copy = codec_bytes(Codec.NVFP4_DELTA, TOP_M * ROWS, LLADA_WIDTH, element_bytes=2, records=TOP_M) / link
    return copy / (2 * context * LLADA_WIDTH * 2 / memory)


@contextmanager
def timed_attention(wanted: int) -> Iterator[list[float]]:
    """Seconds of every attention of so many rows meanwhile."""
    seconds, attention = [], Forward.attention

    def timed(self: Forward, layer: int, rows: Rows, normed: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        result = attention(self, layer, rows, normed)
        if rows.count == wanted:
            seconds.append(time.perf_counter() - began)
        return result

    Forward.attention = timed
    try:
        yield seconds
    finally:
        Forward.attention = attention


def measure(model: Any, prompt: torch.Tensor, ratio: float | None, seconds: float, prefetch: int) -> dict[str, Any]:
    """One call with an update at every other step, whose fetches take `ratio` of `seconds` in each layer."""
    shape = model.shape
    nbytes = codec_bytes(Codec.NVFP4_DELTA, TOP_M * ROWS, shape.width, element_bytes=4, records=TOP_M)
    link = Link() if ratio is None else Link(fetch=LinkSpeed(bandwidth=nbytes / (ratio * seconds)))
    policy = Polestar(top_m=TOP_M, update_threshold=1, prefetch_layers=prefetch)
    runtime = Runtime(model, policy=policy, transport=lambda: ThreadTransport(link=link))
    with timed_attention(BLOCK_LENGTH) as times:
        out = runtime.generate(
            prompt, max_new_tokens=BLOCK_LENGTH, block_length=BLOCK_LENGTH, steps=16, stop_at_eos=False
        )
    assert out.tiers is not None, "the policy keeps hidden states"
    layers = {}
    for layer, ways in sorted(out.tiers.layers.items()):
        fetch = ways[Lane.FETCH]
        if fetch.busy_ns:
            layers[layer] = {
                "copy_ms": fetch.busy_ns / 1e6,
                "exposed_ms": fetch.exposed_ns / 1e6,
                "hidden_share": fetch.hidden_ns / fetch.busy_ns,
                "copies": fetch.jobs,
                "bytes": fetch.nbytes,
            }
    total = out.tiers.ways[Lane.FETCH]
    return {
        "prefetch_layers": prefetch,
        "copy_over_attention": ratio,
        "updates": out.passes.get("update", 0),
        "update_ms": 1000 * statistics.median(out.timings.steps[1:]),
        "attention_ms": 1000 * statistics.median(times),
        "copy_ms": total.busy_ns / 1e6,
        "exposed_ms": total.exposed_ns / 1e6,
        "hidden_share": total.hidden_ns / max(1, total.busy_ns),
        "clusters": {
            name: sum(getattr(update, name) for update in out.updates)
            for name in ("ahead", "on_demand", "in_vain", "repairs")
        },
        "layers": layers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and context, for a first look")
    parser.add_argument("--out", type=Path, help="also write the last line there")
    arguments = parser.parse_args()
    width, layers, context = (256, 5, 1024) if arguments.quick else (512, 8, 4096)
    model = random_model(width, layers, context)
    prompt = torch.randint(0, VOCABULARY - 2, (1, context - BLOCK_LENGTH))
    seconds = measure(model, prompt, None, 0.0, 0)["attention_ms"] / 1000
    print(f"{layers} layers, d {width}, {context} positions; attention of a block {1000 * seconds:.2f} ms a layer")
    rows: list[dict[str, Any]] = []
    for name, (memory, link) in GPUS.items():
        ratio = copy_over_attention(context, memory, link)
        for prefetch in (0, 1):
            row: dict[str, Any] = {"link": name} | measure(model, prompt, ratio, seconds, prefetch)
            rows.append(row)
            shares = " ".join(f"{layer}: {100 * of['hidden_share']:.0f}" for layer, of in row["layers"].items())
            print(
                f"{name}, {prefetch} layers ahead: copy {ratio:.2f} of attention, {row['copy_ms']:.1f} ms copied, "
                f"{row['exposed_ms']:.1f} exposed, {100 * row['hidden_share']:.1f} % hidden; by layer {shares}"
            )
    record = {"device": "cpu", "positions": context, "width": width, "rows": rows} | provenance()
    if arguments.out:
        write_then_rename(arguments.out, lambda part: part.write_text(json.dumps(record, indent=1) + "\n"))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
