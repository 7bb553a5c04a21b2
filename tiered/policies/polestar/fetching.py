"""The fetches of one update: what is sent for ahead, and how many clusters came which way."""

from collections import Counter
from collections.abc import Sequence

from tiered.policies.polestar.layer_state import LayerState
from tiered.policies.polestar.members import Cluster
from tiered.tiers.stored_rows import StoredRows


class Fetching:
    """Sends clusters to the device before they are read. Counts them as `GroupUpdate` has it."""

    def __init__(self, stored: StoredRows) -> None:
        self._stored, self._fetched = stored, stored.fetched_bytes
        self._guessed: Sequence[Cluster] = ()
        self._counts: Counter[str] = Counter()

    def guess(self, state: LayerState, clusters: Sequence[Cluster]) -> None:
        """Send the clusters that the next `ask` will probably want."""
        self._guessed = clusters
        self._stored.send(state.layer, state.stored(clusters))

    def ask(self, state: LayerState, clusters: list[Cluster]) -> list[Cluster]:
        """Send `clusters` and return them. Wrong guesses are given up."""
        right = sum(cluster in clusters for cluster in self._guessed)
        wrong, self._guessed = len(self._guessed) - right, ()
        self._counts.update(ahead=right, on_demand=len(clusters) - right, in_vain=wrong)
        self._stored.recall()
        return self._sent(state, clusters)

    def refetch(self, state: LayerState, clusters: list[Cluster]) -> list[Cluster]:
        """Send clusters of which only some members were recomputed, and return them."""
        self._counts["repairs"] += len(clusters)
        return self._sent(state, clusters)

    def counts(self) -> Counter[str]:
        """The counts since the last call of `counts`."""
        counts, self._counts = self._counts, Counter()
        earlier, self._fetched = self._fetched, self._stored.fetched_bytes
        counts["fetched_bytes"] = self._fetched - earlier
        return counts

    def _sent(self, state: LayerState, clusters: list[Cluster]) -> list[Cluster]:
        if clusters:  # else the layer may store none
            self._stored.send(state.layer, state.stored(clusters))
        return clusters
