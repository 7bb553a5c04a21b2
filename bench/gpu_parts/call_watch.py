"""Looks on at a call: which kind each forward is, and whether its logits are finite."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.features import Account
from tiered.forward import Forward
from tiered.models.base import DiffusionModel
from tiered.models.shape import ModelShape
from tiered.policies.base import PassKind, Step


class Kinds:
    """An inspector that notes the kind of every forward; it takes nothing of the device."""

    def __init__(self) -> None:
        self.kinds: list[PassKind] = []

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """See `tiered.decoding.observers.Inspector`."""
        return {}

    def after_forward(
        self,
        step: Step,
        kind: PassKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """See `tiered.decoding.observers.Inspector`."""
        self.kinds.append(kind)


@contextmanager
def summed_logits(model: DiffusionModel) -> Iterator[list[Tensor]]:
    """The sums of all logits that `model` makes meanwhile: one kernel a forward, read when all is done. A NaN or an
    infinity among the logits is one in their sum."""
    sums: list[Tensor] = []
    plain: Callable[[Tensor], Tensor] = model.logits

    def summed(hidden: Tensor) -> Tensor:
        logits = plain(hidden)
        sums.append(logits.sum())
        return logits

    vars(model)["logits"] = summed
    try:
        yield sums
    finally:
        del vars(model)["logits"]
