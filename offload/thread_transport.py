"""The transport of CPU devices: copies are asynchronous, overlap and race as they do on a GPU."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from tiered.offload.delay import Delay, Point, hold_up
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.lane_transport import LaneTransport, in_modes_of_caller
from tiered.offload.link import Link
from tiered.offload.transport import TransferEvent


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
            return self._submit(event, partial(_moves_nothing, in_modes_of_caller(work)), after)
        self._lanes[None].check_open()
        hold_up(self._delay, Point.SUBMIT, None)
        self._job(event, partial(_moves_nothing, work), after).run()
        return event


def _moves_nothing(work: Callable[[], None]) -> int:
    work()
    return 0
