"""Clusters on their way to the device: asked for, fetched ahead on a guess, waited for or left behind."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.policies.polestar.options import PolestarOptions
from tiered.tiers.manager import TierManager
from tiered.tiers.ticket import Ticket

# A cluster of one sequence in one layer.
Cluster = tuple[int, int]
Tickets = dict[Cluster, Ticket]
_POLL = 5e-5  # seconds between two looks at a copy


class Fetching:
    """The tickets of one update. `close` gives up the guesses that were not taken."""

    def __init__(self, tiers: TierManager, options: PolestarOptions) -> None:
        self._tiers = tiers
        self._options = options
        self._ahead: dict[int, dict[Cluster, Ticket]] = {}
        self._counts: Counter[str] = Counter()  # by names of `GroupUpdate`

    def guess(self, layer: int, clusters: Iterable[Cluster], records: Sequence[HiddenRecords]) -> None:
        """Begin to fetch what `layer` will probably ask for."""
        tickets = self._ahead.setdefault(layer, {})
        for cluster in clusters:
            if cluster not in tickets:
                tickets[cluster] = self._fetch(cluster, records)

    def ask(self, layer: int, clusters: Iterable[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """`layer` wants these: take over those fetched ahead, begin to fetch the others, give up wrong guesses."""
        ahead, asked = self._ahead.pop(layer, {}), {}
        for cluster in clusters:
            ticket = ahead.pop(cluster, None)
            self._counts["ahead"] += ticket is not None
            self._counts["on_demand"] += ticket is None
            asked[cluster] = ticket or self._fetch(cluster, records)
        self._counts["in_vain"] += len(ahead)
        _close(ahead)
        return asked

    def mend(self, clusters: Iterable[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """Begin to fetch clusters of which only some members are about to be replaced."""
        asked = {cluster: self._fetch(cluster, records) for cluster in clusters}
        self._counts["repairs"] += len(asked)
        return asked

    def late(self, asked: Tickets) -> set[Cluster]:
        """Clusters asked for that are not there in time, as the option `late` sees it; they are given up."""
        if self._options.late == "wait":
            return set()
        deadline = time.monotonic() + (self._options.deadline_ms / 1000 if self._options.late == "deadline" else 0.0)
        late = _under_way(asked)
        while late and time.monotonic() < deadline:
            time.sleep(_POLL)
            late = _under_way(asked)
        for cluster in late:
            asked.pop(cluster).close()
        self._counts["skipped"] += len(late)
        return late

    def take(self, asked: Tickets, out: Float[Tensor, "any width"], places: Mapping[Cluster, int]) -> None:
        """Write the rows of every cluster asked for to `out`, from row `places[cluster]` on; compute waits for them."""
        for cluster, ticket in asked.items():
            ticket.into(out[places[cluster] : places[cluster] + ticket.shape[0]])
        for cluster in [*asked]:
            asked.pop(cluster).wait()

    def counts(self) -> Counter[str]:
        """How clusters came, since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Give up every guess."""
        for tickets in self._ahead.values():
            self._counts["in_vain"] += len(tickets)
            _close(tickets)
        self._ahead.clear()

    def _fetch(self, cluster: Cluster, records: Sequence[HiddenRecords]) -> Ticket:
        sequence, number = cluster
        ticket = self._tiers.fetch(records[sequence].keys([number]))
        self._counts["fetched_bytes"] += ticket.nbytes
        return ticket


def _close(tickets: Tickets) -> None:
    for ticket in tickets.values():
        ticket.close()
    tickets.clear()


def _under_way(tickets: Tickets) -> set[Cluster]:
    return {cluster for cluster, ticket in tickets.items() if not ticket.arrived()}
