"""Books: bytes held in each tier by account, and bytes moved. No tensors.

Every memory figure that the library reports comes from here. Bytes are booked before they are allocated, so a booking
that exceeds the budget fails before its allocation.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.memory_report import MemoryReport, TierReport


def added(*parts: Mapping[Account, int]) -> dict[Account, int]:
    """The sums of bytes by account."""
    accounts = dict.fromkeys(account for part in parts for account in part)
    return {account: sum(part.get(account, 0) for part in parts) for account in accounts}


@runtime_checkable
class Lender(Protocol):
    """Holds booked bytes that may be idle."""

    @property
    def idle_bytes(self) -> int: ...

    def give_up(self) -> bool:
        """Release some idle bytes; False if there are none."""
        ...


class Ledger:
    """Current and peak bytes by tier and account, under the caps of `budget`. Thread-safe."""

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self.budget = budget or MemoryBudget()
        self._current: dict[Tier, Counter[Account]] = {tier: Counter() for tier in Tier}
        self._at_peak: dict[Tier, Counter[Account]] = {tier: Counter() for tier in Tier}
        self._lenders: dict[Tier, WeakSet[Lender]] = {tier: WeakSet() for tier in Tier}
        self._required: Counter[Tier] = Counter()
        self._moved: Counter[tuple[Tier, Tier]] = Counter()
        self._lock = RLock()  # not held while a lender gives up bytes under its own lock

    def held(self, tier: Tier, account: Account | None = None) -> int:
        """Bytes that `tier` holds now, under `account`, or under all for None."""
        return self._current[tier].total() if account is None else self._current[tier][account]

    def add_lender(self, lender: Lender, tier: Tier) -> None:
        """Let `lender` give up idle bytes if a booking in `tier` finds no room. Only a weak reference is kept."""
        self._lenders[tier].add(lender)

    def idle(self, tier: Tier) -> int:
        """Bytes of `held`, booked as `SPARE`, that lenders can give up."""
        return sum(lender.idle_bytes for lender in self._lenders[tier])

    def accounts(self, tier: Tier) -> dict[Account, int]:
        """Bytes that `tier` holds now, by account, without empty accounts."""
        with self._lock:
            return {account: size for account, size in self._current[tier].items() if size}

    def allocate(self, amounts: Mapping[Account, int], tier: Tier = Tier.DEVICE, *, hint: str = "") -> None:
        """Book `amounts` (bytes by account) in `tier`, all or none. Raises `TierCapacityError` if the cap has no room
        for them, `ValueError` for a negative amount."""
        if any(amount < 0 for amount in amounts.values()):
            raise ValueError(f"amounts of bytes cannot be negative: {dict(amounts)}")
        needed = sum(amounts.values())
        self.require(needed, tier, hint=hint)
        while True:
            with self._lock:
                lacking = self.lacking(needed, self.held(tier), tier, hint)
                if lacking is None:
                    self._current[tier].update(amounts)
                    self.note_peak(tier)
                    return
            if not any(lender.give_up() for lender in self._lenders[tier]):
                raise lacking

    def require(self, needed: int, tier: Tier, *, hint: str = "") -> None:
        """Raise `TierCapacityError` unless `tier` has room for `needed` more bytes, idle bytes included. They may be
        booked later. The next `report` counts them in `TierReport.required`."""
        used = self.held(tier) - self.idle(tier)
        if (lacking := self.lacking(needed, used, tier, hint)) is not None:
            raise lacking
        self._required[tier] = max(self._required[tier], used + needed)

    def lacking(self, needed: int, used: int, tier: Tier, hint: str) -> TierCapacityError | None:
        """The error for `needed` bytes beside `used` ones; None if there is room."""
        cap, total = self.budget.cap(tier), used + needed
        if cap is None or total <= cap:
            return None
        return TierCapacityError(needed, cap - used, tier, hint or "raise `memory`", total)

    def release(self, amounts: Mapping[Account, int], tier: Tier = Tier.DEVICE) -> None:
        """Release `amounts` (bytes by account). Raises `ValueError` for more bytes than an account has."""
        with self._lock:
            for account, amount in amounts.items():
                if amount < 0 or amount > self._current[tier][account]:
                    raise ValueError(
                        f"cannot release {amount} bytes of {account} in the {tier} tier: "
                        f"{self._current[tier][account]} are booked"
                    )
            self._current[tier].subtract(amounts)

    def rebook(self, source: Account, destination: Account, amount: int, tier: Tier) -> None:
        """Move `amount` bytes of `tier` from one account to another. Raises `ValueError` for a negative amount, or for
        more than `source` has."""
        with self._lock:
            self.release({source: amount}, tier)
            self._current[tier][destination] += amount
            if destination is not Account.SPARE:  # freed bytes cannot make a new peak
                self.note_peak(tier)

    @contextmanager
    def holding(self, amounts: Mapping[Account, int], tier: Tier = Tier.DEVICE, *, hint: str = "") -> Iterator[None]:
        """`allocate` on entry, `release` on exit, even after an error."""
        amounts = dict(amounts)  # a copy, because the caller's mapping may change meanwhile
        self.allocate(amounts, tier, hint=hint)
        try:
            yield
        finally:
            self.release(amounts, tier)

    def record_transfer(self, source: Tier, destination: Tier, nbytes: int) -> None:
        """Count `nbytes` that moved from `source` to `destination`."""
        if nbytes < 0:
            raise ValueError(f"a transfer cannot move a negative number of bytes: {nbytes}")
        with self._lock:
            self._moved[source, destination] += nbytes

    @property
    def moved(self) -> Mapping[tuple[Tier, Tier], int]:
        """Bytes that moved since `restart_peaks`, by source and destination; a copy."""
        with self._lock:
            return dict(self._moved)

    def restart_peaks(self) -> None:
        """Drop earlier peaks and transfers. The next report begins with the bytes held now."""
        with self._lock:
            self._at_peak = {tier: self._used(tier) for tier in Tier}
            self._required = Counter({tier: self.held(tier) - self.idle(tier) for tier in Tier})
            self._moved.clear()

    def report(self, *, allocator_peak: int | None = None) -> MemoryReport:
        """Bytes held now, at each tier's peak, and moved since `restart_peaks`. `allocator_peak`: as in the report."""
        with self._lock:
            tiers = {
                tier: TierReport(
                    current=self.held(tier),
                    peak=self._at_peak[tier].total(),
                    at_peak={account: size for account, size in self._at_peak[tier].items() if size},
                    required=self._required[tier],
                    cap=self.budget.cap(tier),
                )
                for tier in Tier
            }
        return MemoryReport(
            tiers=tiers,
            moved={f"{source}->{destination}": size for (source, destination), size in self.moved.items()},
            allocator_peak=allocator_peak,
            disk_path=None if self.budget.disk_path is None else str(self.budget.disk_path),
        )

    def note_peak(self, tier: Tier) -> None:
        """Update the peak of `tier`. A lender calls this when it uses idle bytes, which it does not book."""
        # Of equal peaks the last one counts, because memory is as high when it is obtained as when records fill it.
        with self._lock:
            used = self._used(tier)
            if used.total() >= self._at_peak[tier].total():
                self._at_peak[tier] = used

    def _used(self, tier: Tier) -> Counter[Account]:
        used = self._current[tier].copy()
        used[Account.SPARE] -= self.idle(tier)
        return used

    def check_integrity(self) -> None:
        """Raise `RuntimeError` with the numbers if the ledger contradicts itself."""
        for tier in Tier:
            negative = {account: size for account, size in self._current[tier].items() if size < 0}
            peak, now, cap = self._at_peak[tier].total(), self.held(tier), self.budget.cap(tier)
            if negative or now - self.idle(tier) > peak or (cap is not None and max(now, peak) > cap):
                raise RuntimeError(f"{tier} tier: holds {now}, peak {peak}, cap {cap}, negative accounts {negative}")
