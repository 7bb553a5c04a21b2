"""Where the tiers report what they do: the one source of statistics and of the ledger's transfers."""

from copy import deepcopy

from tiered.core.events import CopyEnded, Event, Way
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.spans import active
from tiered.offload.arena import ArenaStats
from tiered.tiers.stats import TierStats

ENDS = {
    Way.STORE: (Tier.DEVICE, Tier.HOST),
    Way.FETCH: (Tier.HOST, Tier.DEVICE),
    Way.SPILL: (Tier.HOST, Tier.DISK),
    Way.LOAD: (Tier.DISK, Tier.HOST),
}


class Journal:
    """Counts events."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stats = TierStats()

    def add(self, event: Event) -> None:
        """Count `event`, and show it to whoever records the call."""
        self._stats.add(event)
        if (recorder := active()) is not None:
            recorder.add(event)
        if isinstance(event, CopyEnded) and not event.failed:
            self._ledger.record_transfer(*ENDS[event.way], event.nbytes)

    def stats(self, host: ArenaStats) -> TierStats:
        """A copy of the statistics, with what the host tier holds."""
        stats = deepcopy(self._stats)
        stats.pinned_requested, stats.pinned_actual = host.held_bytes, host.actual_bytes
        stats.pinned = host.pinned
        return stats
