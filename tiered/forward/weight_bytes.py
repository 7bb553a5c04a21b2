"""Books: what the weights take of each tier where some of them are streamed.

A record is the matrices of a layer, or of one expert. Layers are streamed one by one: those that are not stay on the
device. Experts are streamed all or none, and as many of them are on the device as there are slots for.
"""

from collections.abc import Hashable, Mapping
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

RING_SLOTS = 2  # one record is used while the next one comes
LOAD_SLOTS = 2  # of host memory, that records from files pass: one is read while the other goes up
FEWEST = RING_SLOTS + 1  # so many layers as the ring has slots save nothing


@cache
def apart(layers: int) -> tuple[int, ...]:
    """All layers of a stack that forwards go round and round, each as far from those before it as can be."""
    order = [layers // 2]
    while len(order) < layers:
        left = [layer for layer in range(layers) if layer not in order]
        order.append(max(left, key=lambda layer: min(min(abs(layer - o), layers - abs(layer - o)) for o in order)))
    return tuple(order)


def record_keys(layer: int, experts: int | None) -> list[Hashable]:
    """The keys of a layer's records: the layer, or the layer and one of so many experts."""
    return [layer] if experts is None else [(layer, expert) for expert in range(experts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Which weights are streamed, and bytes. Norms, biases, sinks and routers of every layer, the embedding and the
    head stay on the device, and so do layers without a record.

    Attributes:
        whole: bytes of all weights on the device. On a GPU: of the allocator's segments that they are in.
        layer: bytes of the matrices of a layer, which lie in one piece on the device.
        record: bytes of a record, which lies in one piece in every tier.
        recorded: layers with records, ascending.
        experts: experts of a layer, which have a record each; None if the layer has one.
        fixed: True if no layer may be streamed.
        in_files: True if the checkpoint's files hold these very bytes, so that records may be read from there.
        layers: layers whose records are below the device, ascending.
        slots: slots on the device that records are used in.
        below: records that the host has no room for.
    """

    whole: int
    layer: int
    record: int
    recorded: tuple[int, ...]
    experts: int | None = None
    in_files: bool
    fixed: bool = False
    layers: tuple[int, ...] = ()
    slots: int = 0
    below: int = 0

    @classmethod
    def of(
        cls, shape: ModelShape, dtype: str, form: WeightForm, *, in_files: bool | None = None, gpu: bool = False
    ) -> "WeightBytes":
        """All on the device. `in_files`: None: where a checkpoint of the model would have them. `gpu`: it is one."""
        layer, beside = places(shape, dtype, form)[1], beside_layers(shape, dtype, form)
        every = [*beside, *len(shape.recorded) * [layer]]
        return cls(
            whole=reserved_bytes(every) if gpu else sum(every),
            layer=layer,
            record=places(shape, dtype, form, apart=shape.experts_apart)[1],
            recorded=shape.recorded,
            experts=shape.experts.count if shape.experts else None,
            fixed=form.fixed,
            in_files=form.code is None and dtype == shape.dtype if in_files is None else in_files,
        )

    def streaming(self, count: int, below: int = 0) -> "WeightBytes":
        """With so many records that have no room on the device, and `below` that the host has no room for. Layers lie
        apart, so that copies run beside the layers between them; and fewer are among more, so that another call moves
        the difference alone."""
        layers, slots = self.recorded, self.of_records - count
        if self.experts is None:
            layers, slots = tuple(sorted(layers[place] for place in apart(len(layers))[:count])), RING_SLOTS
        return replace(self, layers=layers, slots=slots, below=below) if count else self.resting

    @property
    def resting(self) -> "WeightBytes":
        """With nothing streamed."""
        return replace(self, layers=(), slots=0, below=0)

    @property
    def of_records(self) -> int:
        return len(self.recorded) * (self.experts or 1)

    @property
    def most(self) -> int:
        """Records that may lack room on the device, at most."""
        return self.of_records - (RING_SLOTS if self.experts else 0)

    @property
    def fewest(self) -> int:
        """Records that have to lack room for any byte to be saved."""
        return 1 if self.experts else FEWEST

    def keys(self, layer: int) -> list[Hashable]:
        """The keys of a layer's records."""
        return record_keys(layer, self.experts)

    @property
    def streamed(self) -> int:
        """Records below the device."""
        return len(self.layers) * (self.experts or 1)

    @property
    def count(self) -> int:
        """Records below the device that have no slot of their own."""
        return self.streamed - (self.slots if self.experts else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, and of the room of a record in every tier."""
        return -(-self.record // UNIT) * UNIT

    def moved(self, reached: float | None = None) -> int:
        """Bytes that go up to the device in a forward: of all streamed layers; or of the experts that have no slot, of
        `reached` in each layer that its rows go to (None for all). The share of experts with a slot is the hit rate of
        a router that picks at random."""
        of_layer = 1.0 if self.experts is None else self.experts if reached is None else reached
        missing = self.count / self.of_records if self.experts else 1.0
        return round(len(self.layers) * of_layer * missing * self.record)

    @property
    def resident(self) -> int:
        """Bytes of the device that stay there."""
        return self.whole - len(self.layers) * self.layer

    @property
    def buffers(self) -> list[Buffer]:
        """What the device has of them."""
        name = "slots of experts" if self.experts else "slots of layers"
        return [
            Buffer("resident weights", Account.WEIGHTS, (self.resident,)),
            Buffer(name, Account.STAGING, (self.slots, self.slot_bytes)),
        ]

    def passes_host(self, budget: MemoryBudget) -> bool:
        """Whether records may come from files, and so pass a ring of host memory."""
        return bool(budget.cap(Tier.DISK)) or (self.in_files and budget.cap(Tier.HOST) is not None)

    def lower(self, budget: MemoryBudget) -> dict[Tier, dict[Account, int]]:
        """Bytes of host and disk by account."""
        here = self.streamed - self.below
        host = {Account.WEIGHTS: here * self.record, Account.SPARE: here * (self.slot_bytes - self.record)}
        if self.layers and self.passes_host(budget):
            host[Account.STAGING] = LOAD_SLOTS * self.slot_bytes
        if not self.below or self.in_files:
            return {Tier.HOST: host, Tier.DISK: {}}
        spare = self.below * (self.slot_bytes - self.record)
        return {Tier.HOST: host, Tier.DISK: {Account.WEIGHTS: self.below * self.record, Account.SPARE: spare}}

    def as_dict(self, reached: float | None = None) -> Mapping[str, Any]:
        """Plain types only, for JSON. Sizes are bytes; `reached`: as for `moved`."""
        found = {"layers": list(self.layers), "below": self.below, "bytes_per_forward": self.moved(reached)}
        return found | ({"slots": self.slots, "experts": self.of_records} if self.experts else {})
