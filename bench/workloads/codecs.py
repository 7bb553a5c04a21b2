"""Codecs and tiers on the embedded model's hidden states: losses and costs, offloading, decoding, k-means."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch
from jaxtyping import Float
from measuring.table import Row
from stored_clusters import clusters_of, host_bytes
from torch import Tensor
from training import tasks

import tiered
from tiered.clustering.areas import cluster_areas
from tiered.clustering.faiss_backend import faiss_lloyd
from tiered.clustering.kmeans import lloyd
from tiered.clustering.unit_rows import UnitRows
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode
from tiered.offload import codecs as coding
from tiered.offload.codec_bytes import Codec
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers
from workloads import input_rows

BLOCK, PROMPT_TOKENS = 32, 1024
BF16_BYTES = 2
Areas = tuple[tuple[int, int], tuple[int, int]]


def hidden_states() -> tuple[Float[Tensor, "layers length width"], Areas]:
    """The layers' input rows of a lookup and two empty blocks, and the areas beside the first of them."""
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    assert runtime.tokenizer is not None, "the embedded model has a tokenizer"
    chat = [{"role": "user", "content": tasks.sample("lookup", "test", 0, size=PROMPT_TOKENS).prompt}]
    prompt = runtime.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([[*prompt, *[runtime.model.mask_token_id] * (2 * BLOCK)]])
    return input_rows.hidden_states(runtime, ids)[:, 0], ((0, len(prompt)), (len(prompt) + BLOCK, ids.shape[1]))


@torch.no_grad()
def keys_values() -> Iterator[Row]:
    """Keys and values of every layer in their codes. They are scaled by token and head, as they are kept. And they are
    scaled by channel of a head over all tokens, which would have to be known before they come."""
    runtime, (hidden, _) = tiered.from_pretrained("embedded", policy="none", device="cpu"), hidden_states()
    model = runtime.model
    rotary = model.rotary(torch.arange(hidden.shape[1])[None])
    for layer, rows in enumerate(hidden):
        made = model.keys_values(layer, model.attention_norm(layer, rows[None]), rotary)
        for (name, values), code in product(zip(("keys", "values"), made, strict=True), RowCode):
            channel = values.abs().amax(dim=2, keepdim=True).log2().ceil().exp2()
            for by, scale in {"token": torch.ones_like(channel), "channel": channel}.items():
                off = CodedRows.of(values / scale, code).values() * scale - values
                yield {
                    "codec": f"{code}, by {by}",
                    "of": name,
                    "layer": layer,
                    "error": (off.norm() / values.norm()).item(),
                }


@torch.no_grad()
def codecs(clusters: int) -> Iterator[Row]:
    """Every codec on every layer: "error" is ‖decoded - rows‖ / ‖rows‖, "sqnr_db" -20 log₁₀ of it. Bytes an element are
    those of the records, scales included, of centroids in bfloat16, and of both over the rows' in bfloat16. Encoding
    and decoding are in ns an element."""
    hidden, areas = hidden_states()
    for layer, index in enumerate(cluster_areas(hidden, areas, clusters)):
        rows = hidden[layer][index.rows]
        width, elements, out, numbers = rows.shape[1], rows.numel(), torch.empty_like(rows), torch.arange(len(rows))
        of_row = torch.arange(index.clusters).repeat_interleave(torch.tensor(index.sizes))
        for codec in Codec:
            # If the codec keeps the model's dtype, elements are of bfloat16, as of a released model.
            stored = len(rows) * codec.row_bytes(width, BF16_BYTES)
            buffer = torch.empty(len(rows), codec.row_bytes(width, rows.element_size()), dtype=torch.uint8)
            base = RowBase(index.centroids, of_row) if codec.needs_base else None
            encode = seconds(lambda: coding.encode(codec, rows, buffer, numbers, base))  # noqa: B023
            decode = seconds(lambda: coding.decode(codec, buffer, numbers, out, numbers, base))  # noqa: B023
            error = ((out.double() - rows.double()).norm() / rows.double().norm()).item()
            extra = index.clusters * width * BF16_BYTES if codec.needs_base else 0
            yield {
                "codec": codec.value,
                "layer": layer,
                "error": error,
                "sqnr_db": -20 * math.log10(error) if error else None,
                "bytes_per_element": stored / elements,
                "centroid_bytes_per_element": extra / elements,
                "ratio_to_bf16": (stored + extra) / (BF16_BYTES * elements),
                "encode_ns": 1e9 * encode / elements,
                "decode_ns": 1e9 * decode / elements,
            }


def offload(clusters: int) -> Iterator[Row]:
    """Every layer's clusters to host memory and back through the tiers, in each codec."""
    hidden, areas = hidden_states()
    indices = cluster_areas(hidden, areas, clusters)
    wanted = [rows[index.rows] for rows, index in zip(hidden, indices, strict=True)]
    found, most = [torch.empty_like(rows) for rows in wanted], max(index.clusters for index in indices)
    for codec in Codec:
        ledger, needed = Ledger(), host_bytes(wanted[0], most, codec, layers=len(wanted))
        with Tiers(ledger, device=hidden.device) as tiers:
            stored = StoredRows(tiers, needed, 1)
            begin = time.perf_counter()
            for layer, (rows, index) in enumerate(zip(wanted, indices, strict=True)):
                stored.store(layer, clusters_of(index.sizes), rows, index.centroids)
            tiers.synchronize()
            there = time.perf_counter()
            for layer, (out, index) in enumerate(zip(found, indices, strict=True)):
                own = clusters_of(index.sizes)
                stored.read(layer, own, out, [cluster.rows for cluster in own])
            tiers.synchronize()
            back = time.perf_counter()
            stored.check_integrity()
            tiers.check_integrity()
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
            took = {"store_ms": 1e3 * (there - begin), "fetch_ms": 1e3 * (back - there)}
            records = needed.regions * -(-needed.rows // needed.record_rows)
            held = {"records": records, "host_bytes": ledger.held(Tier.HOST)}
            yield {"codec": codec.value, "error": statistics.fmean(errors)} | held | took


def decode(rounds: int = 5) -> Iterator[Row]:
    """Throughput of decoding 4096 rows of d = 4096, of 64 clusters, to float32. It is over that of copying the decoded
    rows, and of copying the encoded ones. And bytes an element of an encoded row."""
    width, count, codec = 4096, 64, Codec.NVFP4_DELTA
    hidden, numbers = torch.randn(width, width), torch.arange(width)
    base = RowBase(torch.randn(count, width), numbers * count // width)
    buffer, out = torch.empty(width, codec.row_bytes(width, BF16_BYTES), dtype=torch.uint8), torch.empty_like(hidden)
    target, other = torch.empty_like(out), torch.empty_like(buffer)
    coding.encode(codec, hidden, buffer, numbers, base)
    took = seconds(lambda: coding.decode(codec, buffer, numbers, out, numbers, base), rounds)
    yield {
        "over_copy": seconds(lambda: target.copy_(out), rounds) / took,
        "over_record_copy": seconds(lambda: other.copy_(buffer), rounds) / took,
        "bytes_per_element": buffer.shape[1] / width,
    }


def kmeans(width: int, clusters: int, rounds: int = 5) -> Iterator[Row]:
    """Time of our k-means over that of faiss: 4096 rows, the same start, ten iterations."""
    data = torch.randn(1, 4096, width)
    start = torch.nn.functional.normalize(data[:, :clusters], dim=-1)
    ours, theirs = (
        seconds(lambda: run(UnitRows.of(data), start, 10), rounds)  # noqa: B023
        for run in (lloyd, faiss_lloyd)
    )
    yield {"over_faiss": ours / theirs}


def seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """Median time of `work`, after one call without a clock."""
    work()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
