"""Copies of records from their homes to the device."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple

from jaxtyping import UInt8
from torch import Tensor

from tiered.core.events import Asked, TierEvent
from tiered.offload.copy_segments import Segment
from tiered.offload.fence import Fence
from tiered.offload.ring import Ring
from tiered.offload.transport import Copy, Lane
from tiered.tiers.tiers import Home
from tiered.tiers.traffic import Traffic

LARGE = 1 << 18  # bytes of a record whose copy takes much longer than a job's start


class Fetch(NamedTuple):
    """Bytes of a record, to be copied to device memory.

    Attributes:
        home: home of the record.
        layer: layer of the model; None for none.
        segments: spans of bytes in the home, and their places in `into`.
        parts: number of the record's parts.
        into, fence: device memory, and its fence.
    """

    home: Home
    layer: int | None
    segments: list[Segment]
    parts: int
    into: UInt8[Tensor, " slot"]
    fence: Fence

    def copies(self, source: UInt8[Tensor, " nbytes"]) -> list[Copy]:
        """The copies from `source`, which holds the bytes of the home."""
        return [Copy(source[at : at + size], self.into[to : to + size]) for at, to, size in self.segments]


class Fetcher:
    """Submits fetches. Small records of a layer in host memory are one job. A large one has its own, so that compute
    may use it before the next arrives. A record in a file takes two jobs."""

    def __init__(self, traffic: Traffic, record: Callable[[TierEvent], None], passing: Ring | None) -> None:
        """`record`: called with events. `passing`: host slots for records in files; None without files."""
        self._traffic, self._record, self._passing = traffic, record, passing

    def send(self, fetches: Iterable[Fetch]) -> None:
        """Submit the copies. Never waits for a copy, except on a thread that has to (`Traffic`)."""
        jobs: defaultdict[Hashable, list[Fetch]] = defaultdict(list)
        for each in fetches:
            nbytes = sum(size for *_, size in each.segments)
            if each.home.memory is None:
                self._load(each)
            else:
                jobs[(each.layer, len(jobs)) if nbytes >= LARGE else each.layer].append(each)
            self._record(Asked(tier=each.home.tier, records=each.parts, nbytes=nbytes))
        for group in jobs.values():
            copies = [copy for each in group if each.home.memory is not None for copy in each.copies(each.home.memory)]
            homes, slots = dict.fromkeys(each.home.fence for each in group), [each.fence for each in group]
            # The job also reads the slots, so it fails if an earlier copy of other parts has failed.
            self._traffic.move(Lane.FETCH, copies, reads=[*homes, *slots], writes=slots, layer=group[0].layer)

    def check_integrity(self) -> None:
        if self._passing is not None:
            self._passing.check_integrity()

    def _load(self, fetch: Fetch) -> None:
        home, layer = fetch.home, fetch.layer
        passing = None if self._passing is None else self._passing.acquire()
        assert passing is not None and home.read is not None, "a record in a file passes through a slot"
        source, guard = passing.bytes[: home.nbytes], passing.fence
        try:
            self._traffic.move(Lane.LOAD, partial(home.read, source), reads=[home.fence], writes=[guard], layer=layer)
            reads = [guard, fetch.fence]
            self._traffic.move(Lane.FETCH, fetch.copies(source), reads=reads, writes=[fetch.fence], layer=layer)
        finally:
            passing.release()
