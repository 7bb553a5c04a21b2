"""Jobs between tiers: each waits for the fences of its bytes, and is counted when it has ended."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from tiered.core import events
from tiered.core.events import CopyEnded, Waited
from tiered.core.ops import Op
from tiered.core.spans import span
from tiered.offload.errors import TransferError
from tiered.offload.fence import Event, Fence
from tiered.offload.transport import Copy, Lane, Settled, TransferEvent, Transport


@dataclass(eq=False, slots=True, kw_only=True)
class _Job:
    """A job whose end has not been counted. `late`: compute had to wait for an unfinished event; `layer`: layer of its
    records."""

    event: TransferEvent
    lane: Lane
    layer: int | None
    copies: int = 0
    late: bool = False


class Traffic:
    """Submits jobs to `transport` under the transport law, and reports the end of each to `record`.

    A job waits for the last write of the bytes that it reads, and for the last write and all reads of those that it
    writes. Its own accesses go to the fences for later jobs. All jobs of the tiers are submitted here, so the law holds
    everywhere if it holds here.
    """

    def __init__(self, transport: Transport, record: Callable[[events.TierEvent], None]) -> None:
        self._transport = transport
        self._record = record
        # By lane, and None for compute. Jobs of a lane end in the order of their submission.
        self._jobs: defaultdict[Lane | None, deque[_Job]] = defaultdict(deque)

    def move(
        self,
        lane: Lane,
        work: Sequence[Copy] | Callable[[], int],
        *,
        reads: Collection[Fence],
        writes: Collection[Fence],
        layer: int | None = None,
    ) -> TransferEvent:
        """Copy between memories, or let the lane's thread do `work` on a file, which returns the bytes it moved.
        `layer`: layer of the records; None for several."""
        waits, copies = self.waits(reads, writes), 1
        if callable(work):
            event = self._transport.run(lane, work, waits)
        else:
            event, copies = self._transport.copy(lane, work, waits), len(work)
        return self._submitted(_Job(event=event, lane=lane, layer=layer, copies=copies), reads, writes)

    def compute(
        self, lane: Lane, *, reads: Collection[Fence] = (), writes: Collection[Fence] = (), layer: int | None = None
    ) -> TransferEvent:
        """Let compute wait until it may read or write these bytes, and let later copies wait for the present work of
        compute. `lane`: direction from which the bytes came, or in which they will go. `layer` as in `move`."""
        waits = self.waits(reads, writes)
        late = any(not event.done() for event in waits)
        with span(Op.WAIT, layer):
            event = self._transport.wait(waits)
        return self._submitted(_Job(event=event, lane=lane, layer=layer, late=late), reads, writes)

    def waits(self, reads: Collection[Fence], writes: Collection[Fence]) -> list[Event]:
        """The events that a job on these bytes waits for. Earlier accesses to overwritten bytes only have to end; they
        need not succeed."""
        before = [event for fence in reads for event in fence.before_read()]
        return before + [Settled(event) for fence in writes for event in fence.before_write()]

    def harvest(self) -> None:
        """Count the jobs that have ended, each after all earlier jobs of its lane. Never blocks."""
        for jobs in self._jobs.values():
            while jobs and jobs[0].event.done():
                self._count(jobs.popleft())

    def synchronize(self) -> None:
        """Block the host until every job so far has ended, and count them."""
        for job in chain.from_iterable(self._jobs.values()):
            with suppress(TransferError):  # raised where compute waits for the bytes
                job.event.synchronize()
        self.harvest()

    def _submitted(self, job: _Job, reads: Collection[Fence], writes: Collection[Fence]) -> TransferEvent:
        for fence in reads:
            fence.reads(job.event)
        for fence in writes:
            fence.writes(job.event)
        self._jobs[job.event.lane].append(job)
        return job.event

    def _count(self, job: _Job) -> None:
        event, times = job.event, job.event.times
        submitted = times.submitted
        started = times.started or submitted
        if event.lane is None:
            self._record(Waited(lane=job.lane, late=job.late, began=submitted, ended=started, layer=job.layer))
            return
        ended = times.ended or started
        ended_copy = CopyEnded(
            lane=job.lane,
            nbytes=event.nbytes,
            copies=job.copies,
            submitted=submitted,
            started=started,
            ended=ended,
            failed=event.failed,
            layer=job.layer,
        )
        self._record(ended_copy)
