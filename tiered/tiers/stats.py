"""Books: figures of the tiers, counted from events alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tiered.core.events import Asked, CopyEnded, Picked, Stored, TierEvent, Waited
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.spans import active
from tiered.offload.lane import Lane

ENDS = {
    Lane.STORE: (Tier.DEVICE, Tier.HOST),
    Lane.FETCH: (Tier.HOST, Tier.DEVICE),
    Lane.SAVE: (Tier.HOST, Tier.DISK),
    Lane.LOAD: (Tier.DISK, Tier.HOST),
}


@dataclass(slots=True)
class WayStats:
    """One direction of copying.

    Attributes:
        jobs, copies: number of jobs, and of their contiguous copies.
        nbytes: bytes that arrived.
        busy_ns: time of the copies, without waits before them.
        failed: number of failed jobs.
        batches: number of times that compute decoded bytes of this direction, or encoded them.
        late, exposed_ns: number of times that compute had to wait for a copy, and the time of these waits.
    """

    jobs: int = 0
    copies: int = 0
    nbytes: int = 0
    busy_ns: int = 0
    failed: int = 0
    batches: int = 0
    late: int = 0
    exposed_ns: int = 0

    @property
    def hidden_ns(self) -> int:
        """Time of copies that overlapped with compute."""
        return max(0, self.busy_ns - self.exposed_ns)

    @property
    def gigabytes_per_second(self) -> float | None:
        """10⁹ bytes a second while copies ran; None before the first copy."""
        return self.nbytes / self.busy_ns if self.busy_ns else None


def _each_lane() -> dict[Lane, WayStats]:
    return {lane: WayStats() for lane in Lane}


@dataclass(slots=True)
class TierStats:
    """Figures of the tiers since they were opened.

    Attributes:
        ways: copies by direction.
        layers: the same by the layer of the records; a job with records of several layers is only in `ways`.
        stored, asked: records, or parts of them, by tier; `asked` by the tier from which a fetch took them.
        experts_used, experts_resident, experts_foreseen: with streamed experts, how many experts of layers rows picked,
            how many of these were in a slot, and how many were guessed a layer ahead.
        pinned_requested, pinned_actual: bytes of host memory requested from the system and allocated by it.
        pinned: whether host memory is page-locked; False on a machine without CUDA.
    """

    ways: dict[Lane, WayStats] = field(default_factory=_each_lane)
    layers: dict[int, dict[Lane, WayStats]] = field(default_factory=dict)
    stored: Counter[Tier] = field(default_factory=Counter)
    asked: Counter[Tier] = field(default_factory=Counter)
    experts_used: int = 0
    experts_resident: int = 0
    experts_foreseen: int = 0
    pinned_requested: int = 0
    pinned_actual: int = 0
    pinned: bool = False

    def restart(self) -> None:
        new = TierStats()
        for each in fields(self):
            setattr(self, each.name, getattr(new, each.name))

    def add(self, event: TierEvent) -> None:
        match event:
            case CopyEnded():
                for way in self._counted(event):
                    way.jobs += 1
                    way.failed += event.failed
                    if not event.failed:
                        way.copies += event.copies
                        way.nbytes += event.nbytes
                        way.busy_ns += event.ended - event.started
            case Stored():
                self.stored[event.tier] += event.records
            case Asked():
                self.asked[event.tier] += event.records
            case Picked():
                self.experts_used += event.used
                self.experts_resident += event.resident
                self.experts_foreseen += event.foreseen
            case Waited():
                for way in self._counted(event):
                    way.batches += 1
                    way.late += event.late
                    way.exposed_ns += event.exposed_ns

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON, in which layer numbers are strings."""
        layers = {str(layer): _plain(ways) for layer, ways in sorted(self.layers.items())}
        by_tier = {
            name: {tier.value: records for tier, records in getattr(self, name).items()} for name in ("stored", "asked")
        }
        return asdict(self) | by_tier | {"ways": _plain(self.ways), "layers": layers}

    def _counted(self, event: CopyEnded | Waited) -> Iterator[WayStats]:
        """The statistics that count `event`: the total, and its layer's if it has one."""
        yield self.ways[event.lane]
        if event.layer is not None:
            yield self.layers.setdefault(event.layer, _each_lane())[event.lane]


def _plain(ways: Mapping[Lane, WayStats]) -> dict[str, dict[str, Any]]:
    return {
        way.value: asdict(stats) | {"hidden_ns": stats.hidden_ns, "gigabytes_per_second": stats.gigabytes_per_second}
        for way, stats in ways.items()
    }


def reporting(stats: TierStats, ledger: Ledger) -> Callable[[TierEvent], None]:
    """A function that counts an event in `stats` and transfers in `ledger`, and passes it to recorders of the call."""

    def report(event: TierEvent) -> None:
        stats.add(event)
        if (recorder := active()) is not None:
            recorder.events.append(event)
        if isinstance(event, CopyEnded) and not event.failed:
            ledger.record_transfer(*ENDS[event.lane], event.nbytes)

    return report
