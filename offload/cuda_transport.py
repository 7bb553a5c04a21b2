"""The transport of CUDA devices: a stream for each direction over the bus, threads for the disk.

Copy engines move all bytes over the bus. A kernel that gathers small records from pinned memory would take
multiprocessors from the model. In published comparisons (vLLM's, on offloading keys and values) both are equally fast
in one direction. Engines are ahead in both directions at once and beside a model that computes. Adjacent records move
as one copy. This choice rests on those publications; this project has not measured it on a GPU.

An engine finishes a copy before it serves another stream. So a large copy goes to its stream in pieces (`PIECE_BYTES`),
between which copies of other transports get their turn.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch

from tiered.offload.cuda_event import CudaClock, CudaEvent, host_part, mark, stream_part
from tiered.offload.device import pick_device
from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.host_event import HostEvent
from tiered.offload.thread_transport import LaneTransport, moves_nothing, total_bytes
from tiered.offload.transport import Copy, Lane, TransferEvent, check_copies


class CudaTransport(LaneTransport):
    """FETCH and STORE have streams of their own. If a job waits for the host or the disk, the lane's thread puts it and
    all later jobs of the lane on the stream.

    The compute stream is the caller's current stream. It can only wait for work that is on a stream already, so `wait`
    blocks the host until then.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(pick_device(device))
        device = self.device
        self._pid = os.getpid()
        # 0 is the lowest priority: if both need an engine or a multiprocessor, the model's stream may be first.
        self._streams = {lane: torch.cuda.Stream(device, priority=0) for lane in (Lane.FETCH, Lane.STORE)}
        self._clock = CudaClock(self._streams[Lane.STORE])
        # torch does not know that a copy on another stream still uses a tensor that its owner has dropped.
        self._under_way: dict[Lane, deque[tuple[CudaEvent, Sequence[Copy]]]] = {lane: deque() for lane in self._streams}

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        if lane not in self._streams:
            return super().copy(lane, copies, after)
        copies, after = tuple(copies), tuple(after)
        event = CudaEvent(HostEvent(lane, total_bytes(copies)), self._clock)
        job = self._job(event.issued, partial(self._issue_copies, event, lane, copies, after), after, host_part)
        self._lanes[lane].submit(job, here_if_ready=True)
        return event

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        self._lanes[None].check_open()
        after, stream = tuple(after), torch.cuda.current_stream(self.device)
        event = CudaEvent(HostEvent(None), self._clock)
        with suppress(RuntimeError):  # a lost device fails the job, below
            event.arrival = mark(stream)
        self._job(event.issued, partial(self._issue, event, stream, moves_nothing, after), after, host_part).run()
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

    def _issue_copies(self, event: CudaEvent, lane: Lane, copies: Sequence[Copy], after: Iterable[Event]) -> int:
        check_copies(copies)
        under_way = self._under_way[lane]
        while under_way and under_way[0][0].done():
            under_way.popleft()
        with torch.inference_mode():  # modes are by thread, and either side may be an inference tensor
            self._issue(event, self._streams[lane], partial(self._copy_pieces, lane, copies), after)
        under_way.append((event, copies))
        return event.nbytes

    def _copy_piece(self, lane: Lane, piece: Copy) -> None:
        if lane in self._streams:
            piece.destination.copy_(piece.source, non_blocking=True)
        else:
            super()._copy_piece(lane, piece)

    def _issue(
        self, event: CudaEvent, stream: torch.cuda.Stream, work: Callable[[], object], after: Iterable[Event]
    ) -> int:
        with torch.cuda.stream(stream):
            for earlier in after:
                if (end := stream_part(earlier)) is not None:
                    stream.wait_event(end)
            event.start = mark(stream)
            try:
                work()
            except BaseException:
                stream.synchronize()  # the job ends with its failure, so none of its copies may continue
                raise
            event.end = mark(stream)
        return event.nbytes
