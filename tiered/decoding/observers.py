"""Who looks on while a canvas is denoised: at its tokens, or into the caches."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.canvas import Canvas
from tiered.core.features import Account
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import PassKind, PolicyState, Step


@runtime_checkable
class Listener(Protocol):
    """Who watches a canvas; both calls get ids of the whole batch, answers only."""

    def step(self, answers: Int[Tensor, "batch answer"], start: int, stop: int) -> None:
        """A forward has ended; columns `start` to `stop` hold proposals where nothing is fixed yet."""

    def block(self, answers: Int[Tensor, "batch answer"], start: int, stop: int) -> None:
        """Columns `start` to `stop` are final."""


@runtime_checkable
class Inspector(Protocol):
    """Who looks into the caches of a call while it runs, for an analysis; changes nothing."""

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """What it takes on the device at most, over a canvas of `length` columns; booked as long as the call lasts.
        With guidance `sequences` is twice the canvas's."""
        ...

    def after_forward(
        self,
        step: Step,
        kind: PassKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """A forward has ended, its commit has not begun. `ids` is what the forward read (with guidance, twice the
        canvas's sequences), `forward.store` what it left; `active` is False at sequences that wait for the others, of
        which it wrote nothing. All are valid during the call only."""


@runtime_checkable
class CallInspector(Inspector, Protocol):
    """An inspector that is shown what it looks at before the first forward."""

    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        """The call begins. All three are valid until it ends, and are its own: they are read, never written, but for
        `Forward.rows_probe`."""
