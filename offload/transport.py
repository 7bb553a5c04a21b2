"""The contract of transports, which carry bytes between the tiers.

Jobs of one lane run in the order of their submission. A job starts when every event in its `after` has ended. If one
of them failed, the job fails too and never touches its destination; other jobs of the lane go on. `after` may mix
events of any lane, of `wait`, and any other `Event`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.offload.errors import TransferError
from tiered.offload.fence import Event
from tiered.offload.lane import Lane


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous piece. Both sides belong to the caller, who keeps them alive and, by their fences, unchanged."""

    source: UInt8[Tensor, " n"]
    destination: UInt8[Tensor, " n"]


@dataclass(frozen=True, slots=True)
class Times:
    """When a job was submitted, when it started (its `after` had ended) and when it ended: ns of `time.monotonic_ns`,
    None before that. For `wait`, `started - submitted` is the time that the compute stream waited for transfers.
    """

    submitted: int | None
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
    """Ends with `event` and never fails: bytes that are about to be overwritten need their accesses to end, not to
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
    """Carries copies. Every method but `close` raises TransferError on a closed transport and in a forked child."""

    device: torch.device

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Event] = ()) -> TransferEvent:
        """Copy every piece, in order. Never blocks. Pieces that `check_copies` refuses fail the job before a byte has
        moved."""
        ...

    def run(self, lane: Lane, work: Callable[[], int], after: Iterable[Event] = ()) -> TransferEvent:
        """Run host-side `work`, a file read or write, on the lane's thread, LOAD or SAVE. Never blocks. `work` returns
        the bytes that it moved; an exception of it fails the job.

        Raises `ValueError` for another lane. On a GPU those are streams, and the host's work has no order with them.
        """
        ...

    def wait(self, after: Iterable[Event] = ()) -> TransferEvent:
        """Let compute, which is the caller's current stream on CUDA, wait for `after`. The event ends once that and
        what compute was given before have ended. If something in `after` failed, the event fails."""
        ...

    def close(self) -> None:
        """Wait for all jobs and stop all threads. A second call does nothing, and no call does in a forked child."""
        ...


def check_copies(copies: Iterable[Copy]) -> None:
    """Raise ValueError if a piece is not contiguous bytes on both sides, or its sides differ in length."""
    for copy in copies:
        for name, side in (("source", copy.source), ("destination", copy.destination)):
            if side.dtype != torch.uint8 or side.dim() != 1 or not side.is_contiguous():
                raise ValueError(
                    f"the {name} of a copy has shape {tuple(side.shape)}, strides {side.stride()} and type "
                    f"{side.dtype}; allowed: one contiguous dimension of torch.uint8"
                )
        if copy.source.numel() != copy.destination.numel():
            raise ValueError(f"a copy of {copy.source.numel()} bytes into {copy.destination.numel()} bytes")
