"""Random schedules of stores and fetches under random delays, each answer compared bit for bit.

A schedule runs on threads that imitate CUDA streams, or on the streams of a CUDA device, with small tiers so that slots
are used again all the time. The oracle encodes and decodes each record on the spot, in the caller's thread. What a
schedule proves is only worth what it would find: `without` gives the same tiers with one wait left out, and a
corruption must show.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from measuring.device_timer import stand_still
from simulation import Point, SimulatedCuda, SimulatedThreads
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.offload.codecs import CODECS
from tiered.offload.errors import TransferError
from tiered.offload.fence import Event, Fence, Region
from tiered.offload.transport import Lane, Transport
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey
from tiered.tiers.ticket import Ticket
from tiered.tiers.traffic import Traffic

WIDTH, MOST_ROWS, KEYS = 96, 10, 10
SLOT_BYTES = 16384  # four records, so a store of four is all or nothing
HOST_SLABS = 4


@dataclass(slots=True)
class Outcome:
    """What one schedule came to: answers compared, those that were wrong, and errors that no schedule should meet."""

    answers: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def corrupt(self) -> bool:
        """Whether something was not as the oracle has it."""
        return bool(self.wrong or self.errors)


def without(region: Region, access: str) -> type[Traffic]:
    """Traffic that leaves one kind of wait out: `access` is `"read"` or `"write"`, of `region`."""

    class Faulty(Traffic):
        def waits(self, reads: Collection[Fence], writes: Collection[Fence]) -> list[Event]:
            reads = [fence for fence in reads if (fence.region, access) != (region, "read")]
            writes = [fence for fence in writes if (fence.region, access) != (region, "write")]
            return super().waits(reads, writes)

    return Faulty


def run_schedule(
    seed: int,
    *,
    steps: int = 30,
    traffic: type[Traffic] = Traffic,
    asynchronous: bool = True,
    device: torch.device | str = "cpu",
) -> Outcome:
    """One schedule of `steps` operations drawn from `seed`. `asynchronous` False: every job ends before the next.

    On a CUDA `device` half of the delays hold up a stream, not the host.
    """
    there = torch.empty(0, device=device).device  # with its number, as tensors say it
    return _Schedule(seed, traffic, asynchronous, there).run(steps)


class Delays:
    """Random delays of a transport's jobs, drawn from `seed`: some lanes are never slow."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device, draw = device, random.Random(seed)
        self.noise = random.Random(seed + 1)  # drawn by several threads: the delays differ from run to run
        self.slowest: dict[object, float] = {lane: draw.choice([0.0, 3e-4, 3e-3]) for lane in (*Lane, None)}

    def transport(self, asynchronous: bool) -> Transport:
        """What carries copies; with delays if it is `asynchronous`."""
        delay = self.delay if asynchronous else None
        if self.device.type != "cuda":
            return SimulatedThreads(compute_thread=asynchronous, delay=delay)
        return SimulatedCuda(self.device, delay=delay)

    def delay(self, point: Point, lane: Lane | None) -> float:
        """Seconds to sleep at `point`."""
        slowest = self.slowest[lane]
        seconds = self.noise.uniform(0, slowest) if slowest and self.noise.random() < 0.5 else 0.0
        # At these points the current stream is the one that the job goes on.
        on_stream = (point, lane) in ((Point.COPY, Lane.FETCH), (Point.COPY, Lane.STORE), (Point.SUBMIT, None))
        if self.device.type == "cuda" and on_stream and seconds and self.noise.random() < 0.5:
            stand_still(self.device, seconds)
            return 0.0
        return seconds


class _Schedule:
    def __init__(self, seed: int, traffic: type[Traffic], asynchronous: bool, device: torch.device) -> None:
        self.device = device
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        budget = MemoryBudget(host=HOST_SLABS * SLOT_BYTES)
        with patch("tiered.tiers.tiers.Traffic", traffic):
            self.tiers = open_tiers(
                Ledger(budget),
                device=device,
                slot_bytes=SLOT_BYTES,
                fetch_slots=2,
                store_slots=1,
                transport=Delays(seed, device).transport(asynchronous),
            )
        self.told = self.draw.choice([0.0, 0.0, 0.5, 1.0])  # how many fetches say where their rows go
        self.asynchronous = asynchronous
        self.expected: dict[RecordKey, Tensor] = {}
        self.open: list[tuple[Ticket, Tensor]] = []
        self.answers: list[tuple[Tensor, Tensor]] = []
        self.outcome = Outcome()

    def run(self, steps: int) -> Outcome:
        operations = [*[self.store, self.fetch, self.wait] * 2, self.store, self.forget]
        try:
            for _ in range(steps):
                try:
                    self.draw.choice(operations)()
                except TierCapacityError:  # tickets without a destination hold what was replaced
                    self.wait()
                if not self.asynchronous:
                    self.tiers.synchronize()
                self.tiers.check_integrity()
            while self.open:
                self.wait()
            self.tiers.synchronize()
        except (TransferError, TierCapacityError) as error:
            self.outcome.errors.append(repr(error))
        finally:
            self.tiers.close()
        self.outcome.answers = len(self.answers)
        self.outcome.wrong = sum(not torch.equal(answer, expected) for answer, expected in self.answers)
        return self.outcome

    def keys(self, most: int) -> list[RecordKey]:
        parts = self.draw.sample(range(KEYS), self.draw.randint(1, most))
        return [RecordKey(Feature.HIDDEN, 0, 0, part) for part in parts]

    def store(self) -> None:
        keys, codec = self.keys(4), self.draw.choice(list(Codec))
        sizes = [self.draw.randint(1, MOST_ROWS) for _ in keys]
        rows = torch.randn(sum(sizes), WIDTH, generator=self.generator).to(self.device)
        bank = clusters = None
        if codec.needs_base:
            bank = self.tiers.bank(torch.randn(3, WIDTH, generator=self.generator).to(self.device))
            clusters = [self.draw.randrange(3) for _ in keys]
        expected = [
            round_trip(part, codec, None if bank is None or clusters is None else bank.centroids[clusters[number]])
            for number, part in enumerate(rows.split(sizes))
        ]
        tier = self.draw.choice([Tier.HOST, Tier.HOST, Tier.DEVICE])
        try:
            self.tiers.store(keys, rows, sizes, codec=codec, bank=bank, clusters=clusters, tier=tier)
        finally:
            if bank is not None:
                bank.release()
        self.expected.update(zip(keys, expected, strict=True))

    def fetch(self) -> None:
        keys = [key for key in self.keys(5) if key in self.expected]
        if not keys:
            return
        expected, out, rows = torch.cat([self.expected[key] for key in keys]), None, None
        if self.draw.random() < self.told:  # the tiers may decode it whenever they need its staging slot
            out = torch.full_like(expected, torch.nan)
            rows = torch.randperm(len(out), generator=self.generator).to(self.device)
        self.open.append((self.tiers.fetch(keys, out, rows), expected if rows is None else expected[rows.argsort()]))

    def wait(self) -> None:
        if self.open:
            ticket, expected = self.open.pop(self.draw.randrange(len(self.open)))
            if self.draw.random() < 0.1:
                ticket.close()
                return
            self.answers.append((ticket.wait(), expected))

    def forget(self) -> None:
        keys = [key for key in self.keys(1) if key in self.expected]
        self.tiers.forget(keys)
        for key in keys:
            del self.expected[key]


def round_trip(rows: Tensor, codec: Codec, centroid: Tensor | None) -> Tensor:
    """`rows` [n, width] encoded and decoded on the spot, against `centroid` [width] where the codec has one."""
    nbytes = len(rows) * codec.row_bytes(rows.shape[1], rows.element_size())
    record, out = torch.empty(nbytes, dtype=torch.uint8, device=rows.device), torch.empty_like(rows)
    centroids, clusters = (None, None) if centroid is None else (centroid[None], [0])
    CODECS[codec].encode(rows, [len(rows)], record, [0], centroids, clusters)
    CODECS[codec].decode(record, [0], [len(rows)], rows.dtype, out, None, centroids)
    return out
