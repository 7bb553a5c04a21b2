"""Random schedules of uses, patches and moves of records under random delays, each answer compared bit for bit.

A schedule runs on threads that imitate CUDA streams, or on the streams of a CUDA device. Its few slots are used again
all the time. Records have parts, which lie in another order in their homes. Each operation of compute on a slot is a
job of the transport, in the order of the calls, as kernels are on a stream. `without` proves that schedules find
faults: it leaves one kind of wait out, and an outcome must be corrupt.
"""

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from measuring.device_timer import stand_still
from simulation import Point, SimulatedCuda, SimulatedThreads, compute
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account
from tiered.core.ledger import Ledger
from tiered.offload.copy_segments import Segment
from tiered.offload.errors import CorruptRecordError, TransferError
from tiered.offload.fence import Event, Fence, Region
from tiered.offload.transport import Lane, Transport
from tiered.tiers.parts import Parts, Wanted
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Tiers
from tiered.tiers.traffic import Traffic

PARTS, PART_BYTES, KEYS, SLOTS, HOST = 6, 700, 6, 2, 4
RECORD, ROOM = PARTS * PART_BYTES, 8192


@dataclass(slots=True)
class Outcome:
    """Counts of one schedule: answers compared, wrong ones among them; and errors, of which there should be none."""

    answers: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def corrupt(self) -> bool:
        """True if an answer was wrong, or a copy failed."""
        return bool(self.wrong or self.errors)


def without(region: Region, access: str) -> type[Traffic]:
    """Traffic that leaves out the waits for one `access`, `"read"` or `"write"`, to `region`."""

    class Faulty(Traffic):
        def waits(self, reads: Collection[Fence], writes: Collection[Fence]) -> list[Event]:
            reads = [fence for fence in reads if (fence.region, access) != (region, "read")]
            writes = [fence for fence in writes if (fence.region, access) != (region, "write")]
            return super().waits(reads, writes)

    return Faulty


class Delays:
    """Random delays of a transport's jobs, drawn from `seed`: some lanes are never slow. On a CUDA device, half of them
    hold up a stream, not the host."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device, draw = device, random.Random(seed)
        self.noise = random.Random(seed + 1)  # drawn by several threads: the delays differ from run to run
        self.slowest: dict[object, float] = {lane: draw.choice([0.0, 3e-4, 3e-3]) for lane in (*Lane, None)}

    def transport(self, asynchronous: bool, *, compute_thread: bool = True) -> Transport:
        """A transport, with delays if it is `asynchronous`. Without a `compute_thread`, compute waits and works in the
        caller's thread; CUDA has streams."""
        delay = self.delay if asynchronous else None
        if self.device.type != "cuda":
            return SimulatedThreads(compute_thread=asynchronous and compute_thread, delay=delay)
        return SimulatedCuda(self.device, delay=delay)

    def delay(self, point: Point, lane: Lane | None) -> float:
        """Seconds to sleep at `point`."""
        slowest = self.slowest[lane]
        seconds = self.noise.uniform(0, slowest) if slowest and self.noise.random() < 0.5 else 0.0
        # At these points the job's stream is the current one.
        on_stream = (point, lane) in ((Point.COPY, Lane.FETCH), (Point.COPY, Lane.STORE), (Point.SUBMIT, None))
        if self.device.type == "cuda" and on_stream and seconds and self.noise.random() < 0.5:
            stand_still(self.device, seconds)
            return 0.0
        return seconds


@dataclass(frozen=True)
class Shuffled:
    """Part `order[i]` of a slot is part i of the home."""

    order: tuple[int, ...]
    parts: int = PARTS

    def segments(self, parts: Parts) -> Iterable[Segment]:
        """See `tiered.tiers.parts.Layout`."""
        return [
            Segment(at * PART_BYTES, part * PART_BYTES, PART_BYTES) for at, part in enumerate(self.order) if parts[part]
        ]

    def within(self, start: int, stop: int) -> Iterable[Segment]:
        """The bytes from `start` to `stop` of a slot, from the home to the slot."""
        for at, part in enumerate(self.order):
            first, last = max(start, part * PART_BYTES), min(stop, (part + 1) * PART_BYTES)
            if first < last:
                yield Segment(first + (at - part) * PART_BYTES, first, last - first)


@dataclass
class _Record:
    """`bytes`: bytes that the record should have; `known`: which of them were ever written; `layout`: its layout."""

    bytes: Tensor
    known: Tensor
    layout: Shuffled
    on_host: bool = True


def run_schedule(
    seed: int,
    *,
    steps: int = 40,
    traffic: type[Traffic] = Traffic,
    asynchronous: bool = True,
    device: torch.device | str = "cpu",
) -> Outcome:
    """One schedule of `steps` operations drawn from `seed`. `asynchronous` False: every job ends before the next."""
    with TemporaryDirectory() as folder:
        there = torch.empty(0, device=device).device
        return _Schedule(seed, Path(folder), traffic, asynchronous, there).run(steps)


class _Schedule:
    def __init__(
        self, seed: int, folder: Path, traffic: type[Traffic], asynchronous: bool, device: torch.device
    ) -> None:
        self.device, self.asynchronous, self.draw = device, asynchronous, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.transport = Delays(seed, device).transport(asynchronous)
        budget = MemoryBudget(host=(HOST + 1) * ROOM, disk=KEYS * ROOM, disk_path=folder)
        with patch("tiered.tiers.tiers.Traffic", traffic):
            self.tiers = Tiers(Ledger(budget), device=device, transport=self.transport)
        passing = self.tiers.slots(Region.LOAD_SLOT, 1, ROOM)
        self.residency = Residency(self.tiers.traffic, self.tiers.record, passing)
        self.residency.open(self.tiers.slots(Region.FETCH_SLOT, SLOTS, ROOM))
        self.records: dict[int, _Record] = {}
        self.answers: list[tuple[Tensor, Tensor, Tensor]] = []
        self.outcome = Outcome()

    def run(self, steps: int) -> Outcome:
        operations = [*[self.read, self.write] * 3, self.add, self.sink, self.lift, self.remove, self.rest]
        try:
            for _ in range(steps):
                self.draw.choice(operations)()
                if not self.asynchronous:
                    self.tiers.synchronize()
                self.residency.check_integrity()
                self.tiers.check_integrity()
            for key in self.records:
                self.read(key)
            self.residency.close_slots()
            self.tiers.synchronize()
            self.transport.wait().synchronize()
            for key in list(self.records):
                self.residency.remove(key)
        except (TransferError, CorruptRecordError) as error:
            self.outcome.errors.append(repr(error))
        finally:
            self.tiers.close()
        self.outcome.answers = len(self.answers)
        self.outcome.wrong = sum(not torch.equal(answer[known], right[known]) for answer, right, known in self.answers)
        return self.outcome

    def pick(self, most: int, *, on_host: bool = False) -> list[int]:
        keys = [key for key, record in self.records.items() if record.on_host or not on_host]
        return self.draw.sample(keys, min(len(keys), self.draw.randint(1, most)))

    def ahead(self) -> list[Wanted]:
        return [Wanted(key, self.some_parts()) for key in self.pick(2)] if self.draw.random() < 0.7 else []

    def some_parts(self) -> Parts | None:
        return None if self.draw.random() < 0.5 else np.array([self.draw.random() < 0.5 for _ in range(PARTS)])

    def read(self, key: int | None = None) -> None:
        wanted = [Wanted(each, self.some_parts()) for each in (self.pick(SLOTS) if key is None else [key])]
        views = self.residency.use(wanted, self.ahead())
        for (each, parts), view in zip(wanted, views, strict=True):
            record, out = self.records[each], torch.empty(RECORD, dtype=torch.uint8, device=self.device)  # pyright: ignore[reportArgumentType]
            compute(self.transport, partial(_copy, out, view))
            known = record.known if parts is None else record.known & torch.tensor(parts).repeat_interleave(PART_BYTES)
            self.answers.append((out, record.bytes.clone(), known.clone()))

    def write(self) -> None:
        for key in self.pick(1, on_host=True):
            record = self.records[key]
            start, stop = sorted(self.draw.sample(range(RECORD + 1), 2))
            touched, covered = np.zeros(PARTS, dtype=bool), np.zeros(PARTS, dtype=bool)
            touched[start // PART_BYTES : -(-stop // PART_BYTES)] = True
            covered[-(-start // PART_BYTES) : stop // PART_BYTES] = True
            (view,) = self.residency.use([Wanted(key, touched & ~covered)], self.ahead())
            self.residency.write(key, touched)
            new = torch.randint(0, 256, (stop - start,), dtype=torch.uint8, generator=self.generator)
            compute(self.transport, partial(_copy, view[start:stop], new.to(self.device)))
            self.residency.patch(key, record.layout.within(start, stop))
            record.bytes[start:stop], record.known[start:stop] = new, True

    def add(self) -> None:
        key = self.draw.randrange(KEYS)
        if key in self.records:
            return
        try:
            home = self.tiers.host_home(Account.WEIGHTS, RECORD, ROOM)
        except TierCapacityError:
            return
        record = _Record(
            torch.randint(0, 256, (RECORD,), dtype=torch.uint8, generator=self.generator),
            torch.full((RECORD,), self.draw.random() < 0.7),
            Shuffled(tuple(self.draw.sample(range(PARTS), PARTS))),
        )
        filled = bool(record.known.all())
        if filled and home.memory is not None:
            for at, to, size in record.layout.segments(np.ones(PARTS, dtype=bool)):
                home.memory[at : at + size] = record.bytes[to : to + size].to(home.memory.device)
        self.residency.place(key, home, layout=record.layout, filled=filled)
        self.records[key] = record

    def sink(self) -> None:
        for key in self.pick(1, on_host=True):
            if self.records[key].known.all():
                home = self.tiers.to_scratch(self.residency.home(key), Account.WEIGHTS, ROOM)
                self.residency.move(key, home)
                self.records[key].on_host = False

    def lift(self) -> None:
        below = [key for key, record in self.records.items() if not record.on_host]
        if below:
            key = self.draw.choice(below)
            try:
                home = self.tiers.to_host(self.residency.home(key), Account.WEIGHTS, ROOM)
            except TierCapacityError:
                return
            self.residency.move(key, home)
            self.records[key].on_host = True

    def remove(self) -> None:
        for key in self.pick(1):
            self.residency.remove(key)
            del self.records[key]

    def rest(self) -> None:
        self.residency.rest()


def _copy(into: Tensor, source: Tensor) -> None:
    into.copy_(source)
