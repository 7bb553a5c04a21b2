"""Observers that a caller may pass: streamers of tokens, and inspectors of caches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.canvas import Canvas
from tiered.core.features import Account
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import PolicyState, Step, StepKind


@runtime_checkable
class Streamer(Protocol):
    """A streamer as in transformers, which receives ids as CPU tensors [batch, n].

    Two optional methods are called after every forward. `put_draft` receives the block with proposals for its open
    columns. `put_open` receives the block on the canvas and a mask, True at columns that may still change.
    """

    def put(self, value: Int[Tensor, "batch columns"]) -> None:
        """Receive the prompts first, then every final block, up to the end of the longest answer."""

    def end(self) -> None:
        """Receive the end of the call, even of a failed one."""


def check_streamer(streamer: object) -> None:
    """Raise `TypeError` unless `streamer` is a `Streamer` or None."""
    if streamer is not None and not isinstance(streamer, Streamer):
        raise TypeError(f"streamer = {streamer!r}; an object with put and end (and perhaps put_draft) is allowed")


@contextmanager
def ending(streamer: Streamer | None) -> Iterator[None]:
    """End `streamer` at the block's end, even after an error, or a thread that reads from it would wait forever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


@runtime_checkable
class Inspector(Protocol):
    """Reads the caches of a call while it runs, without changing them."""

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """Most device bytes of the inspector, by account, for a canvas of `length` columns; booked while the call
        lasts. With guidance `sequences` is twice the canvas's. Subclasses without it take none."""
        return {}

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """Called after a forward and before its commit. Arguments are valid during the call only.

        Args:
            ids: ids that the forward read; with guidance, twice the canvas's sequences.
            forward: the forward, whose `store` has the features that it wrote.
            active: False for waiting sequences, of which the forward wrote nothing.
        """


def check_inspector(inspector: object) -> None:
    """Raise `TypeError` unless `inspector` is an `Inspector` or None."""
    if inspector is not None and not isinstance(inspector, Inspector):
        raise TypeError(f"an inspector has the methods device_bytes and after_forward, not {inspector!r}")


@runtime_checkable
class CallInspector(Inspector, Protocol):
    """An inspector that receives the call's objects before the first forward."""

    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        """Called at the call's start. The arguments are valid until its end and must not be changed, except
        `Forward.rows_probe` and `Forward.router_probe`."""
