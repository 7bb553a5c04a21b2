"""The fetches of updates, ahead and on demand, and their counts."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Bool

from tiered.policies.polestar.layer_state import LayerState
from tiered.policies.polestar.members import Cluster
from tiered.tiers.stored_rows import StoredRows

Clusters = Sequence[Sequence[int]]  # numbers of clusters, by sequence
Recomputed = Bool[np.ndarray, "batch length"]


class Fetching:
    """Sends clusters to the device before they are read, unless all of their columns are `recomputed`. Counts them for
    `GroupUpdate`."""

    def __init__(self, stored: StoredRows) -> None:
        self._stored, self._fetched = stored, stored.fetched_bytes
        self._guessed: list[Cluster] = []
        self._counts: Counter[str] = Counter()

    def guess(self, state: LayerState, clusters: Clusters, recomputed: Recomputed) -> list[Cluster]:
        """Send the clusters that the next `ask` will probably need. Returns the sent ones."""
        self._guessed = self._sent(state, clusters, recomputed)
        return self._guessed

    def ask(self, state: LayerState, clusters: Clusters, recomputed: Recomputed) -> list[Cluster]:
        """Send `clusters`, and cancel wrong guesses. Returns the sent ones."""
        self._stored.recall()
        sent = self._sent(state, clusters, recomputed)
        right = sum(cluster in sent for cluster in self._guessed)
        wrong, self._guessed = len(self._guessed) - right, []
        self._counts.update(ahead=right, on_demand=len(sent) - right, in_vain=wrong)
        return sent

    def refetch(
        self, state: LayerState, clusters: Clusters, recomputed: Recomputed, asked: Collection[Cluster] = ()
    ) -> list[Cluster]:
        """Send clusters to be stored anew, except those in `asked`. Returns the sent ones."""
        others = [[one for one in own if (sequence, one) not in asked] for sequence, own in enumerate(clusters)]
        sent = self._sent(state, others, recomputed)
        self._counts["repairs"] += len(sent)
        return sent

    def counts(self) -> Counter[str]:
        """The counts since the last call of `counts`."""
        counts, self._counts = self._counts, Counter()
        earlier, self._fetched = self._fetched, self._stored.fetched_bytes
        counts["fetched_bytes"] = self._fetched - earlier
        return counts

    def _sent(self, state: LayerState, clusters: Clusters, recomputed: Recomputed) -> list[Cluster]:
        if state.stored is None:
            return []
        outside = [members.uncovered(columns) for members, columns in zip(state.members, recomputed, strict=True)]
        sent = [(sequence, one) for sequence, own in enumerate(clusters) for one in own if outside[sequence][one]]
        self._stored.send(state.layer, state.places(sent))
        return sent
