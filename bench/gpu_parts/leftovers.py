"""What a call leaves, forward by forward, and the first bit in which two calls differ."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.features import Account, Feature
from tiered.forward.forward import Forward
from tiered.models.base import DiffusionModel
from tiered.models.shape import ModelShape
from tiered.output import GenerationOutput
from tiered.policies.base import Step, StepKind
from tiered.policies.polestar.update_log import LayerUpdate
from tiered.runtime import Runtime

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEPT = (Feature.KEY, Feature.VALUE)


@dataclass
class Left:
    """An inspector that copies keys, values and logits of every forward; it books nothing.

    Attributes:
        kinds: what each forward was for.
        stores: keys and values of every layer after each forward, [2 layers, batch, heads, length, head_dim].
        logits: of each forward, [batch, rows, vocab].
    """

    kinds: list[StepKind] = field(default_factory=list)
    stores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    out: GenerationOutput | None = None

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
        layers = range(forward.model.shape.layers)
        self.kinds.append(kind)
        self.stores.append(torch.stack([forward.store.view(feature, layer) for layer in layers for feature in _KEPT]))

    @property
    def tokens(self) -> Tensor:
        """The prompts and answers."""
        assert self.out is not None, "the call has ended"
        return self.out.sequences

    @property
    def updates(self) -> Sequence[LayerUpdate]:
        """What every layer of every update did."""
        assert self.out is not None, "the call has ended"
        return self.out.updates

    def difference(self, other: "Left") -> str | None:
        """Where the two first differ, for people; None: they are the same bit by bit."""
        if self.kinds != other.kinds:
            return f"forwards were {_counts(self.kinds)} here, {_counts(other.kinds)} there"
        for number, kind in enumerate(self.kinds):
            for place, (one, two) in enumerate(zip(self.stores[number], other.stores[number], strict=True)):
                if found := _differing(one, two):
                    return f"{_KEPT[place % 2]} of layer {place // 2} after forward {number} ({kind}): {found}"
            if found := _differing(self.logits[number], other.logits[number]):
                return f"logits of forward {number} ({kind}): {found}"
        return None if torch.equal(self.tokens, other.tokens) else "tokens, of the same logits"


def left_by(runtime: Runtime, ids: Tensor, **options: Any) -> Left:
    """What a call of `generate` leaves."""
    left = Left()
    with _kept_logits(runtime.model, left.logits):
        left.out = runtime.generate(ids, inspector=left, **options)
    return left


@contextmanager
def _kept_logits(model: DiffusionModel, kept: list[Tensor]) -> Iterator[None]:
    """Let `kept` have all logits that `model` makes meanwhile."""
    plain = model.logits

    def logits(hidden: Tensor) -> Tensor:
        kept.append(plain(hidden))
        return kept[-1].clone()  # what comes behind may write into its own

    vars(model)["logits"] = logits
    try:
        yield
    finally:
        del vars(model)["logits"]


def _differing(one: Tensor, two: Tensor) -> str | None:
    """How many elements differ in their bits, and by how much."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"{tuple(one.shape)} of {one.dtype} here, {tuple(two.shape)} of {two.dtype} there"
    bits = _BITS[one.dtype.itemsize]
    if torch.equal(one.view(bits), two.view(bits)):
        return None
    differ = one.view(bits) != two.view(bits)
    by = (one[differ].double() - two[differ].double()).abs().max()
    return f"{int(differ.sum())} of {differ.numel()} elements, by up to {float(by):.3g}"


def _counts(kinds: list[StepKind]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
