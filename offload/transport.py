"""The contract of transports, which move bytes between the tiers.

Jobs of one lane run in the order of their submission. A job starts when every event in its `after` has ended. If one of
them failed, the job fails too and never writes to its destination; other jobs of the lane go on. `after` may mix events
of any lane, of `wait`, and any other `Event`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.lane import Lane

# Least bytes of a piece of a copy. A copy engine finishes a piece before it serves another stream. Without pieces, a
# small copy would wait for a whole layer of weights, which may have 436 MB. Less would start copies more often.
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Copy:
    """Contiguous bytes. The caller owns both sides, keeps them alive and, by their fences, unchanged."""

    source: UInt8[Tensor, " n"]
    destination: UInt8[Tensor, " n"]

    def pieces(self, piece_bytes: int) -> Iterator["Copy"]:
        """The same bytes, in order, in pieces of `piece_bytes`; the last one has what is left, less than twice as
        many."""
        nbytes = self.source.numel()
        if nbytes < 2 * piece_bytes:
            yield self
            return
        begins = range(0, nbytes - piece_bytes + 1, piece_bytes)
        for begin, end in zip(begins, (*begins[1:], nbytes), strict=True):
            yield Copy(self.source[begin:end], self.destination[begin:end])


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a job's submission, its start (after all of `after`) and its end: ns of `time.monotonic_ns`. Start and
    end are None at first. For `wait`, `started - submitted` is the time that the compute stream waited for transfers.
    """

    submitted: int
    started: int | None
    ended: int | None


@runtime_checkable
class TransferEvent(Event, Protocol):
    """The end of a job."""

    @property
    def lane(self) -> Lane | None:
        """The job's lane; None for `wait`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the job moves; for `run`, the result of its work, and 0 before its end."""
        ...

    @property
    def failed(self) -> bool:
        """True if it has failed. Never blocks."""
        ...

    @property
    def times(self) -> Times: ...


class Settled:
    """Ends with `event` and never fails. Before bytes are overwritten their accesses must end, but need not
    succeed."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event: Event = event.event if isinstance(event, Settled) else event

    def done(self) -> bool:
        return self.event.done()

    def synchronize(self) -> None:
        with suppress(TransferError):
            self.event.synchronize()


@runtime_checkable
class Transport(Protocol):
    """Moves bytes. Every method except `close` raises TransferError on a closed transport and in a forked child."""

    device: torch.device

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        """Copy all of `copies`, in order. Never blocks. Copies that `check_copies` refuses fail the job before any byte
        has moved."""
        ...

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> TransferEvent:
        """Run host-side `work`, a file read or write, on the lane's thread, LOAD or SAVE. Never blocks. `work` returns
        the bytes that it moved; its exception fails the job.

        Raises `ValueError` for another lane: on a GPU those are streams, which do not order host work.
        """
        ...

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        """Let compute, which is the caller's current stream on CUDA, wait for `after`. The event ends once `after` and
        all earlier work of compute have ended. It fails if an event in `after` failed."""
        ...

    def close(self) -> None:
        """Wait for all jobs and stop all threads. No effect when called again, or in a forked child."""
        ...


def check_copies(copies: Iterable[Copy]) -> None:
    """Raise `ValueError` if a copy is not contiguous bytes on both sides, or its sides differ in length."""
    for copy in copies:
        for name, side in (("source", copy.source), ("destination", copy.destination)):
            if side.dtype != torch.uint8 or side.dim() != 1 or not side.is_contiguous():
                raise ValueError(
                    f"the {name} of a copy has shape {tuple(side.shape)}, strides {side.stride()} and type "
                    f"{side.dtype}; allowed: one contiguous dimension of torch.uint8"
                )
        if copy.source.numel() != copy.destination.numel():
            raise ValueError(f"a copy of {copy.source.numel()} bytes into {copy.destination.numel()} bytes")
