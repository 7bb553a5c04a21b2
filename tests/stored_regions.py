"""Regions of stored rows, the rows that a read has to give, and copies that fail."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from round_trip import round_trip
from simulation import Point
from torch import Tensor

from tiered.core.features import Tier
from tiered.offload.codec_bytes import Codec
from tiered.offload.lane import Lane
from tiered.tiers.record_bytes import RecordBytes, StoredCluster
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers

WIDTH, SIZES, RECORD_ROWS, SLOTS = 48, (3, 9, 1, 6, 5), 4, 3
ROWS, CLUSTERS, REGIONS, LAYERS = 26, 6, 2, (1, 3)  # room for two more rows, and one more cluster


class Faults:
    """Raises what a test has set, at the next copy of that lane."""

    def __init__(self) -> None:
        self.next: dict[Lane, BaseException] = {}

    def __call__(self, point: Point, lane: Lane | None) -> float:
        if point is Point.COPY and lane is not None and lane in self.next:
            raise self.next.pop(lane)
        return 0.0


def needed(codec: Codec = Codec.RAW, tier: Tier = Tier.HOST, **changes: Any) -> RecordBytes:
    sizes = {"rows": ROWS, "clusters": CLUSTERS, "record_rows": RECORD_ROWS, "slots": SLOTS * (tier is Tier.HOST)}
    return RecordBytes(
        tier=tier,
        codec=codec,
        regions=REGIONS * len(LAYERS),
        row_bytes=codec.row_bytes(WIDTH, 4),
        centroid_bytes=4 * WIDTH if codec.needs_base else 0,
        **{**sizes, **changes},
    )


def of_region(region: int, sizes: Sequence[int] = SIZES) -> list[StoredCluster]:
    edges = pairwise(accumulate(sizes, initial=0))
    return [StoredCluster(region, number, slice(*edge)) for number, edge in enumerate(edges)]


class Rows:
    """Rows as stored, and the rows that each cluster has to give."""

    def __init__(self, tiers: Tiers, codec: Codec = Codec.RAW, tier: Tier = Tier.HOST, **changes: Any) -> None:
        self.codec, self.stored = codec, StoredRows(tiers, needed(codec, tier, **changes), REGIONS)
        self.right: dict[tuple[int, int, int], Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def store(self, layer: int, clusters: Sequence[StoredCluster]) -> None:
        sizes = [one.rows.stop - one.rows.start for one in clusters]
        rows, centroids = (torch.randn(count, WIDTH, generator=self.generator) for count in (sum(sizes), len(sizes)))
        for one, part, centroid in zip(clusters, rows.split(sizes), centroids, strict=True):
            self.right[layer, one.region, one.cluster] = round_trip(part, self.codec, centroid)
        self.stored.store(layer, clusters, rows, centroids)
        rows.fill_(torch.nan)  # the caller's
        centroids.fill_(torch.nan)

    def fill(self) -> None:
        for layer in LAYERS:
            for region in range(REGIONS):
                self.store(layer, of_region(region))

    def check(self, layer: int, clusters: Sequence[StoredCluster]) -> None:
        """They come back, each to its place, and nothing else is written."""
        rights = [self.right[layer, one.region, one.cluster] for one in clusters]
        out = torch.full((1 + sum(len(right) + 1 for right in rights), WIDTH), torch.nan)
        expected, places, end = out.clone(), [slice(0)] * len(rights), len(out) - 1
        for number, right in enumerate(rights):  # the first one last
            places[number] = slice(end - len(right), end)
            expected[places[number]] = right
            end = places[number].start - 1
        self.stored.read(layer, clusters, out, places)
        self.stored.check_integrity()
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32))

    def check_all(self) -> None:
        for layer in LAYERS:
            self.check(layer, [one for region in range(REGIONS) for one in of_region(region)])
