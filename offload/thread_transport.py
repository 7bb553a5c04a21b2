"""Transports over threads of the host: what all of them share, and the one of CPU devices, where copies are
asynchronous, overlap and race as they do on a GPU."""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from tiered.offload.delay import Delay, Point, hold_up
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.lane_thread import Job, LaneThread, whole
from tiered.offload.link import Link
from tiered.offload.transport import Copy, Lane, TransferEvent, check_copies

R = TypeVar("R")


class LaneTransport:
    """`copy`, `run` and `close` on threads, each of which starts with its lane's first job.

    Args:
        device: the device that the lanes FETCH and STORE serve.
        link: what the lanes are slowed down to.
        delay: holds up whatever it wants to, see `Point`.
    """

    def __init__(self, device: torch.device, *, link: Link | None = None, delay: Delay | None = None) -> None:
        self.device = device
        self._link = link or Link()
        self._delay = delay
        self._lanes: dict[Lane | None, LaneThread] = {lane: LaneThread(f"tiered {lane}") for lane in Lane}
        self._lanes[None] = LaneThread("tiered compute")
        weakref.finalize(self, _stop, tuple(self._lanes.values()))  # threads end even without `close`

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        pieces = tuple(copies)
        return self._submit(HostEvent(lane, total_bytes(pieces)), partial(self._move, lane, pieces), after)

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> TransferEvent:
        if lane not in (Lane.LOAD, Lane.SPILL):
            raise ValueError(f"work of the host cannot run on lane {lane}; allowed: {Lane.LOAD}, {Lane.SPILL}")
        return self._submit(HostEvent(lane), partial(self._throttled, lane, _in_modes_of_caller(work)), after)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join()

    def _submit(self, event: HostEvent, work: Callable[[], int], after: Iterable[Event]) -> HostEvent:
        hold_up(self._delay, Point.SUBMIT, event.lane)
        self._lanes[event.lane].submit(self._job(event, work, after))
        return event

    def _job(
        self,
        event: HostEvent,
        work: Callable[[], int],
        after: Iterable[Event],
        host_part: Callable[[Event], Event] = whole,
    ) -> Job:
        return Job(event, work, tuple(after), partial(hold_up, self._delay, Point.WAIT, event.lane), host_part)

    def _move(self, lane: Lane, pieces: Sequence[Copy]) -> int:
        check_copies(pieces)
        start = time.monotonic()
        for piece in pieces:
            hold_up(self._delay, Point.COPY, lane)
            # By numpy, which copies in this thread alone and lets the interpreter's lock go. torch would begin a team
            # of OpenMP threads for each lane: with more threads than cores, every barrier of the caller's team waits
            # for one that does not run.
            np.copyto(piece.destination.numpy(), piece.source.numpy())
        nbytes = total_bytes(pieces)
        _sleep_until(start + self._link.speed(lane).seconds(nbytes, len(pieces)))
        return nbytes

    def _throttled(self, lane: Lane, work: Callable[[], int]) -> int:
        hold_up(self._delay, Point.COPY, lane)
        start = time.monotonic()
        nbytes = work()
        _sleep_until(start + self._link.speed(lane).seconds(nbytes))
        return nbytes


class ThreadTransport(LaneTransport):
    """Every lane is a thread.

    Args:
        compute_thread: `compute` is a lane with a thread too, as a CUDA stream is: the caller goes on at once, and what
            `work` writes is valid only once its event has ended. Else `compute` waits and works in the caller's thread.
        link: what the lanes are slowed down to.
        delay: holds up whatever it wants to, see `Point`.
    """

    def __init__(self, *, compute_thread: bool = False, link: Link | None = None, delay: Delay | None = None) -> None:
        super().__init__(torch.device("cpu"), link=link, delay=delay)
        self._compute_thread = compute_thread

    def compute(self, work: Callable[[], None], after: Iterable[Event] = ()) -> TransferEvent:
        event = HostEvent(None)
        if self._compute_thread:
            return self._submit(event, partial(_moves_nothing, _in_modes_of_caller(work)), after)
        self._lanes[None].check_open()
        hold_up(self._delay, Point.SUBMIT, None)
        self._job(event, partial(_moves_nothing, work), after).run()
        return event


def _in_modes_of_caller(work: Callable[[], R]) -> Callable[[], R]:
    """`work` for another thread, with the gradient and inference modes of this one."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> R:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return work()

    return run


def total_bytes(pieces: Sequence[Copy]) -> int:
    """Bytes of all pieces."""
    return sum(piece.source.numel() for piece in pieces)


def _moves_nothing(work: Callable[[], None]) -> int:
    work()
    return 0


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left)


def _stop(lanes: Iterable[LaneThread]) -> None:
    for lane in lanes:
        lane.stop()
