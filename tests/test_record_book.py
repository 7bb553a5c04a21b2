"""The books of the tiers: a state machine in any order of store, fetch, evict, lose and forget."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tiered.core.features import Feature, Tier
from tiered.offload.codec_bytes import Codec
from tiered.tiers.record_book import Entry, EntryState, RecordBook, RecordForm, RecordKey

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
        self.versions = 0

    def give_back(self, entry: Entry | None):
        if entry is not None:
            assert not self.readers[id(entry)], "slots were given back under a reader"
            assert id(entry) not in self.given_back, "slots were given back twice"
            self.given_back.add(id(entry))

    @rule(key=KEYS, tier=st.sampled_from(Tier))
    def store(self, key: RecordKey, tier: Tier):
        self.versions += 1
        entry = Entry(key, FORM, self.versions)
        with pytest.raises(ValueError, match="with a slot"):
            self.book.commit(entry)
        self.book.put(entry, tier, slot(self.versions))
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
        if entry.state is EntryState.LOST:
            with pytest.raises(ValueError, match="lost"):
                self.book.begin_reading(entry)
            return None
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

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def evict(self, tier: Tier):
        order = self.book.leavers(tier)
        assert not any(self.readers[id(entry)] or entry.state is not EntryState.STORED for entry in order)
        ranks = [(not entry.clean, entry.used) for entry in order]
        assert ranks == sorted(ranks)
        if order:
            victim = order[0]
            if not victim.clean:
                self.book.put(victim, Tier.DISK, slot("file"))
            del victim.slots[tier]

    @rule(key=KEYS, tier=st.sampled_from(Tier))
    def copy_ended(self, key: RecordKey, tier: Tier):
        entry = self.newest.get(key)
        if entry and entry.state is EntryState.STORED:
            if tier in entry.slots:
                with pytest.raises(ValueError, match="already has a slot"):
                    self.book.put(entry, tier, slot("again"))
            else:
                self.book.put(entry, tier, slot("copy"))

    @rule(key=KEYS)
    def lose(self, key: RecordKey):
        entry = self.newest.get(key)
        if entry and entry.state is EntryState.STORED:
            with pytest.raises(ValueError, match="not lost"):
                self.book.lose(entry)
            entry.slots.clear()
            self.book.lose(entry)

    @invariant()
    def books_agree(self):
        self.book.check_integrity()
        assert len(self.book) == len(self.newest)
        held = {id(entry) for entry in self.book.entries()}
        assert held == {id(entry) for entry in self.known} - self.given_back
        assert all(entry.readers == self.readers[id(entry)] for entry in self.known)


TestRecordBook = RecordBookMachine.TestCase


def test_clean_goes_first_and_then_the_longest_unused():
    book, entries = RecordBook(), []
    for part in range(4):
        entry = Entry(RecordKey(Feature.HIDDEN, 0, 0, part), FORM, 0)
        book.put(entry, Tier.HOST, slot(part))
        book.commit(entry)
        entries.append(entry)
    book.put(entries[2], Tier.DISK, slot("file"))
    book.begin_reading(entries[0])
    book.end_reading(entries[0])
    book.begin_reading(entries[3])
    assert [entry.key.part for entry in book.leavers(Tier.HOST)] == [2, 1, 0]


def test_the_books_notice_contradictions():
    book = RecordBook()
    entry = Entry(RecordKey(Feature.HIDDEN, 0, 0, 0), FORM, 0)
    book.put(entry, Tier.HOST, slot("host"))
    book.commit(entry)
    entry.slots.clear()
    with pytest.raises(RuntimeError, match="layer 0, sequence 0, part 0 is stored"):
        book.check_integrity()
