"""The transport of CUDA devices: a stream for each direction over the bus, threads for the disk."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch

from tiered.offload.cuda_event import CudaClock, CudaEvent, host_part, mark, stream_part
from tiered.offload.device import reads_host_addresses
from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.routes import Gather, gather_of
from tiered.offload.thread_transport import LaneTransport, total_bytes
from tiered.offload.transport import Copy, Lane, TransferEvent, check_copies


class CudaTransport(LaneTransport):
    """FETCH and STORE go on streams of their own. A job that has to wait for the host or the disk is put on its stream
    by the lane's thread, and so is whatever comes after it in the lane.

    The compute stream is the caller's current stream. It can wait only for what is on a stream already, so `compute`
    blocks the host until that is so.

    Args:
        device: a CUDA device.
        crossover: record size in bytes below which several pieces are fetched by a kernel, see `crossover_for`; none
            are where kernels cannot read host memory by its address (`reads_host_addresses`).
    """

    def __init__(self, device: torch.device, *, crossover: int = 0) -> None:
        super().__init__(device)
        self._pid = os.getpid()
        self._crossover = crossover if crossover and reads_host_addresses(device) else 0
        # Priority 0 is the lowest there is: where both want an engine or a processor, the model's stream may be first.
        self._streams = {lane: torch.cuda.Stream(device, priority=0) for lane in (Lane.FETCH, Lane.STORE)}
        self._clock = CudaClock(device)
        # torch does not know that a copy of another stream still uses a tensor that its owner has dropped.
        self._under_way: dict[Lane, deque[tuple[CudaEvent, Sequence[Copy]]]] = {lane: deque() for lane in self._streams}

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        if lane not in self._streams:
            return super().copy(lane, copies, after)
        pieces, after = tuple(copies), tuple(after)
        event = CudaEvent(HostEvent(lane, total_bytes(pieces)), self._clock)
        job = self._job(event.issued, partial(self._issue_copies, event, lane, pieces, after), after, host_part)
        self._lanes[lane].submit(job, here_if_ready=True)
        return event

    def compute(self, work: Callable[[], None], after: Iterable[Event] = ()) -> TransferEvent:
        self._lanes[None].check_open()
        after, stream = tuple(after), torch.cuda.current_stream(self.device)
        event = CudaEvent(HostEvent(None), self._clock)
        with suppress(RuntimeError):  # a lost device fails the job, below
            event.arrival = mark(stream)
        self._job(event.issued, partial(self._issue, event, stream, work, after), after, host_part).run()
        return event

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        super().close()
        try:
            for lane, stream in self._streams.items():
                stream.synchronize()
                self._under_way[lane].clear()
        except RuntimeError as error:
            raise TransferError(f"closing: the device failed: {error}") from error

    def _issue_copies(self, event: CudaEvent, lane: Lane, pieces: Sequence[Copy], after: Iterable[Event]) -> int:
        check_copies(pieces)
        under_way = self._under_way[lane]
        while under_way and under_way[0][0].done():
            under_way.popleft()
        with torch.inference_mode():  # a thread has a mode of its own, and either side may be an inference tensor
            self._issue(event, self._streams[lane], partial(self._copy, lane, pieces), after)
        under_way.append((event, pieces))
        return event.nbytes

    def _copy(self, lane: Lane, pieces: Sequence[Copy]) -> None:
        small = lane is Lane.FETCH and len(pieces) > 1 and total_bytes(pieces) < self._crossover * len(pieces)
        # A kernel that reads pageable memory by its address kills the device.
        if small and pieces[0].source.is_pinned() and (gather := gather_of(pieces)) is not None:
            self._launch(gather)
            return
        for piece in pieces:
            self._copy_piece(lane, piece)

    def _launch(self, gather: Gather) -> None:
        gather.launch(self.device)

    def _copy_piece(self, lane: Lane, piece: Copy) -> None:
        if lane in self._streams:
            piece.destination.copy_(piece.source, non_blocking=True)
        else:
            super()._copy_piece(lane, piece)

    def _issue(
        self, event: CudaEvent, stream: torch.cuda.Stream, work: Callable[[], None], after: Iterable[Event]
    ) -> int:
        with torch.cuda.stream(stream):
            for earlier in after:
                if (end := stream_part(earlier)) is not None:
                    stream.wait_event(end)
            event.start = mark(stream)
            try:
                work()
            except BaseException:
                stream.synchronize()  # the job ends with its failure, so nothing of it may go on
                raise
            event.end = mark(stream)
        return event.nbytes
