"""Where the records of streamed layers lie: pinned host memory, the checkpoint's files, or the scratch file."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.forward.weight_bytes import LOAD_SLOTS, RING_SLOTS, WeightBytes
from tiered.offload.fence import Region
from tiered.offload.file_record import FileRecord
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Home, Tiers


class LayerHomes:
    """The tiers of streamed weights, open while a layer is streamed. The key of a record is its layer.

    Attributes:
        tiers: memory, files and copies.
        residency: the records, and the slots that they are used in.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: HostPool,
        device: torch.device,
        needed: WeightBytes,
        files: Mapping[int, FileRecord],
        transport: Transport | None,
    ) -> None:
        """`files`: by layer, where the checkpoint's files hold the very bytes of its record. Raises `TierCapacityError`
        if the host has no room for the slots that records from files pass."""
        self._files, self._layers = files, needed.recorded
        self._nbytes, self._room = needed.record, needed.slot_bytes
        self.tiers = Tiers(ledger, device=device, transport=transport, pool=pool)
        passing = None
        if needed.passes_host(ledger.budget):
            passing = self.tiers.slots(Region.LOAD_SLOT, LOAD_SLOTS, self._room)
        self.residency = Residency(self.tiers.traffic, self.tiers.record, passing)
        self._ring = ExitStack()

    @property
    def streamed(self) -> list[int]:
        """Layers with records, ascending."""
        return [layer for layer in self._layers if layer in self.residency]

    @property
    def on_host(self) -> list[int]:
        """Those of them whose records are in host memory."""
        return [layer for layer in self.streamed if self.residency.home(layer).tier is Tier.HOST]

    def open_ring(self) -> None:
        """Open the slots on the device. Raises `TierCapacityError` if it has no room for them."""
        if not self.residency.opened:
            self.residency.open(self.tiers.slots(Region.FETCH_SLOT, RING_SLOTS, self._room, self._ring))

    def close_ring(self) -> None:
        """Give the slots on the device back."""
        self.residency.close_slots()
        self._ring.close()

    def host_home(self) -> Home:
        """Room for one record. Raises `TierCapacityError` if the host has none."""
        return self.tiers.host_home(Account.WEIGHTS, self._nbytes, self._room)

    def place(self, layer: int, home: Home) -> None:
        """Add the record of a layer."""
        self.residency.place(layer, home, layer=layer)

    def read(self, layer: int) -> None:
        """Add the record of a layer as the checkpoint's files have it."""
        self.place(layer, Home.in_files(self._files[layer]))

    def sink(self, layer: int) -> None:
        """Let the record of a layer leave host memory. Errors as `Tiers.to_scratch`."""
        if layer in self._files:
            home = Home.in_files(self._files[layer])
        else:
            home = self.tiers.to_scratch(self.residency.home(layer), Account.WEIGHTS, self._room, layer)
        self.residency.move(layer, home)

    def lift(self, layer: int) -> None:
        """Bring the record of a layer to host memory. Errors as `Tiers.to_host`."""
        home = self.tiers.to_host(self.residency.home(layer), Account.WEIGHTS, self._room, layer)
        self.residency.move(layer, home)

    def make_room(self, room: int) -> None:
        """Let records leave host memory until at most `room` are there. Errors as `sink`."""
        here = self.on_host
        while len(here) > room:
            self.sink(here.pop())

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books contradict themselves."""
        self.residency.check_integrity()
        self.tiers.check_integrity()

    def close(self) -> None:
        """Give everything back."""
        self.close_ring()
        self.tiers.close()
