"""Looks on at a call: which kind each forward is."""

from collections.abc import Mapping

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.features import Account
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.policies.base import Step, StepKind


class Kinds:
    """An inspector that notes the kind of every forward; it takes nothing of the device."""

    def __init__(self) -> None:
        self.kinds: list[StepKind] = []

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """See `tiered.decoding.observers.Inspector`."""
        return {}

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """See `tiered.decoding.observers.Inspector`."""
        self.kinds.append(kind)
