"""The books of streamed layers: whatever is written and viewed, in any order, a view has what was written last."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered.forward.page_book import PageBook
from tiered.forward.pages import Pages, members, union

LAYERS = [1, 4, 6]
PAGES = 6
SETS = st.integers(0, 2**PAGES - 1)


class BookMachine(RuleBasedStateMachine):
    """Follows the book with numbers for content: what each workspace holds, what the tiers have, what was written."""

    @initialize(workspaces=st.integers(1, 3))
    def begin(self, workspaces: int) -> None:
        self.book = PageBook(LAYERS, workspaces)
        self.written: dict[int, dict[int, int]] = {layer: {} for layer in LAYERS}
        self.tiers: dict[int, dict[int, int]] = {layer: {} for layer in LAYERS}
        self.spaces: list[dict[int, int]] = [{} for _ in range(workspaces)]
        self.counter = 0
        self.flights: list[tuple[int, int]] = []

    def enter(self, layer: int) -> dict[int, int]:
        leaver = self.book.leaver(layer)
        if leaver is not None:
            self.give_up(leaver, self.book.coming(leaver))
        departure = self.book.enter(layer)
        if departure is not None:
            assert departure.layer == leaver
            self.store(departure)
        workspace = self.book.workspace(layer)
        assert workspace is not None
        return self.spaces[workspace]

    def store(self, departure) -> None:
        for page in members(departure.dirty):
            self.tiers[departure.layer][page] = self.spaces[departure.workspace][page]

    def give_up(self, layer: int, pages: int) -> None:
        for flight in [flight for flight in self.flights if flight[0] == layer and flight[1] & pages]:
            self.flights.remove(flight)
            self.book.given_up(*flight)

    def land(self, layer: int, pages: int) -> None:
        workspace = self.book.workspace(layer)
        for flight in [flight for flight in self.flights if flight[0] == layer and flight[1] & pages]:
            self.flights.remove(flight)
            self.book.landed(*flight)
            for page in members(flight[1]):
                assert workspace is not None
                self.spaces[workspace][page] = self.tiers[layer][page]

    def send(self, layer: int, pages: int) -> None:
        missing = self.book.missing(layer, pages)
        if missing:
            self.book.sent(layer, missing)
            self.flights.append((layer, missing))

    @rule(layer=st.sampled_from(LAYERS), pages=SETS)
    def view(self, layer: int, pages: int) -> None:
        space = self.enter(layer)
        self.send(layer, pages)
        self.land(layer, self.book.wanted(layer, pages))
        for page in members(pages):
            if page in self.written[layer]:
                assert space[page] == self.written[layer][page]

    @rule(layer=st.sampled_from(LAYERS), pages=SETS, part=SETS)
    def write(self, layer: int, pages: int, part: int) -> None:
        """`part` of `pages` are overwritten in part: their old content has to be there."""
        space = self.enter(layer)
        self.give_up(layer, pages & ~part)
        self.send(layer, pages & part)
        self.land(layer, self.book.wanted(layer, pages & part))
        for page in members(pages & part):
            if page in self.written[layer]:
                assert space[page] == self.written[layer][page]
        self.book.wrote(layer, pages)
        for page in members(pages):
            self.counter += 1
            space[page] = self.written[layer][page] = self.counter

    @rule(layer=st.sampled_from(LAYERS), pages=SETS)
    def read(self, layer: int, pages: int) -> None:
        """What has come is told once."""
        self.enter(layer)
        self.send(layer, pages)
        wanted = self.book.wanted(layer, pages)
        self.land(layer, wanted)
        assert self.book.read(layer, pages) & wanted == wanted
        assert self.book.read(layer, pages) == 0

    @rule(layer=st.sampled_from(LAYERS), pages=SETS)
    def ahead(self, layer: int, pages: int) -> None:
        after = self.book.following(layer)
        if after is not None:
            assert after != layer
            self.enter(layer)
            self.enter(after)
            assert self.book.workspace(layer) is not None  # one that was just used does not leave for the next
            self.send(after, pages)

    @rule()
    def keep(self) -> None:
        """The first half of the pages goes, the second takes their numbers."""
        for layer in LAYERS:
            self.give_up(layer, self.book.coming(layer))
        for departure in self.book.empty():
            self.store(departure)
        half = PAGES // 2
        self.book.renumber(lambda pages: pages >> half)
        for content in (self.written, self.tiers):
            for layer in LAYERS:
                content[layer] = {page - half: value for page, value in content[layer].items() if page >= half}
        assert all(self.book.workspace(layer) is None for layer in LAYERS)

    @precondition(lambda self: hasattr(self, "book"))
    @invariant()
    def in_order(self) -> None:
        self.book.check_integrity()
        taken = Counter(self.book.workspace(layer) for layer in LAYERS)
        assert all(count == 1 for workspace, count in taken.items() if workspace is not None)
        for layer in LAYERS:
            assert self.book.stored(layer) == union(list(self.tiers[layer]))


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_a_layer_that_comes_does_not_push_out_what_is_in_use():
    book = PageBook([0, 1, 2], 2)
    assert (book.enter(0), book.enter(1), book.enter(0)) == (None, None, None)
    departure = book.enter(2)
    assert departure is not None and departure.layer == 1 and book.workspace(0) is not None


def test_what_is_refused():
    book = PageBook([0, 1], 1)
    book.enter(0)
    book.wrote(0, 0b11)
    assert book.following(0) is None  # no room for it beside this one
    book.enter(1)
    book.enter(0)
    book.sent(0, 0b01)
    for wrong in (
        lambda: book.sent(0, 0b01),
        lambda: book.sent(0, 0b100),
        lambda: book.wrote(0, 0b01),
        lambda: book.landed(0, 0b10),
        lambda: book.enter(1),
        lambda: book.renumber(lambda pages: pages),
        lambda: PageBook([], 1),
        lambda: PageBook([0], 0),
    ):
        with pytest.raises(ValueError):
            wrong()
    book.check_integrity()


# ---- pages ----


@given(sequences=st.integers(1, 3), columns=st.integers(1, 40), rows=st.sampled_from([1, 4, 16]), data=st.data())
def test_pages_of_columns(sequences: int, columns: int, rows: int, data: st.DataObject):
    pages = Pages(3, 2, columns, 8, rows)
    first = data.draw(st.integers(0, columns))
    stop = data.draw(st.integers(first, columns))
    of_page = {
        sequence * pages.each + part: range(part * rows, min((part + 1) * rows, columns))
        for sequence in range(3)
        for part in range(pages.each)
    }
    here = [page for page in of_page if page < sequences * pages.each]
    span = set(range(first, stop))
    assert set(members(pages.touched(sequences, first, stop))) == {page for page in here if span & set(of_page[page])}
    assert set(members(pages.covered(sequences, first, stop))) == {page for page in here if span >= set(of_page[page])}
    assert set(members(pages.of(sequences))) == set(here)
    assert all(pages.rows(page) == 2 * len(of_page[page]) for page in of_page)
    kept = data.draw(st.lists(st.integers(0, 2), unique=True).map(sorted))
    some = data.draw(st.integers(0, 2 ** (3 * pages.each) - 1))
    moved = {
        kept.index(page // pages.each) * pages.each + page % pages.each
        for page in members(some)
        if page // pages.each in kept
    }
    assert set(members(pages.kept(some, kept))) == moved
