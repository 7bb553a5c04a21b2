"""Books: bytes of the weights by tier if some of them are streamed.

A record is the matrices of a layer, or of one expert. Layers are streamed one by one; the others stay on the device.
Experts are streamed all or none, and as many of them are on the device as there are slots.
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

RING_SLOTS = 2  # one record is used while the next one is fetched
LOAD_SLOTS = 2  # in host memory, for records from files: one is read while the other goes to the device
FEWEST = RING_SLOTS + 1  # layers: streaming no more than the ring has slots saves nothing


@cache
def apart(layers: int) -> tuple[int, ...]:
    """All layers of a stack that forwards cycle through, each as far as possible from those before it."""
    order = [layers // 2]
    while len(order) < layers:
        left = [layer for layer in range(layers) if layer not in order]
        order.append(max(left, key=lambda layer: min(min(abs(layer - o), layers - abs(layer - o)) for o in order)))
    return tuple(order)


def record_keys(layer: int, experts: int | None) -> list[Hashable]:
    """The keys of a layer's records: the layer, or the pairs of the layer and each of its experts."""
    return [layer] if experts is None else [(layer, expert) for expert in range(experts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """The streamed weights and their bytes. Norms, biases, sinks and routers of every layer, the embedding and the head
    stay on the device, and so do layers without a record.

    Attributes:
        whole: bytes of all weights on the device; on a GPU, of the allocator's segments that hold them.
        layer: bytes of the matrices of a layer, which lie in one piece on the device.
        record: bytes of a record, which lies in one piece in every tier.
        recorded: layers with records, ascending.
        experts: experts of a layer, with one record each; None if the layer has one record.
        fixed: True if no layer may be streamed.
        in_files: True if the checkpoint's files hold the same bytes, so that records may be read from there.
        layers: layers whose records are below the device, ascending.
        slots: device slots that records are used in.
        below: number of records that the host has no room for.
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
        """All weights on the device. `in_files`: None to decide by form and dtype. `gpu`: it is a GPU."""
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
        """The same with `count` records that the device has no room for, and `below` that the host has no room for.
        Layers are spread, so copies overlap the layers between them. A larger count includes the layers of a smaller
        one, so another call only moves the difference."""
        layers, slots = self.recorded, self.of_records - count
        if self.experts is None:
            layers, slots = tuple(sorted(layers[place] for place in apart(len(layers))[:count])), RING_SLOTS
        if not count:
            layers, slots = (), 0
        return replace(self, layers=layers, slots=slots, below=below)

    @property
    def of_records(self) -> int:
        return len(self.recorded) * (self.experts or 1)

    @property
    def most(self) -> int:
        """Most records that the device may have no room for."""
        return self.of_records - (RING_SLOTS if self.experts else 0)

    @property
    def fewest(self) -> int:
        """Fewest records that the device must lack room for to save a byte."""
        return 1 if self.experts else FEWEST

    def keys(self, layer: int) -> list[Hashable]:
        return record_keys(layer, self.experts)

    @property
    def streamed(self) -> int:
        """Number of records below the device."""
        return len(self.layers) * (self.experts or 1)

    @property
    def count(self) -> int:
        """Number of records below the device without a slot of their own."""
        return self.streamed - (self.slots if self.experts else 0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, and of a record's room in every tier."""
        return -(-self.record // UNIT) * UNIT

    def moved(self, reached: float | None = None) -> int:
        """Host-to-device bytes of a forward. All streamed layers are fetched. Of experts, those without a slot are,
        among `reached` in each layer that its rows go to (None for all). The share of experts with a slot is the hit
        rate of a router that picks at random."""
        of_layer = 1.0 if self.experts is None else self.experts if reached is None else reached
        missing = self.count / self.of_records if self.experts else 1.0
        return round(len(self.layers) * of_layer * missing * self.record)

    @property
    def resident(self) -> int:
        """Bytes of weights that stay on the device."""
        return self.whole - len(self.layers) * self.layer

    @property
    def buffers(self) -> list[Buffer]:
        """The resident weights and the slots."""
        name = "slots of experts" if self.experts else "slots of layers"
        return [
            Buffer("resident weights", Account.WEIGHTS, (self.resident,)),
            Buffer(name, Account.STAGING, (self.slots, self.slot_bytes)),
        ]

    def passes_host(self, budget: MemoryBudget) -> bool:
        """Whether records may come from files, and so through a ring of host memory."""
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
        """Plain types only, for JSON. Sizes are bytes; `reached` as in `moved`."""
        found = {"layers": list(self.layers), "below": self.below, "bytes_per_forward": self.moved(reached)}
        return found | ({"slots": self.slots, "experts": self.of_records} if self.experts else {})
