"""Pages on their way to workspaces, in the order in which they set out."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.forward.page_book import PageBook
from tiered.tiers.manager import TierManager
from tiered.tiers.record import RecordKey
from tiered.tiers.ticket import Ticket


@dataclass(eq=False, slots=True)
class Flight:
    """A few pages of one layer, as many as a staging slot holds.

    Attributes:
        ticket: for them.
        layer: whose.
        pages: which.
        out, rows: where their rows go.
        book: told when they are there, or will not come.
    """

    ticket: Ticket
    layer: int
    pages: int
    out: Float[Tensor, "all elements"]
    rows: Int[Tensor, " places"]
    book: PageBook


class Flights:
    """Everything that is under way for one call's store. Staging slots are few: they go to whoever asked first, so
    whoever cannot get one lets the first in the air land."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._air: list[Flight] = []

    def send(self, keys: list[RecordKey], layer: int, pages: int, out: Tensor, rows: Tensor, book: PageBook) -> None:
        """Fetch `keys`, the records of `pages` of `layer`, to `out[rows]`, and tell `book`.

        Raises:
            RecordLostError: see `TierManager.fetch`.
        """
        ticket = self._tiers.fetch(keys, paged=True)
        book.sent(layer, pages)
        self._air.append(Flight(ticket, layer, pages, out, rows, book))

    def land(self, out: Tensor, pages: int) -> None:
        """Let compute wait for all flights to `out` that bring some of `pages`.

        Raises:
            RecordLostError, TransferError: a copy failed.
        """
        for flight in self._to(out, pages):
            if flight in self._air:  # those in front of one that found no slot have landed with it
                self._land(flight)

    def give_up(self, out: Tensor, pages: int) -> None:
        """Forget all flights to `out` that bring some of `pages`."""
        for flight in self._to(out, pages):
            self._air.remove(flight)
            flight.ticket.close()
            flight.book.given_up(flight.layer, flight.pages)

    def land_arrived(self) -> None:
        """Let those that have arrived make room for the next. Nothing waits for a copy here."""
        while self._air and self._air[0].ticket.arrived():
            self._land(self._air[0])

    def land_all(self) -> None:
        """Let compute wait for every flight. Errors as `land`."""
        while self._air:
            self._land(self._air[0])

    def _to(self, out: Tensor, pages: int) -> list[Flight]:
        return [flight for flight in self._air if flight.out is out and flight.pages & pages]

    def _land(self, flight: Flight) -> None:
        while True:
            try:
                flight.ticket.wait(flight.out, flight.rows)
                break
            except TierCapacityError:  # the slots are held by those in front
                first = self._air[0]
                if first is flight:
                    raise
                self._land(first)
            except BaseException:
                self._air.remove(flight)
                flight.book.given_up(flight.layer, flight.pages)
                raise
        self._air.remove(flight)
        flight.book.landed(flight.layer, flight.pages)
