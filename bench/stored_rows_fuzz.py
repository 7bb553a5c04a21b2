"""Random stores and reads of clusters under random delays, each answer compared bit for bit.

A schedule is as in `residency_fuzz`, with few slots and small records. Its oracle encodes and decodes the rows of each
cluster on the spot. The caller's thread encodes and decodes rows, so compute waits there.
"""

import random
from itertools import pairwise
from unittest.mock import patch

import torch
from residency_fuzz import Delays, Outcome
from round_trip import round_trip
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.offload.errors import TransferError
from tiered.tiers.record_bytes import RecordBytes, StoredCluster
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers
from tiered.tiers.traffic import Traffic

WIDTH, ROWS, REGIONS, LAYERS, MOST_CLUSTERS = 32, 40, 2, 2, 9
Key = tuple[int, int, int]  # a layer, a region of it, and a cluster of that


def run_schedule(
    seed: int,
    *,
    steps: int = 30,
    traffic: type[Traffic] = Traffic,
    asynchronous: bool = True,
    device: torch.device | str = "cpu",
) -> Outcome:
    """One schedule, as `residency_fuzz.run_schedule`."""
    return _Schedule(seed, traffic, asynchronous, torch.empty(0, device=device).device).run(steps)


class _Schedule:
    def __init__(self, seed: int, traffic: type[Traffic], asynchronous: bool, device: torch.device) -> None:
        self.device, self.asynchronous, self.draw = device, asynchronous, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        needed = _needed(self.draw)
        self.codec, self.outcome = needed.codec, Outcome()
        transport = Delays(seed, device).transport(asynchronous, compute_thread=False)
        with patch("tiered.tiers.tiers.Traffic", traffic):
            self.tiers = Tiers(Ledger(MemoryBudget()), device=device, transport=transport)
        self.stored = StoredRows(self.tiers, needed, REGIONS)
        self.clusters = [_cut(self.draw, region) for region in range(REGIONS)]
        self.expected: dict[Key, Tensor] = {}  # rows that are stored

    def run(self, steps: int) -> Outcome:
        operations = [*[self.store, self.read] * 3, self.send, self.send, self.recall]
        try:
            for _ in range(steps):
                self.draw.choice(operations)()
                if not self.asynchronous:
                    self.tiers.synchronize()
                self.stored.check_integrity()
                self.tiers.check_integrity()
            for layer in range(LAYERS):
                self.read(layer)
        except TransferError as error:
            self.outcome.errors.append(repr(error))
        finally:
            self.tiers.close()
        return self.outcome

    def store(self) -> None:
        layer, own = self.draw.randrange(LAYERS), self.draw.choice(self.clusters)
        clusters = self.draw.sample(own, self.draw.randint(1, len(own)))
        sizes = [one.rows.stop - one.rows.start for one in clusters]
        rows = torch.randn(sum(sizes), WIDTH, generator=self.generator).to(self.device)
        centroids = torch.randn(len(clusters), WIDTH, generator=self.generator).to(self.device)
        for one, part, centroid in zip(clusters, rows.split(sizes), centroids, strict=True):
            self.expected[layer, one.region, one.cluster] = round_trip(part, self.codec, centroid)
        self.stored.store(layer, clusters, rows, centroids)
        for given in (rows, centroids):  # the caller may overwrite them again
            given.fill_(torch.nan)

    def pick(self, layer: int) -> list[StoredCluster]:
        known = [self.clusters[region][cluster] for of, region, cluster in self.expected if of == layer]
        return self.draw.sample(known, self.draw.randint(min(1, len(known)), len(known)))

    def send(self) -> None:
        layer = self.draw.randrange(LAYERS)
        self.stored.send(layer, self.pick(layer))

    def recall(self) -> None:
        self.stored.recall()

    def read(self, layer: int | None = None) -> None:
        layer = self.draw.randrange(LAYERS) if layer is None else layer
        clusters = self.pick(layer)
        stored = [self.expected[layer, one.region, one.cluster] for one in clusters]
        places, stop = [slice(0)] * len(stored), 1  # a row that is not written
        for number in self.draw.sample(range(len(stored)), len(stored)):
            places[number] = slice(stop, stop + len(stored[number]))
            stop = places[number].stop
        out = torch.full((stop, WIDTH), torch.nan, device=self.device)
        right = out.clone()
        for rows, place in zip(stored, places, strict=True):
            right[place] = rows
        self.stored.read(layer, clusters, out, places)
        self.outcome.answers += 1
        self.outcome.wrong += not torch.equal(out.view(torch.int32), right.view(torch.int32))


def _needed(draw: random.Random) -> RecordBytes:
    codec, tier = draw.choice(list(Codec)), draw.choice([Tier.HOST] * 5 + [Tier.DEVICE])
    return RecordBytes(
        tier=tier,
        codec=codec,
        regions=REGIONS * LAYERS,
        rows=ROWS,
        row_bytes=codec.row_bytes(WIDTH, 4),
        clusters=MOST_CLUSTERS,
        centroid_bytes=4 * WIDTH if codec.needs_base else 0,
        record_rows=draw.choice([3, 7, 16, ROWS]),
        slots=draw.choice([1, 2, 3, 5]) if tier is Tier.HOST else 0,
    )


def _cut(draw: random.Random, region: int) -> list[StoredCluster]:
    """Rows of a region from its first one on, in clusters."""
    edges = sorted({0, *draw.sample(range(1, ROWS + 1), draw.randint(1, MOST_CLUSTERS))})
    return [StoredCluster(region, number, slice(*edge)) for number, edge in enumerate(pairwise(edges))]
