"""The books of the tiers: a state machine in any order of store, fetch and forget."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tiered.core.features import Feature, Tier
from tiered.offload.codec_bytes import Codec
from tiered.tiers.record_book import Entry, RecordBook, RecordForm, RecordKey

FORM = RecordForm(Codec.RAW, 1, 4, 4)
KEYS = st.builds(RecordKey, st.just(Feature.HIDDEN), st.integers(0, 1), st.just(0), st.integers(0, 1))


def slot(name: object) -> Any:
    """The book hands slots on and looks at none."""
    return f"slot {name}"


class RecordBookMachine(RuleBasedStateMachine):
    """`newest` and `readers` say what the book must say; `given_back` those that hold no slots any more."""

    readings = Bundle("readings")

    def __init__(self):
        super().__init__()
        self.book = RecordBook()
        self.newest: dict[RecordKey, Entry] = {}
        self.readers: Counter[int] = Counter()
        self.known: list[Entry] = []
        self.given_back: set[int] = set()

    def give_back(self, entry: Entry | None):
        if entry is not None:
            assert not self.readers[id(entry)], "slots were given back under a reader"
            assert id(entry) not in self.given_back, "slots were given back twice"
            self.given_back.add(id(entry))

    @rule(key=KEYS, tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def store(self, key: RecordKey, tier: Tier):
        entry = Entry(key, FORM, tier)
        with pytest.raises(ValueError, match="with a slot"):
            self.book.commit(entry)
        entry.slot = slot(len(self.known))
        self.give_back(self.book.commit(entry))
        self.newest[key] = entry
        self.known.append(entry)

    @rule(target=readings, key=KEYS)
    def begin_reading(self, key: RecordKey):
        if key not in self.newest:
            assert key not in self.book
            with pytest.raises(KeyError):
                self.book.find(key)
            return None
        entry = self.book.find(key)
        assert entry is self.newest[key]
        self.book.begin_reading(entry)
        self.readers[id(entry)] += 1
        return entry

    @rule(entry=readings)
    def end_reading(self, entry: Entry | None):
        if entry is None:
            return
        if not self.readers[id(entry)]:
            with pytest.raises(ValueError, match="no reader"):
                self.book.end_reading(entry)
            return
        self.readers[id(entry)] -= 1
        last = self.book.end_reading(entry)
        assert last == (self.newest.get(entry.key) is not entry and not self.readers[id(entry)])
        self.give_back(entry if last else None)

    @rule(key=KEYS)
    def forget(self, key: RecordKey):
        if key in self.newest:
            entry = self.newest.pop(key)
            assert (self.book.remove(key) is entry) == (not self.readers[id(entry)])
            self.give_back(None if self.readers[id(entry)] else entry)

    @invariant()
    def books_agree(self):
        self.book.check_integrity()
        assert len(self.book) == len(self.newest)
        held = {id(entry) for entry in self.book.entries()}
        assert held == {id(entry) for entry in self.known} - self.given_back
        assert all(entry.readers == self.readers[id(entry)] for entry in self.known)


TestRecordBook = RecordBookMachine.TestCase


def test_the_books_notice_contradictions():
    book = RecordBook()
    entry = Entry(RecordKey(Feature.HIDDEN, 0, 0, 0), FORM, Tier.HOST, slot=slot("host"))
    book.commit(entry)
    entry.slot = None
    with pytest.raises(RuntimeError, match="layer 0, sequence 0, part 0 has 0 readers"):
        book.check_integrity()
    with pytest.raises(ValueError, match="cannot be read"):
        book.begin_reading(entry)
