"""Books: what the weights take of each tier where some layers of them are streamed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import Buffer
from tiered.core.features import Account, Tier
from tiered.models.shape import ModelShape
from tiered.models.weight_form import WeightForm, beside_layers, places
from tiered.offload.segments import reserved_bytes
from tiered.offload.size_class import UNIT

RING_SLOTS = 2  # one layer is used while the next one comes
LOAD_SLOTS = 2  # of host memory, that layers from files pass: one is read while the other goes up
FEWEST = RING_SLOTS + 1  # so many layers as the ring has slots save nothing


@cache
def apart(layers: int) -> tuple[int, ...]:
    """All layers of a stack that forwards go round and round, each as far from those before it as can be."""
    order = [layers // 2]
    while len(order) < layers:
        left = [layer for layer in range(layers) if layer not in order]
        order.append(max(left, key=lambda layer: min(min(abs(layer - o), layers - abs(layer - o)) for o in order)))
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Which layers of the weights are streamed, and bytes. Only their matrices are: norms, biases, sinks and routers of
    every layer, the embedding and the head stay on the device, and so do layers without a record.

    Attributes:
        whole: of all weights on the device. On a GPU: of the allocator's segments that they are in.
        record: of the matrices of a layer, which lie in one piece in every tier.
        recorded: layers with a record, ascending.
        fixed: no layer may be streamed.
        in_files: the checkpoint's files hold these very bytes, so that layers may be read from there.
        layers: that are streamed, ascending.
        below: how many of them the host has no room for.
    """

    whole: int
    record: int
    recorded: tuple[int, ...]
    in_files: bool
    fixed: bool = False
    layers: tuple[int, ...] = ()
    below: int = 0

    @classmethod
    def of(
        cls, shape: ModelShape, dtype: str, form: WeightForm, *, in_files: bool | None = None, gpu: bool = False
    ) -> "WeightBytes":
        """All on the device. `in_files`: None: where a checkpoint of the model would have them. `gpu`: it is one."""
        record, beside = places(shape, dtype, form)[1], beside_layers(shape, dtype, form)
        every = [*beside, *len(shape.recorded) * [record]]
        return cls(
            whole=reserved_bytes(every) if gpu else sum(every),
            record=record,
            recorded=shape.recorded,
            fixed=form.fixed,
            in_files=form.code is None and dtype == shape.dtype if in_files is None else in_files,
        )

    def streaming(self, count: int, below: int = 0) -> "WeightBytes":
        """With so many layers streamed, of which the host has no room for `below`. They lie apart, so that copies run
        beside the layers between them; and fewer are among more, so that another call moves the difference alone."""
        chosen = sorted(self.recorded[place] for place in apart(self.of_layers)[:count])
        return replace(self, layers=tuple(chosen), below=below)

    @property
    def of_layers(self) -> int:
        """Layers with a record."""
        return len(self.recorded)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring, and of the room of a record in every tier."""
        return -(-self.record // UNIT) * UNIT

    @property
    def moved(self) -> int:
        """Bytes that go up to the device in every forward."""
        return len(self.layers) * self.record

    @property
    def resident(self) -> int:
        """Bytes of the device that stay there."""
        return self.whole - len(self.layers) * self.record

    @property
    def buffers(self) -> list[Buffer]:
        """What the device has of them."""
        slots = RING_SLOTS if self.layers else 0
        return [
            Buffer("resident weights", Account.WEIGHTS, (self.resident,)),
            Buffer("slots of layers", Account.STAGING, (slots, self.slot_bytes)),
        ]

    def passes_host(self, budget: MemoryBudget) -> bool:
        """Whether layers may come from files, and so pass a ring of host memory."""
        return bool(budget.cap(Tier.DISK)) or (self.in_files and budget.cap(Tier.HOST) is not None)

    def lower(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of host and disk by account."""
        here = len(self.layers) - self.below
        host = {Account.WEIGHTS: here * self.record, Account.SPARE: here * (self.slot_bytes - self.record)}
        if self.layers and self.passes_host(budget):
            host[Account.STAGING] = LOAD_SLOTS * self.slot_bytes
        if not self.below or self.in_files:
            return {Tier.HOST: host, Tier.DISK: {}}
        spare = self.below * (self.slot_bytes - self.record)
        return {Tier.HOST: host, Tier.DISK: {Account.WEIGHTS: self.below * self.record, Account.SPARE: spare}}

    def as_dict(self) -> Mapping[str, Any]:
        """Plain types only, for JSON. Sizes are bytes."""
        return {"layers": list(self.layers), "below": self.below, "bytes_per_forward": self.moved}
