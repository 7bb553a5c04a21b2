"""Transports over threads of the host: their common base, and the transport of CPU devices. There copies are
asynchronous, overlap and race as they do on a GPU."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.lane_thread import Job, LaneThread, whole
from tiered.offload.transport import PIECE_BYTES, Copy, Lane, TransferEvent, check_copies


class LaneTransport:
    """`copy`, `run` and `close` on threads, each of which starts with its lane's first job.

    Attributes:
        device: the device of the lanes FETCH and STORE.
        piece_bytes: least bytes of the pieces in which a copy moves.
    """

    piece_bytes = PIECE_BYTES

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A new thread computes on the first GPU. Asking an event there would open a context on it.
        begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else lambda: None
        self._lanes: dict[Lane | None, LaneThread] = {lane: LaneThread(f"tiered {lane}", begin) for lane in Lane}
        self._lanes[None] = LaneThread("tiered compute", begin)
        weakref.finalize(self, _stop, tuple(self._lanes.values()))  # threads end even without `close`

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        copies = tuple(copies)
        return self._submit(HostEvent(lane, total_bytes(copies)), partial(self._move, lane, copies), after)

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> TransferEvent:
        if lane not in (Lane.LOAD, Lane.SAVE):
            raise ValueError(f"work of the host cannot run on lane {lane}; allowed: {Lane.LOAD}, {Lane.SAVE}")
        return self._submit(HostEvent(lane), work, after)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join()

    def _submit(self, event: HostEvent, work: Callable[[], int], after: Iterable[Event]) -> HostEvent:
        self._lanes[event.lane].submit(self._job(event, work, after))
        return event

    def _job(
        self,
        event: HostEvent,
        work: Callable[[], int],
        after: Iterable[Event],
        host_part: Callable[[Event], Event] = whole,
    ) -> Job:
        return Job(event, work, tuple(after), host_part)

    def _move(self, lane: Lane, copies: Sequence[Copy]) -> int:
        check_copies(copies)
        self._copy_pieces(lane, copies)
        return total_bytes(copies)

    def _copy_pieces(self, lane: Lane, copies: Sequence[Copy]) -> None:
        for copy in copies:
            for piece in copy.pieces(self.piece_bytes):
                self._copy_piece(lane, piece)

    def _copy_piece(self, lane: Lane, piece: Copy) -> None:
        # numpy copies in this thread only and releases the interpreter's lock. torch would start a team of OpenMP
        # threads for each lane. With more threads than cores, every barrier of the caller's team would wait for a
        # thread that does not run.
        np.copyto(piece.destination.numpy(), piece.source.numpy())


class ThreadTransport(LaneTransport):
    """Every lane is a thread. `wait` blocks the caller, whose thread computes."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        self._lanes[None].check_open()
        event = HostEvent(None)
        self._job(event, moves_nothing, after).run()
        return event


def total_bytes(copies: Sequence[Copy]) -> int:
    return sum(copy.source.numel() for copy in copies)


def moves_nothing() -> int:
    """The work of a job that only waits."""
    return 0


def _stop(lanes: Iterable[LaneThread]) -> None:
    for lane in lanes:
        lane.stop()
