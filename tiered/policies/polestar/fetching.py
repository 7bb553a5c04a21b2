"""Clusters on their way to the device: asked for, fetched ahead on a guess, waited for or left behind."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.policies.polestar.options import HiddenOptions
from tiered.tiers.manager import TierManager
from tiered.tiers.ticket import Ticket

# A cluster of one sequence in one layer.
Cluster = tuple[int, int]
Tickets = dict[Cluster, Ticket]
_POLL = 5e-5  # seconds between two looks at a copy


@dataclass(slots=True)
class FetchCounts:
    """How the clusters that an update asked for came.

    Attributes:
        ahead: fetched on a guess, and wanted.
        on_demand: fetched when they were asked for.
        in_vain: fetched on a guess, and not wanted.
        skipped: not there in time, and left as they were.
        repairs: fetched because only some of their members were replaced.
        nbytes: of all records that were fetched, in vain or not.
    """

    ahead: int = 0
    on_demand: int = 0
    in_vain: int = 0
    skipped: int = 0
    repairs: int = 0
    nbytes: int = 0


class Fetching:
    """The tickets of one update. `close` gives up what nobody took.

    Staging slots are few: what is asked for sets out in order, and where guesses hold every slot, they make way.
    """

    def __init__(self, tiers: TierManager, options: HiddenOptions) -> None:
        self._tiers = tiers
        self._options = options
        self._ahead: dict[int, dict[Cluster, Ticket]] = {}
        self._counts = FetchCounts()

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
            self._counts.ahead += ticket is not None
            self._counts.on_demand += ticket is None
            asked[cluster] = ticket or self._fetch(cluster, records)
        self._counts.in_vain += len(ahead)
        _close(ahead)
        return asked

    def mend(self, clusters: Iterable[Cluster], records: Sequence[HiddenRecords]) -> Tickets:
        """Begin to fetch clusters of which only some members are about to be replaced."""
        asked = {cluster: self._fetch(cluster, records) for cluster in clusters}
        self._counts.repairs += len(asked)
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
        self._counts.skipped += len(late)
        return late

    def take(self, asked: Tickets, out: Float[Tensor, "any width"], places: Mapping[Cluster, int]) -> None:
        """Write the rows of every cluster asked for to `out`, from row `places[cluster]` on; compute waits for them."""
        while asked:
            best_first = sorted(asked.items(), key=lambda item: (item[1].arrived(), item[1].set_out), reverse=True)
            stuck: TierCapacityError | None = None
            for cluster, ticket in best_first:
                rows = torch.arange(places[cluster], places[cluster] + ticket.shape[0], device=out.device)
                try:
                    ticket.wait(out, rows)
                except TierCapacityError as error:  # others hold every slot; the next ticket may be one of them
                    stuck = error
                    continue
                del asked[cluster]
                break
            else:
                if not self._ahead:
                    raise stuck or AssertionError("something was asked for")
                self.close()

    def counts(self) -> FetchCounts:
        """Since the last call."""
        counts, self._counts = self._counts, FetchCounts()
        return counts

    def close(self) -> None:
        """Give up every guess."""
        for tickets in self._ahead.values():
            self._counts.in_vain += len(tickets)
            _close(tickets)
        self._ahead.clear()

    def _fetch(self, cluster: Cluster, records: Sequence[HiddenRecords]) -> Ticket:
        sequence, number = cluster
        ticket = self._tiers.fetch(records[sequence].keys([number]))
        self._counts.nbytes += ticket.nbytes
        return ticket


def _close(tickets: Tickets) -> None:
    for ticket in tickets.values():
        ticket.close()
    tickets.clear()


def _under_way(tickets: Tickets) -> set[Cluster]:
    return {cluster for cluster, ticket in tickets.items() if not ticket.arrived()}
