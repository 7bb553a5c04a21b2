"""One feature of which some layers are streamed: workspaces on the device, records of pages in the tiers."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import RecordLostError
from tiered.core.features import Feature, Tier
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.page_book import Departure, PageBook
from tiered.forward.page_indices import PageIndices
from tiered.forward.pages import Pages, members, union
from tiered.offload.codec_bytes import Codec
from tiered.tiers.manager import TierManager
from tiered.tiers.record_book import RecordKey
from tiered.tiers.ticket import Ticket


class Flight(NamedTuple):
    """A few pages of one layer, as many as a staging slot holds, on their way to its workspace."""

    ticket: Ticket
    layer: int
    pages: int


class PagedFeature:
    """The streamed layers of `feature`. A workspace is laid out as a resident layer, so a reader computes the
    same bits.

    What a layer had to have fetched in a step, the next streamed layer will want too: its fetch begins then, into
    another workspace, and runs beside compute.
    """

    def __init__(
        self,
        feature: Feature,
        layers: Sequence[int],
        pages: Pages,
        *,
        workspaces: int,
        tiers: TierManager,
        indices: PageIndices,
    ) -> None:
        """`layers`: streamed ones, ascending; `indices`: shared by the features of a call."""
        self._feature = feature
        self._pages = pages
        self._tiers = tiers
        self._flights: list[Flight] = []
        self._indices = indices
        self._book = PageBook(layers, workspaces)
        shape = (pages.batch, pages.heads, pages.columns, pages.elements)
        self._spaces = [torch.empty(shape, dtype=tiers.dtype, device=tiers.device) for _ in range(workspaces)]
        self._flat = [space.view(-1, pages.elements) for space in self._spaces]
        self._names = list(range(pages.batch))  # what the sequences are called in the tiers

    def __contains__(self, layer: object) -> bool:
        return layer in self._book

    @spanned(Op.PAGES)
    def view(self, layer: int, sequences: int) -> Float[Tensor, "batch heads columns elements"]:
        """What is stored of the first so many sequences: a view, valid until another layer is used.

        Raises:
            RecordLostError, TransferError: a copy failed.
            TierCapacityError: the tiers have no room for the layer that leaves.
        """
        self._have(layer, self._pages.of(sequences))
        return self._space(layer)[:sequences]

    @spanned(Op.PAGES)
    def to_write(
        self, layer: int, sequences: int, columns: tuple[int, int], *, whole: bool
    ) -> Float[Tensor, "batch heads columns elements"]:
        """The same view, for a caller who writes in `columns` (first and behind the last) alone. `whole`: everything
        there, so that what is stored of pages between them need not come first. Errors as `view`."""
        touched = self._pages.touched(sequences, *columns)
        covered = self._pages.covered(sequences, *columns) if whole else 0
        self._enter(layer)
        self._give_up(layer, covered)
        self._have(layer, touched & ~covered)
        self._book.wrote(layer, touched)
        return self._space(layer)[:sequences]

    @spanned(Op.PAGES)
    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences alone (ascending). Errors as `view`."""
        everything = self._pages.of(len(self._names))
        for layer in self._book.layers:
            self._give_up(layer, everything)
        for departure in self._book.empty():
            self._store(departure)
        kept = union([page for page in members(everything) if self._pages.sequence_and_part(page)[0] in sequences])
        for layer in self._book.layers:
            self._tiers.forget(self._keys(layer, list(members(self._book.stored(layer) & ~kept))))
        self._book.renumber(lambda pages: self._pages.kept(pages, sequences))
        self._names = [self._names[sequence] for sequence in sequences]

    def _have(self, layer: int, pages: int) -> None:
        """Let all of `pages` be there that have ever been written."""
        self._enter(layer)
        wanted = self._book.wanted(layer, pages)
        self._send(layer, wanted)
        fetched, after = wanted | self._book.read(layer, pages), self._book.following(layer)
        if fetched and after is not None:
            self._enter(after)
            with suppress(RecordLostError):  # told when it is needed
                self._send(after, fetched)
        self._land(layer, wanted)
        self._book.read(layer, wanted)

    def _send(self, layer: int, pages: int) -> None:
        out = self._out(layer)
        for group in self._groups(self._book.missing(layer, pages)):
            ticket = self._tiers.fetch(self._keys(layer, group), out, self._index(group))
            flight = Flight(ticket, layer, union(group))
            self._book.sent(layer, flight.pages)
            self._flights.append(flight)

    def _land(self, layer: int, pages: int) -> None:
        """Let compute wait for all flights that bring some of `pages`."""
        for flight in self._ended(layer, pages):
            try:
                flight.ticket.wait()
            except BaseException:
                self._book.given_up(layer, flight.pages)
                raise
            self._book.landed(layer, flight.pages)

    def _give_up(self, layer: int, pages: int) -> None:
        """Forget all flights that bring some of `pages`."""
        for flight in self._ended(layer, pages):
            flight.ticket.close()
            self._book.given_up(layer, flight.pages)

    def _ended(self, layer: int, pages: int) -> Iterator[Flight]:
        for flight in [flight for flight in self._flights if flight.layer == layer and flight.pages & pages]:
            self._flights.remove(flight)
            yield flight

    def _enter(self, layer: int) -> None:
        leaving = self._book.leaver(layer)
        if leaving is not None:
            self._give_up(leaving, self._book.coming(leaving))
        departure = self._book.enter(layer)
        if departure is not None:
            self._store(departure)

    def _store(self, departure: Departure) -> None:
        for group in self._groups(departure.dirty):
            rows = self._flat[departure.workspace].index_select(0, self._index(group))
            keys, sizes = self._keys(departure.layer, group), [self._pages.rows(page) for page in group]
            self._tiers.store(keys, rows, sizes, codec=Codec.RAW, tier=Tier.HOST)

    def _groups(self, pages: int) -> Iterator[list[int]]:
        """`pages`, as many at a time as a staging slot holds."""
        most = self._pages.in_slot(self._tiers.slot_bytes, self._tiers.dtype.itemsize)
        numbers = list(members(pages))
        for first in range(0, len(numbers), most):
            yield numbers[first : first + most]

    def _keys(self, layer: int, pages: Sequence[int]) -> list[RecordKey]:
        named = [self._pages.sequence_and_part(page) for page in pages]
        return [RecordKey(self._feature, layer, self._names[sequence], part) for sequence, part in named]

    def _index(self, pages: Sequence[int]) -> Int[Tensor, " rows"]:
        return self._indices.of(self._pages, pages)

    def _space(self, layer: int) -> Float[Tensor, "batch heads columns elements"]:
        return self._spaces[self._at(layer)]

    def _out(self, layer: int) -> Float[Tensor, "rows elements"]:
        return self._flat[self._at(layer)]

    def _at(self, layer: int) -> int:
        workspace = self._book.workspace(layer)
        assert workspace is not None, "a layer that is used has entered"
        return workspace
