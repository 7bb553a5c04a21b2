"""The fetch of an update as the tier manager does it: M records of nvfp4_delta to the device and decoded there."""

import math
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gpu_parts.moved_bytes import checked, speeds
from gpu_parts.setting import Setting
from tiered.clustering.cluster_index import ClusterIndex
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec, codec_bytes
from tiered.offload.codecs import CODECS
from tiered.offload.device_timer import device_times
from tiered.offload.slabs import UNIT
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.tiers.opening import open_tiers

ROUNDS = 9
_CLUSTERS = (4, 16, 64, 256)  # fetched at a time


def cases(setting: Setting) -> list[str]:
    """By how many clusters are fetched at a time."""
    return [f"delta fetch {count} clusters" for count in ((2, 6) if setting.tiny else _CLUSTERS)]


def measure(setting: Setting, case: str, *, peak: float) -> dict[str, Any]:
    """Time from `fetch` until what waits for the ticket is done, decoding included, beside that of its bytes at `peak`
    bytes a second. The answer has to be, bit for bit, what encoding and decoding on the spot gives."""
    wanted = int(case.split()[2])
    clusters, rows, width = (8, 4, 128) if setting.tiny else (512, 64, 4096)
    generator = torch.Generator(setting.on).manual_seed(setting.seed)
    hidden, index = _clustered(clusters, rows, width, generator, setting.on)
    order = torch.Generator().manual_seed(setting.seed)
    drawn = [torch.randperm(clusters, generator=order)[:wanted].tolist() for _ in range(ROUNDS)]
    out = torch.empty(wanted * rows, width, dtype=hidden.dtype, device=setting.on)
    with open_tiers(Ledger(), device=hidden.device, dtype=hidden.dtype) as tiers:
        records = HiddenRecords.store(tiers, hidden, index, layer=0)
        tiers.synchronize()
        turns = cycle(drawn)
        times = device_times(lambda: tiers.fetch(records.keys(next(turns))).wait(out), setting.on, rounds=ROUNDS)
        out.fill_(torch.nan)
        ticket = tiers.fetch(records.keys(drawn[0]))
        columns = torch.cat([index.rows.split(index.sizes)[cluster] for cluster in drawn[0]])
        ticket.wait(out)
        tiers.synchronize()
        tiers.check_integrity()
    expected = torch.empty_like(hidden)
    expected[index.rows] = _on_the_spot(hidden[index.rows], index)
    wrong = int((out != expected[columns]).any(dim=1).sum())
    there = hidden[columns].double()
    error = float((out.double() - there).norm() / there.norm())
    figures = speeds(ticket.nbytes, times)
    return {
        "record_bytes": ticket.nbytes // wanted,
        "route": "tier manager",
        "bytes": ticket.nbytes,
        **figures,
        "fetch_us": 1e-3 * ticket.nbytes / figures["gb_per_s"],
        "floor_us": 1e6 * ticket.nbytes / peak,
        "peak_gb_per_s": peak / 1e9,
        "over_peak": 1e9 * figures["gb_per_s"] / peak,
        "error": error if math.isfinite(error) else None,
        **checked(f"{wrong} of {len(out)} rows are not the encoded ones" if wrong else None),
    }


def _clustered(
    clusters: int, rows: int, width: int, generator: torch.Generator, device: torch.device
) -> tuple[Float[Tensor, "length width"], ClusterIndex]:
    """Rows about one centre for each cluster, scattered over a canvas, and the index that knows where they are."""
    length = clusters * rows
    centres = torch.randn(clusters, width, device=device, generator=generator)
    noise = torch.randn(length, width, device=device, generator=generator)
    columns = torch.randperm(length, device=device, generator=generator).view(clusters, rows).sort(dim=1).values
    hidden = torch.empty(length, width, dtype=torch.bfloat16, device=device)
    hidden[columns.flatten()] = (centres.repeat_interleave(rows, dim=0) + 0.3 * noise).bfloat16()
    index = ClusterIndex(
        rows=columns.flatten(),
        sizes=(rows,) * clusters,
        counts=torch.full((clusters,), rows, device=device),
        shares=(clusters,),
        centroids=hidden[columns].float().mean(dim=1),
        medoids=columns[:, 0].clone(),
    )
    return hidden, index


def _on_the_spot(rows: Float[Tensor, "n width"], index: ClusterIndex) -> Float[Tensor, "n width"]:
    """`rows`, cluster after cluster, encoded and decoded in one buffer of the device, without any tier."""
    codec, centroids = CODECS[Codec.NVFP4_DELTA], index.centroids.to(rows.dtype)
    nbytes = codec_bytes(Codec.NVFP4_DELTA, max(index.sizes), rows.shape[1], element_bytes=rows.element_size())
    room = -(-nbytes // UNIT) * UNIT
    offsets = [room * number for number in range(index.clusters)]
    buffer, out = torch.empty(room * index.clusters, dtype=torch.uint8, device=rows.device), torch.empty_like(rows)
    codec.encode(rows, index.sizes, buffer, offsets, centroids, list(range(index.clusters)))
    codec.decode(buffer, offsets, index.sizes, rows.dtype, out, None, centroids)
    return out
