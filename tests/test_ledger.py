"""The ledger against a model that keeps every state it was ever in."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Feature, Tier
from tiered.core.ledger import Ledger

TIERS = st.sampled_from(Tier)
AMOUNTS = st.dictionaries(st.sampled_from(Account), st.integers(0, 60), max_size=3)
CAPS = st.none() | st.integers(0, 150)


class Left(Counter[Account]):
    """Accounts after bytes left: as high as before if none did, but never a peak."""


class LedgerMachine(RuleBasedStateMachine):
    """`history[tier]` holds the accounts after every booking since the peaks restarted."""

    @initialize(device=CAPS, host=CAPS, disk=CAPS)
    def open(self, device: int | None, host: int | None, disk: int | None):
        self.caps = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
        self.ledger = Ledger(MemoryBudget(device=device, host=host, disk=disk, disk_path="/tmp"))
        self.history: dict[Tier, list[Counter[Account]]] = {tier: [Counter()] for tier in Tier}
        self.moved: Counter[str] = Counter()

    def peak(self, states: list[Counter[Account]]) -> Counter[Account]:
        """The last of the highest."""
        return max(reversed([state for state in states if not isinstance(state, Left)]), key=Counter.total)

    def now(self, tier: Tier) -> Counter[Account]:
        return self.history[tier][-1]

    def room(self, tier: Tier) -> int | None:
        cap = self.caps[tier]
        return None if cap is None else cap - self.now(tier).total()

    def fits(self, tier: Tier, amounts: dict[Account, int]) -> bool:
        room = self.room(tier)
        return room is None or sum(amounts.values()) <= room

    def refused(self, error: TierCapacityError, tier: Tier, amounts: dict[Account, int]):
        assert (error.needed, error.available, error.tier) == (sum(amounts.values()), self.room(tier), tier)
        assert error.hint == "lower top_m" and error.total == self.now(tier).total() + error.needed

    @rule(tier=TIERS, amounts=AMOUNTS)
    def allocate(self, tier: Tier, amounts: dict[Account, int]):
        if self.fits(tier, amounts):
            self.ledger.allocate(amounts, tier)
            self.history[tier].append(self.now(tier) + Counter(amounts))
        else:
            with pytest.raises(TierCapacityError) as caught:
                self.ledger.allocate(amounts, tier, hint="lower top_m")
            self.refused(caught.value, tier, amounts)

    @rule(tier=TIERS, source=st.sampled_from(Account), destination=st.sampled_from(Account), data=st.data())
    def rebook(self, tier: Tier, source: Account, destination: Account, data: st.DataObject):
        held = self.now(tier)
        amount = data.draw(st.integers(0, held[source]), label="amount")
        self.ledger.rebook(source, destination, amount, tier)
        moved = held - Counter({source: amount})
        kind = Left if destination is Account.SPARE else Counter
        self.history[tier].append(kind(moved + Counter({destination: amount})))
        with pytest.raises(ValueError, match="cannot release"):
            self.ledger.rebook(source, destination, self.now(tier)[source] + 1, tier)

    @rule(tier=TIERS, data=st.data())
    def release(self, tier: Tier, data: st.DataObject):
        held = self.now(tier)
        amounts = {account: data.draw(st.integers(0, size), label=account) for account, size in held.items()}
        self.ledger.release(amounts, tier)
        self.history[tier].append(Left(held - Counter(amounts)))

    @rule(tier=TIERS, amounts=AMOUNTS, account=st.sampled_from(Account), excess=st.integers(1, 9))
    def release_more_than_booked(self, tier: Tier, amounts: dict[Account, int], account: Account, excess: int):
        held = self.now(tier)
        allowed = {other: min(size, held[other]) for other, size in amounts.items() if other != account}
        with pytest.raises(ValueError, match=f"{held[account] + excess} bytes of {account} in the {tier} tier"):
            self.ledger.release(allowed | {account: held[account] + excess}, tier)

    @rule(tier=TIERS, amounts=AMOUNTS, account=st.sampled_from(Account), size=st.integers(-9, -1))
    def negative_amounts(self, tier: Tier, amounts: dict[Account, int], account: Account, size: int):
        for verb in (self.ledger.allocate, self.ledger.release):
            with pytest.raises(ValueError, match=f"{size}"):
                verb({account: size}, tier)
        with pytest.raises(ValueError, match="negative"):
            self.ledger.allocate(amounts | {account: size}, tier)
        with pytest.raises(ValueError, match="negative"):
            self.ledger.record_transfer(tier, Tier.HOST, size)

    @rule(tier=TIERS, amounts=AMOUNTS, work_fails=st.booleans())
    def holding(self, tier: Tier, amounts: dict[Account, int], work_fails: bool):
        before, given = self.now(tier), dict(amounts)
        try:
            with self.ledger.holding(given, tier, hint="lower top_m"):
                self.history[tier].append(before + Counter(amounts))
                self.books_agree()
                given.clear()  # the caller's own mapping is not the booking
                if work_fails:
                    raise KeyError
        except KeyError:
            assert work_fails
        except TierCapacityError as error:
            assert not self.fits(tier, amounts)
            self.refused(error, tier, amounts)
        else:
            assert not work_fails
        self.history[tier].append(Left(before))

    @rule(source=TIERS, destination=TIERS, size=st.integers(1, 99))
    def transfer(self, source: Tier, destination: Tier, size: int):
        self.ledger.record_transfer(source, destination, size)
        self.moved[f"{source.value}->{destination.value}"] += size

    @rule()
    def restart_peaks(self):
        self.ledger.restart_peaks()
        self.history = {tier: [Counter(states[-1])] for tier, states in self.history.items()}
        self.moved.clear()

    @invariant()
    def books_agree(self):
        self.ledger.check_integrity()
        report = self.ledger.report()
        assert report.moved == self.moved
        for tier, states in self.history.items():
            cap, now, peak = self.caps[tier], states[-1], self.peak(states)
            assert cap is None or peak.total() <= cap
            seen = report.tiers[tier]
            assert (seen.current, seen.peak, seen.cap) == (now.total(), peak.total(), cap)
            assert self.ledger.held(tier) == now.total()
            assert all(self.ledger.held(tier, account) == now[account] for account in Account)
            assert seen.at_peak == {account: size for account, size in peak.items() if size}


TestLedger = LedgerMachine.TestCase


def test_without_a_budget_nothing_is_refused():
    ledger = Ledger()
    ledger.allocate({Account.WEIGHTS: 2**60})
    assert ledger.held(Tier.DEVICE) == 2**60


def test_features_are_accounts():
    ledger = Ledger()
    ledger.allocate({Account(feature): 1 + number for number, feature in enumerate(Feature)})
    assert [ledger.held(Tier.DEVICE, Account(feature)) for feature in Feature] == [1, 2, 3, 4, 5]


def test_a_refusal_names_a_remedy_even_without_a_hint():
    with pytest.raises(TierCapacityError, match="raise `memory`"):
        Ledger(MemoryBudget(device=1)).allocate({Account.KEY: 2})


def test_of_equal_peaks_the_last_is_reported():
    ledger = Ledger()
    for account in (Account.KEY, Account.VALUE):
        with ledger.holding({account: 10}):
            pass
    assert ledger.report().tiers[Tier.DEVICE].at_peak == {Account.VALUE: 10}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({Account.KEY: -1}, "negative accounts"),
        ({Account.KEY: 11}, "holds 11, peak 10"),
    ],
)
def test_damaged_books_are_found(damage: dict[Account, int], complaint: str):
    ledger = Ledger(MemoryBudget(device=20))
    ledger.allocate({Account.KEY: 10})
    ledger.check_integrity()
    ledger._current[Tier.DEVICE] = Counter(damage)
    with pytest.raises(RuntimeError, match=complaint):
        ledger.check_integrity()


def test_a_peak_above_the_cap_is_found():
    ledger = Ledger()
    ledger.allocate({Account.KEY: 10})
    ledger.budget = MemoryBudget(device=9)
    with pytest.raises(RuntimeError, match="peak 10, cap 9"):
        ledger.check_integrity()


class Holding:
    """Has booked bytes in pieces that are not in use."""

    def __init__(self, ledger: Ledger, pieces: list[int]) -> None:
        self.ledger, self.pieces = ledger, pieces
        ledger.allocate({Account.SPARE: sum(pieces)}, Tier.HOST)
        ledger.add_lender(self, Tier.HOST)

    @property
    def idle_bytes(self) -> int:
        return sum(self.pieces)

    def give_up(self) -> bool:
        if self.pieces:
            self.ledger.release({Account.SPARE: self.pieces.pop(0)}, Tier.HOST)
            return True
        return False


def test_lenders_give_up_as_much_as_a_booking_needs():
    ledger = Ledger(MemoryBudget(host=100, device=10))
    lender, other = Holding(ledger, [10, 20, 30]), Holding(ledger, [15])
    assert (ledger.held(Tier.HOST), ledger.idle(Tier.HOST), ledger.idle(Tier.DEVICE)) == (75, 75, 0)
    ledger.restart_peaks()
    assert ledger.report().tiers[Tier.HOST].peak == 0  # of calls, which use nothing of it
    ledger.require(90, Tier.HOST)  # would have room, and nothing is given up for it
    assert ledger.held(Tier.HOST) == 75 and ledger.report().tiers[Tier.HOST].required == 90
    ledger.allocate({Account.STAGING: 25}, Tier.HOST)
    assert ledger.idle(Tier.HOST) == 75
    with pytest.raises(TierCapacityError) as caught:
        ledger.allocate({Account.STAGING: 76}, Tier.HOST)
    assert (caught.value.needed, caught.value.available) == (76, 75) and ledger.idle(Tier.HOST) == 75
    ledger.allocate({Account.STAGING: 50}, Tier.HOST)
    assert ledger.held(Tier.HOST) <= 100 and ledger.held(Tier.HOST, Account.SPARE) == ledger.idle(Tier.HOST) <= 25
    ledger.check_integrity()
    assert ledger.report().tiers[Tier.HOST].required == 90
    del lender, other
    assert ledger.idle(Tier.HOST) == 0  # a lender that is gone lends nothing


@pytest.mark.parametrize("read", ["accounts", "moved", "report", "restart_peaks"])
def test_readers_wait_for_a_booking(read: str):
    """Else they meet a table that another thread changes."""
    ledger = Ledger()
    reading = {"accounts": lambda: ledger.accounts(Tier.HOST), "moved": lambda: ledger.moved}
    with ThreadPoolExecutor(1) as pool:
        with ledger._lock:
            running = pool.submit(reading.get(read) or getattr(ledger, read))
            assert not wait([running], timeout=0.2).done
        running.result(timeout=60)
