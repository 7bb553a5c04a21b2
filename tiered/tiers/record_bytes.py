"""Books: what the records of one call take of each tier."""

from dataclasses import dataclass

from tiered.core.features import Account, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSizes:
    """Sizes of staging slots and slabs. Raises `ValueError` for sizes that do not work.

    Attributes:
        slot_bytes: bytes of a staging slot that records arrive in, a multiple of 4096; no record may be larger.
        store_bytes: bytes of a staging slot that records leave from, `slot_bytes` at least; None for `slot_bytes`.
        slab_bytes: bytes of what slots in the tiers are cut from, a multiple of 4096 and `slot_bytes` at least; None
            for `slot_bytes`.
        fetch_slots, store_slots: staging slots of the rings.
    """

    slot_bytes: int = 4 << 20
    store_bytes: int | None = None
    slab_bytes: int | None = None
    fetch_slots: int = 3  # one is decoded, one has arrived, one is filling
    store_slots: int = 2

    def __post_init__(self) -> None:
        for name in ("store_bytes", "slab_bytes"):
            if (size := getattr(self, name)) is not None and size < self.slot_bytes:
                raise ValueError(f"{name} = {size} must be slot_bytes = {self.slot_bytes} or more")

    @property
    def slab(self) -> int:
        return self.slab_bytes or self.slot_bytes

    @property
    def store(self) -> int:
        return self.store_bytes or self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBytes:
    """Bytes of the hidden states that a policy keeps as records. Which clusters there are is known only once rows are
    clustered, so all of it is what the call takes at most.

    Attributes:
        tier: that keeps the records, device or host.
        clusters: of one layer of one sequence.
        records: bytes of all records.
        arena: bytes of the memory that they lie in, the padding of their slots included.
        references: bytes on the device of what drift is measured with, and of the clusters' columns.
        banks: bytes on the device of the centroids that deltas are taken against.
        slot_bytes: of a staging slot that records arrive in; no record is larger.
        store_bytes: of one that they leave from, many at a time.
        slab_bytes: of what their memory is cut from.
        fetch_slots, store_slots: of the rings on the device.
        activations: bytes on the device that a step takes beside those of every call: where a few clusters may
            hold all rows, an update goes over all of them.
    """

    tier: Tier
    clusters: int
    records: int
    arena: int
    references: int
    banks: int
    slot_bytes: int
    store_bytes: int
    slab_bytes: int
    fetch_slots: int
    store_slots: int
    activations: int

    @property
    def staging(self) -> int:
        """Bytes of the rings on the device."""
        return self.slot_bytes * self.fetch_slots + self.store_bytes * self.store_slots

    @property
    def device(self) -> dict[Account, int]:
        """Bytes of the device by account, beside what every call takes."""
        held = {Account.HIDDEN: self.records, Account.SPARE: self.arena - self.records}
        return {
            Account.CENTROIDS: self.references + self.banks,
            Account.STAGING: self.staging,
            Account.ACTIVATIONS: self.activations,
            **(held if self.tier is Tier.DEVICE else {}),
        }

    @property
    def host(self) -> dict[Account, int]:
        """Bytes of the host by account."""
        if self.tier is Tier.DEVICE:
            return {}
        return {Account.HIDDEN: self.records, Account.SPARE: self.arena - self.records}
