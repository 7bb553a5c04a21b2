"""Measure the tiers: what codecs cost and lose on real hidden states, races, and the speed of the pieces.

    python bench/tiers.py              # about three minutes on two cores
    python bench/tiers.py --quick      # fewer clusters, schedules and rounds

The embedded model reads a long lookup; the input rows of its layers at a block's first step are clustered, encoded,
offloaded and fetched back by cluster. All of it on the CPU: bench/gpu_day.py measures the link and the kernels of a
CUDA device. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from codec_study import VARIANTS, CodecResult, study_codecs
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from tier_fuzz import run_schedule, without
from torch import Tensor

import tiered
from tiered.clustering.areas import cluster_areas
from tiered.clustering.spherical import spherical_kmeans
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.provenance import provenance
from tiered.embedded import tasks
from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.offload.codecs import CODECS
from tiered.offload.fence import Region
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.tiers.opening import open_tiers

BLOCK = 32
PROMPT_TOKENS = 1024
CLUSTERS = (4, 8, 16, 32, 64)
AUTO = 16  # what clusters="auto" makes of this context: about 64 rows each
LLADA_WIDTH = 4096


def hidden_states() -> tuple[Float[Tensor, "layers length width"], tuple[tuple[int, int], tuple[int, int]]]:
    """The layers' input rows of a lookup and two empty blocks, and the regions beside the first of them."""
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    assert runtime.tokenizer is not None, "the embedded model has a tokenizer"
    chat = [{"role": "user", "content": tasks.sample("lookup", "test", 0, size=PROMPT_TOKENS).prompt}]
    prompt = runtime.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([[*prompt, *[runtime.model.mask_token_id] * (2 * BLOCK)]])
    start, length = len(prompt), ids.shape[1]
    return runtime.hidden_states(ids)[:, 0], ((0, start), (start + BLOCK, length))


def means(results: Sequence[CodecResult]) -> dict[tuple[str, int], CodecResult]:
    """The results by codec and number of clusters, averaged over the layers."""
    groups: dict[tuple[str, int], list[CodecResult]] = defaultdict(list)
    for result in results:
        groups[result.codec, result.clusters].append(result)

    def mean(group: list[CodecResult], name: str) -> float:
        return statistics.fmean(getattr(result, name) for result in group)

    return {
        key: CodecResult(
            codec=key[0],
            clusters=key[1],
            layer=-1,
            sqnr_db=None if group[0].sqnr_db is None else mean(group, "sqnr_db"),
            **{
                name: mean(group, name)
                for name in asdict(group[0])
                if name not in ("codec", "clusters", "layer", "sqnr_db")
            },
        )
        for key, group in groups.items()
    }


def codec_table(averages: dict[tuple[str, int], CodecResult]) -> Table:
    """What the README and the docs show."""
    table = Table(title="input rows of the embedded model's layers, mean over layers", title_justify="left")
    for column in ("codec", "C", "error", "SQNR dB", "B/element", "+ centroids", "of bf16", "encode ns", "decode ns"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for (codec, clusters), mean in averages.items():
        table.add_row(
            codec,
            str(clusters),
            f"{mean.error:.4f}",
            "" if mean.sqnr_db is None else f"{mean.sqnr_db:.1f}",
            f"{mean.bytes_per_element:.4f}",
            f"{mean.centroid_bytes_per_element:.4f}",
            f"{mean.ratio_to_bf16:.3f}",
            f"{mean.encode_ns:.2f}",
            f"{mean.decode_ns:.2f}",
        )
    return table


def layer_table(results: Sequence[CodecResult]) -> Table:
    """The error of each codec in each layer at C = `AUTO`."""
    layers = sorted({result.layer for result in results})
    table = Table(title=f"error by layer, C = {AUTO}", title_justify="left")
    table.add_column("codec")
    for layer in layers:
        table.add_column(str(layer), justify="right")
    for codec in VARIANTS:
        errors = {result.layer: result.error for result in results if (result.codec, result.clusters) == (codec, AUTO)}
        table.add_row(codec, *(f"{errors[layer]:.4f}" for layer in layers))
    return table


def offload(hidden: Tensor, regions: tuple[tuple[int, int], tuple[int, int]], console: Console) -> dict[str, Any]:
    """Every layer's clusters to host memory and back by way of the tier manager, in each codec."""
    indices = cluster_areas(hidden, regions, AUTO)
    report = {}
    for codec in Codec:
        ledger = Ledger()
        with open_tiers(ledger, device="cpu", dtype=hidden.dtype) as tiers:
            begin = time.perf_counter()
            stored = [
                HiddenRecords.store(tiers, rows, index, layer=layer, codec=codec)
                for layer, (rows, index) in enumerate(zip(hidden, indices, strict=True))
            ]
            tiers.synchronize()
            there = time.perf_counter()
            errors = []
            for rows, index, records in zip(hidden, indices, stored, strict=True):
                found = tiers.fetch(records.keys(range(len(records.sizes)))).wait()
                errors.append(((found - rows[index.rows]).norm() / rows[index.rows].norm()).item())
            back = time.perf_counter()
            tiers.check_integrity()
            stats = tiers.stats()
            report[codec.value] = {
                "error": statistics.fmean(errors),
                "records": len(tiers),
                "host_bytes": ledger.held(Tier.HOST),
                "store_ms": 1000 * (there - begin),
                "fetch_ms": 1000 * (back - there),
                "pinned": stats.pinned,
                "ways": stats.as_dict()["ways"],
            }
        console.print(
            f"offloaded as {codec.value}: {report[codec.value]['records']} records, stored in "
            f"{report[codec.value]['store_ms']:.1f} ms, fetched in {report[codec.value]['fetch_ms']:.1f} ms, "
            f"error {report[codec.value]['error']:.4f}"
        )
    return report


def fuzz(schedules: int, tries: int) -> dict[str, Any]:
    """Random schedules; and the same with each wait left out, which must show."""
    corrupt = [seed for seed in range(schedules) if run_schedule(seed).corrupt]
    caught = {
        f"{region.value} {access}": next(
            (seed + 1 for seed in range(tries) if run_schedule(seed, traffic=without(region, access)).corrupt), None
        )
        for region in Region
        for access in ("read", "write")
    }
    return {
        "fuzz_schedules": schedules,
        "fuzz_mismatches": len(corrupt),
        "fuzz_control_caught": sum(count is not None for count in caught.values()),
        "fuzz_controls": len(caught),
        "fuzz_schedules_until_caught": caught,
    }


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Median time of `work`."""
    work()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def decode_over_copy(rounds: int) -> dict[str, float]:
    """Decoding 4096 LLaDA rows to float32, against copying as many bytes as it writes, and as it reads."""
    rows, clusters = 4096, 64
    hidden = torch.randn(rows, LLADA_WIDTH)
    centroids, sizes = torch.randn(clusters, LLADA_WIDTH), [rows // clusters] * clusters
    nbytes = codec_bytes(Codec.NVFP4_DELTA, sizes[0], LLADA_WIDTH, element_bytes=4)
    room = -(-nbytes // 4096) * 4096
    buffer, offsets = torch.empty(room * clusters, dtype=torch.uint8), [room * number for number in range(clusters)]
    out, codec = torch.empty_like(hidden), CODECS[Codec.NVFP4_DELTA]
    codec.encode(hidden, sizes, buffer, offsets, centroids, list(range(clusters)))
    decode = seconds(lambda: codec.decode(buffer, offsets, sizes, out.dtype, out, None, centroids), rounds)
    other, target = torch.empty_like(buffer), torch.empty_like(out)
    return {
        # Throughputs as a ratio: 1 would be as fast as moving the rows that come out.
        "decode_over_copy": seconds(lambda: target.copy_(out), rounds) / decode,
        "decode_over_record_copy": seconds(lambda: other.copy_(buffer), rounds) / decode,
        "decode_elements_per_second": out.numel() / decode,
    }


def kmeans_over_faiss(rounds: int) -> dict[str, Any]:
    """Time of our k-means over that of faiss: same rows, start and number of iterations."""
    ratios = {}
    for rows, width, clusters in ((4096, 256, 16), (4096, LLADA_WIDTH, 64)):
        data = torch.randn(1, rows, width)
        start = data[:, :clusters].clone()

        def run(backend: Any, data: Tensor = data, clusters: int = clusters, start: Tensor = start) -> object:
            return spherical_kmeans(data, clusters, start=start, iterations=10, backend=backend)

        times = {backend: seconds(lambda backend=backend: run(backend), rounds) for backend in ("torch", "faiss")}
        ratios[f"{rows}x{width}, {clusters}"] = times["torch"] / times["faiss"]
    return {"kmeans_over_faiss": ratios[f"4096x{LLADA_WIDTH}, 64"], "kmeans_over_faiss_by_size": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer clusters, schedules and rounds")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    arguments = parser.parse_args()
    clusters = (AUTO,) if arguments.quick else CLUSTERS
    schedules, tries, rounds = (100, 400, 2) if arguments.quick else (1000, 1000, 5)
    console = Console(width=120)

    hidden, regions = hidden_states()
    results = list(study_codecs(hidden, regions, clusters))
    averages = means(results)
    console.print(codec_table(averages), layer_table(results))
    offloaded = offload(hidden, regions, console)
    nbytes = codec_bytes(Codec.NVFP4_DELTA, 64, LLADA_WIDTH, element_bytes=2)
    room = -(-nbytes // 4096) * 4096  # the slot of such a record, a multiple of 4 KiB
    record = {
        "bytes_per_element": nbytes / (64 * LLADA_WIDTH),
        "slot_bytes_per_element": room / (64 * LLADA_WIDTH),
        **{f"error_{codec.value}": averages[codec.value, AUTO].error for codec in Codec},
        "error_nvfp4_delta_mean": averages["nvfp4_delta, mean", AUTO].error,
        **decode_over_copy(rounds),
        **kmeans_over_faiss(rounds),
        **fuzz(schedules, tries),
        "codecs": [asdict(result) for result in averages.values()],
        "layers": [asdict(result) for result in results if result.clusters == AUTO],
        "offloaded": offloaded,
        **provenance(),
    }
    brief = {name: value for name, value in record.items() if name not in ("codecs", "layers", "offloaded")}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(brief))


if __name__ == "__main__":
    main()
