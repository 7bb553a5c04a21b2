"""Clusters on their way to the device: asked for, fetched ahead on a guess, waited for or left behind."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.host_values import on_device
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.policies.polestar.options import PolestarOptions
from tiered.tiers.manager import TierManager
from tiered.tiers.ticket import Ticket

# A cluster of one sequence in one layer, and those that travel together.
Cluster = tuple[int, int]
Tickets = dict[tuple[Cluster, ...], Ticket]
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
                tickets[cluster] = self._fetch([cluster], records)

    def ask(self, layer: int, clusters: Iterable[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """`layer` wants these: take over those fetched ahead, begin to fetch the others, give up wrong guesses."""
        ahead, asked = self._ahead.pop(layer, {}), {}
        missing: list[Cluster] = []
        for cluster in clusters:
            ticket = ahead.pop(cluster, None)
            if ticket is None:
                missing.append(cluster)
            else:
                asked[cluster,] = ticket
        self._counts["ahead"] += len(asked)
        self._counts["on_demand"] += len(missing)
        self._counts["in_vain"] += len(ahead)
        _close(ahead)
        # What is waited for in any case travels together; each of the others may be given up.
        together = [tuple(missing)] if self._options.late == "wait" else [(cluster,) for cluster in missing]
        return asked | self._fetched(together, records)

    def mend(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """Begin to fetch clusters of which only some members are about to be replaced."""
        self._counts["repairs"] += len(clusters)
        return self._fetched([tuple(clusters)], records)

    def late(self, asked: Tickets) -> set[Cluster]:
        """Clusters asked for that are not there in time, as the option `late` sees it; they are given up."""
        if self._options.late == "wait":
            return set()
        deadline = time.monotonic() + (self._options.deadline_ms / 1000 if self._options.late == "deadline" else 0.0)
        under_way = _under_way(asked)
        while under_way and time.monotonic() < deadline:
            time.sleep(_POLL)
            under_way = _under_way(asked)
        for clusters in under_way:
            asked.pop(clusters).close()
        late = {cluster for clusters in under_way for cluster in clusters}
        self._counts["skipped"] += len(late)
        return late

    def take(self, asked: Tickets, out: Float[Tensor, "any width"], rows: Mapping[Cluster, slice]) -> None:
        """Write every cluster asked for to its `rows` of `out`; compute waits for them."""
        for clusters, ticket in asked.items():
            places = [rows[cluster] for cluster in clusters]
            if all(one.stop == other.start for one, other in pairwise(places)):
                ticket.into(out[places[0].start : places[-1].stop])
            else:
                numbers = np.concatenate([np.arange(place.start, place.stop) for place in places])
                ticket.into(out, on_device(torch.from_numpy(numbers), out.device))
        for clusters in [*asked]:
            asked.pop(clusters).wait()

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

    def _fetched(self, together: Sequence[tuple[Cluster, ...]], records: Sequence[HiddenRecords]) -> Tickets:
        return {clusters: self._fetch(clusters, records) for clusters in together if clusters}

    def _fetch(self, clusters: Sequence[Cluster], records: Sequence[HiddenRecords]) -> Ticket:
        ticket = self._tiers.fetch([key for sequence, number in clusters for key in records[sequence].keys([number])])
        self._counts["fetched_bytes"] += ticket.nbytes
        return ticket


def _close(tickets: dict[Cluster, Ticket]) -> None:
    for ticket in tickets.values():
        ticket.close()
    tickets.clear()


def _under_way(tickets: Tickets) -> list[tuple[Cluster, ...]]:
    return [clusters for clusters, ticket in tickets.items() if not ticket.arrived()]
