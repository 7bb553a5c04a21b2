"""What a caller may pass to look on while a canvas is denoised: at its tokens, or into the caches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from tiered.core.canvas import Canvas
from tiered.core.features import Account
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import PolicyState, Step, StepKind
from tiered.policies.polestar.update_log import GroupUpdate


@runtime_checkable
class Streamer(Protocol):
    """A streamer as of transformers: ids come as CPU tensors [batch, n]. Two more methods, if it has them, are called
    after every forward: `put_draft` with the block and proposals for its open columns, and `put_open` with the block as
    it is on the canvas and a mask, True at columns that may still change."""

    def put(self, value: Int[Tensor, "batch columns"]) -> None:
        """The prompts first, then every block once it is final, up to where the last of its sequences ends."""

    def end(self) -> None:
        """Nothing more comes, of a call that has failed as of any other."""


def check_streamer(streamer: object) -> None:
    """Raise `TypeError` for what is neither a streamer nor None."""
    if streamer is not None and not isinstance(streamer, Streamer):
        raise TypeError(f"a streamer has the methods put and end (and may have put_draft), not {streamer!r}")


@contextmanager
def ending(streamer: Streamer | None) -> Iterator[None]:
    """End `streamer` at the block's end, also behind an error, or a thread that reads from it would wait for ever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


@runtime_checkable
class Inspector(Protocol):
    """Looks into the caches of a call while it runs, for an analysis; changes nothing."""

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """What it takes on the device at most, over a canvas of `length` columns; booked as long as the call lasts.
        With guidance `sequences` is twice the canvas's."""
        ...

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """A forward has ended, its commit has not begun. `ids` is what the forward read (with guidance, twice the
        canvas's sequences), `forward.store` what it left; `active` is False at sequences that wait for the others, of
        which it wrote nothing. All are valid during the call only."""


@runtime_checkable
class Traced(Protocol):
    """The state of a policy that tells more than its rows, for outputs and the live view."""

    @property
    def updates(self) -> Sequence[GroupUpdate]:
        """What each update so far did."""
        ...

    def column_states(self, step: Step) -> Int8[np.ndarray, "batch length"] | None:
        """Where the state of every canvas column is after `step`, as far as the policy decides it: `STORED` and
        `FETCHED` of `ColumnState`. None for all of it on the device."""
        ...


@runtime_checkable
class CallInspector(Inspector, Protocol):
    """An inspector that is shown what it looks at before the first forward."""

    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        """The call begins. All three are valid until it ends, and are its own: they are read, never written, but for
        `Forward.rows_probe` and `Forward.router_probe`."""
