"""Policy: which records leave a tier when another needs the room."""

from collections.abc import Iterable

from tiered.core.features import Tier
from tiered.tiers.record_book import Entry, EntryState


def eviction_order(entries: Iterable[Entry], tier: Tier, spare: Iterable[Entry] = ()) -> list[Entry]:
    """The entries that may leave `tier`, first to go first: those without readers; clean before dirty, since they go
    without a copy; then low drift, which is the least likely to be fetched next; then the longest unused.

    `spare`: entries that stay whatever the order says, because the caller is at work on them.
    """
    kept = {id(entry) for entry in spare}
    candidates = [
        entry
        for entry in entries
        if entry.state is EntryState.STORED and tier in entry.places and not entry.readers and id(entry) not in kept
    ]
    return sorted(candidates, key=lambda entry: (not entry.clean, entry.drift, entry.used))
