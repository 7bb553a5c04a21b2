"""The homes of streamed weights: pinned host memory, the checkpoint's files, or the scratch file."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack

import torch

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.forward.weight_bytes import LOAD_SLOTS, WeightBytes
from tiered.offload.fence import Region
from tiered.offload.file_record import FileRecord
from tiered.offload.transport import Transport
from tiered.tiers.host_pool import HostPool
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Home, Tiers


class WeightHomes:
    """The tiers of streamed weights, open while a record is streamed. Keys are those of `WeightBytes.keys`.

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
        files: Mapping[Hashable, FileRecord],
        transport: Transport | None,
        recurs: Callable[[Hashable], bool],
    ) -> None:
        """`files`: by key, the span of the checkpoint's files that equals a record. `recurs` as in `Residency`. Raises
        `TierCapacityError` if the host has no room for the slots that records from files pass through."""
        self._files = files
        self._layers = {key: layer for layer in needed.recorded for key in needed.keys(layer)}
        self._nbytes, self._room = needed.record, needed.slot_bytes
        self.tiers = Tiers(ledger, device=device, transport=transport, pool=pool)
        passing = None
        if needed.passes_host(ledger.budget):
            passing = self.tiers.slots(Region.LOAD_SLOT, LOAD_SLOTS, self._room)
        self.residency = Residency(self.tiers.traffic, self.tiers.record, passing, recurs=recurs)
        self._ring = ExitStack()

    @property
    def layers(self) -> dict[Hashable, int]:
        """The layer of each record by key, ascending."""
        return {key: layer for key, layer in self._layers.items() if key in self.residency}

    @property
    def on_host(self) -> list[Hashable]:
        """Keys of the records in host memory, ascending."""
        return [key for key in self.layers if self.residency.home(key).tier is Tier.HOST]

    def open_slots(self, slots: int) -> None:
        """Open the slots on the device. Raises `TierCapacityError` if it has no room for them."""
        if not self.residency.opened:
            self.residency.open(self.tiers.slots(Region.FETCH_SLOT, slots, self._room, self._ring))

    def close_slots(self) -> None:
        self.residency.close_slots()
        self._ring.close()

    def host_home(self) -> Home:
        """Room for one record. Raises `TierCapacityError` if the host has none."""
        return self.tiers.host_home(Account.WEIGHTS, self._nbytes, self._room)

    def place(self, key: Hashable, home: Home) -> None:
        """Add a record with this home."""
        self.residency.place(key, home, layer=self._layers[key])

    def read(self, key: Hashable) -> None:
        """Add a record whose home is the checkpoint's files."""
        self.place(key, Home.in_files(self._files[key]))

    def sink(self, key: Hashable) -> None:
        """Move a record out of host memory. Errors as `Tiers.to_scratch`."""
        if key in self._files:
            home = Home.in_files(self._files[key])
        else:
            home = self.tiers.to_scratch(self.residency.home(key), Account.WEIGHTS, self._room, self._layers[key])
        self.residency.move(key, home)

    def lift(self, key: Hashable) -> None:
        """Move a record to host memory. Errors as `Tiers.to_host`."""
        home = self.tiers.to_host(self.residency.home(key), Account.WEIGHTS, self._room, self._layers[key])
        self.residency.move(key, home)

    def make_room(self, room: int) -> int:
        """Move records out of host memory until at most `room` are left; returns their number. Errors as `sink`."""
        here = self.on_host
        while len(here) > room:
            self.sink(here.pop())
        return len(here)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books contradict themselves."""
        self.residency.check_integrity()
        self.tiers.check_integrity()

    def close(self) -> None:
        self.close_slots()
        self.tiers.close()
