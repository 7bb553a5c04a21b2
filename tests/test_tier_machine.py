"""The tiers as a state machine: store, fetch, fail and complete in any order.

After each step the books are in order and the budget is kept, and no answer is wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.transport import Copy, Lane, Settled
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey
from tiered.tiers.ticket import Ticket

WIDTH, MOST_ROWS, SLOT = 16, 60, 4096  # a record is a staging slot
PARTS = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)


class ManualEvent(HostEvent):
    """Ends when its transport lets it; waiting for it lets it."""

    def __init__(self, transport: "ManualTransport", lane: Lane | None) -> None:
        super().__init__(lane)
        self.transport = transport

    def synchronize(self) -> None:
        self.transport.finish(self)
        super().synchronize()


@dataclass(eq=False)
class Job:
    event: ManualEvent
    work: Callable[[], int]
    after: Sequence[Event]
    fails: bool = False


class ManualTransport:
    """Jobs stand still until `finish`; then what they wait for goes first, and what is before them in their lane."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> ManualEvent:
        def work() -> int:
            for copy in copies:
                copy.destination.copy_(copy.source)
            return sum(copy.source.numel() for copy in copies)

        return self.run(lane, work, after)

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> ManualEvent:
        job = Job(ManualEvent(self, lane), work, list(after))
        self.jobs.append(job)
        return job.event

    def compute(self, work: Callable[[], None], after: Iterable[Event] = ()) -> ManualEvent:
        job = Job(ManualEvent(self, None), lambda: work() or 0, list(after))
        self.carry_out(job)
        return job.event

    def finish(self, event: HostEvent) -> None:
        job = next((job for job in self.jobs if job.event is event), None)
        if job is not None:
            for earlier in [other for other in self.jobs if other.event.lane == event.lane]:
                if earlier in self.jobs:
                    self.jobs.remove(earlier)
                    self.carry_out(earlier)
                if earlier is job:
                    break

    def carry_out(self, job: Job) -> None:
        for event in job.after:
            inner = event.event if isinstance(event, Settled) else event
            if isinstance(inner, ManualEvent):
                self.finish(inner)
        if job.fails or any(getattr(event, "failed", False) for event in job.after):
            job.event.fail("failed: by the test", None)
            return
        job.event.start()
        try:
            job.event.end(job.work())
        except Exception as error:
            job.event.fail(f"failed: {error!r}", error)

    def close(self) -> None:
        while self.jobs:
            self.finish(self.jobs[0].event)


class TierMachine(RuleBasedStateMachine):
    """`expected` is what each key holds; `failures` counts the copies that the machine made fail."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(device=16 * SLOT, host=6 * SLOT)
        self.ledger = Ledger(self.budget)
        self.transport = ManualTransport()
        self.tiers = open_tiers(
            self.ledger, device="cpu", slot_bytes=SLOT, fetch_slots=2, store_slots=1,
            transport=self.transport,
        )  # fmt: skip
        self.expected: dict[RecordKey, Tensor] = {}
        self.stored = self.failures = 0

    def keys(self, parts: list[int]) -> list[RecordKey]:
        return [RecordKey(Feature.HIDDEN, 0, 0, part) for part in parts]

    def known(self, parts: list[int]) -> list[RecordKey]:
        return [key for key in self.keys(parts) if key in self.expected]

    @rule(parts=PARTS, rows=st.integers(1, MOST_ROWS), tier=st.sampled_from([Tier.HOST, Tier.HOST, Tier.DEVICE]))
    def store(self, parts: list[int], rows: int, tier: Tier) -> None:
        for key in self.keys(parts):
            self.stored += 1
            values = torch.full((rows, WIDTH), float(self.stored))
            try:
                self.tiers.store([key], values, [rows], codec="raw", tier=tier)
            except TierCapacityError as error:
                assert error.needed > error.available or error.tier is not tier
                continue
            self.expected[key] = values

    @rule(target=tickets, parts=PARTS, told=st.booleans())
    def fetch(self, parts: list[int], told: bool) -> tuple[Ticket, Tensor] | None:
        """With a destination or without."""
        keys = self.known(parts)
        if not keys:
            return None
        expected = torch.cat([self.expected[key] for key in keys])
        return self.tiers.fetch(keys, torch.full_like(expected, torch.nan) if told else None), expected

    @rule(ticket=tickets)
    def wait(self, ticket: tuple[Ticket, Tensor] | None) -> None:
        if ticket is None:
            return
        try:
            answer = ticket[0].wait()
        except ValueError as error:
            assert "already" in str(error)
        except TransferError:
            assert self.failures
        else:
            assert torch.equal(answer, ticket[1])

    @rule(ticket=consumes(tickets))
    def close(self, ticket: tuple[Ticket, Tensor] | None) -> None:
        if ticket is not None:
            ticket[0].close()

    @rule(parts=PARTS)
    def forget(self, parts: list[int]) -> None:
        for key in self.known(parts):
            self.tiers.forget([key])
            del self.expected[key]

    @rule(number=st.integers(0, 30))
    def complete(self, number: int) -> None:
        if self.transport.jobs:
            self.transport.finish(self.transport.jobs[number % len(self.transport.jobs)].event)

    @rule(number=st.integers(0, 30))
    def fail(self, number: int) -> None:
        if self.transport.jobs:
            self.transport.jobs[number % len(self.transport.jobs)].fails = True
            self.failures += 1

    @invariant()
    def books_are_in_order(self) -> None:
        self.tiers.progress()
        self.tiers.check_integrity()
        for tier in Tier:
            cap = self.budget.cap(tier)
            assert cap is None or self.ledger.report().tiers[tier].peak <= cap

    def teardown(self) -> None:
        for key in list(self.expected):
            if not self.failures:
                with self.tiers.fetch([key]) as ticket:
                    assert torch.equal(ticket.wait(), self.expected[key])
        self.tiers.close()
        assert all(self.ledger.held(tier) == 0 for tier in Tier)


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
