"""Books: what the tiers did, counted from events alone."""

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
        jobs, copies: how often it was asked, and in how many contiguous pieces.
        nbytes: bytes that arrived.
        busy_ns: time that the copies took, waits before them left out.
        failed: jobs that failed.
        batches, late: how often compute decoded what came this way or encoded what goes it, and how often it stood
            still for a copy; `exposed_ns` for how long.
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
        """Time of copies during which compute went on."""
        return max(0, self.busy_ns - self.exposed_ns)

    @property
    def gigabytes_per_second(self) -> float | None:
        """10⁹ bytes a second while copies ran; None before the first."""
        return self.nbytes / self.busy_ns if self.busy_ns else None


def _each_lane() -> dict[Lane, WayStats]:
    return {lane: WayStats() for lane in Lane}


@dataclass(slots=True)
class TierStats:
    """What the tiers did since they were opened.

    Attributes:
        ways: copies by direction.
        layers: the same by the layer of the records; what moved records of several layers at once is in `ways` alone.
        stored, asked: records, or parts of them, by tier. `asked` says where a fetch found them.
        experts_used, experts_resident, experts_foreseen: experts of layers that rows picked, while experts are
            streamed; those that were in a slot then; those that were guessed a layer ahead.
        pinned_requested, pinned_actual: bytes of host memory asked of the system and given by it.
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
        """Plain types only, for JSON, which has strings for the numbers of layers."""
        layers = {str(layer): _plain(ways) for layer, ways in sorted(self.layers.items())}
        by_tier = {
            name: {tier.value: records for tier, records in getattr(self, name).items()} for name in ("stored", "asked")
        }
        return asdict(self) | by_tier | {"ways": _plain(self.ways), "layers": layers}

    def _counted(self, event: CopyEnded | Waited) -> Iterator[WayStats]:
        """Where `event` counts: in all, and in its layer if it has one."""
        yield self.ways[event.lane]
        if event.layer is not None:
            yield self.layers.setdefault(event.layer, _each_lane())[event.lane]


def _plain(ways: Mapping[Lane, WayStats]) -> dict[str, dict[str, Any]]:
    return {
        way.value: asdict(stats) | {"hidden_ns": stats.hidden_ns, "gigabytes_per_second": stats.gigabytes_per_second}
        for way, stats in ways.items()
    }


def reporting(stats: TierStats, ledger: Ledger) -> Callable[[TierEvent], None]:
    """Where tiers report what they do: it is counted in `stats`, as transfers in `ledger`, and shown to what records
    the call."""

    def report(event: TierEvent) -> None:
        stats.add(event)
        if (recorder := active()) is not None:
            recorder.events.append(event)
        if isinstance(event, CopyEnded) and not event.failed:
            ledger.record_transfer(*ENDS[event.lane], event.nbytes)

    return report
