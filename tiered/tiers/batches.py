"""Records that travel together: one staging slot, one copy or few, one launch of the codec."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from jaxtyping import UInt8
from torch import Tensor

from tiered.core.features import Tier
from tiered.offload.fence import Fence
from tiered.offload.ring import RingSlot
from tiered.offload.transport import TransferEvent
from tiered.tiers.banks import Base
from tiered.tiers.record_book import Entry

FASTEST_FIRST = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(eq=False, slots=True)
class Batch:
    """A part of a fetch.

    Attributes:
        entries: one version of each record, in the order of their bytes where they lie.
        rows: the first row of each in the answer.
        bases: what each is decoded against; the batch is a holder of their banks.
        tier: where they were found.
        reading: whether the book has the batch as a reader of its entries.
        buffer, offsets: what they are decoded from, and the first byte of each there; None before they set out.
        fences: what guards these bytes.
        slot: the staging slot that `buffer` is; None for records on the device.
        arrival: the end of their copy to it.
        paged: whether they are pages of a feature, which have a ring of their own.
    """

    entries: Sequence[Entry]
    rows: Sequence[int]
    bases: Sequence[Base | None]
    tier: Tier
    reading: bool = True
    buffer: UInt8[Tensor, " bytes"] | None = None
    offsets: Sequence[int] = ()
    fences: Sequence[Fence] = ()
    slot: RingSlot | None = None
    arrival: TransferEvent | None = None
    paged: bool = False


def cut(entries: Sequence[Entry], first: Sequence[int], room_of: Callable[[int], int], slot_bytes: int) -> list[Batch]:
    """The entries of a fetch as batches: by tier and codec, in the order of their bytes there.

    Args:
        entries: what was asked for.
        first: the first row of each in the answer.
        room_of: bytes that a record of some bytes takes in a staging slot.
        slot_bytes: bytes of a staging slot. Records on the device need none: those of one chunk are one batch.
    """

    def home(number: int) -> tuple[Tier, str, int]:
        entry = entries[number]
        tier = next(tier for tier in FASTEST_FIRST if tier in entry.places)
        return tier, entry.form.codec, id(entry.places[tier].chunk) if tier is Tier.DEVICE else 0

    homes = [home(number) for number in range(len(entries))]
    order = sorted(
        range(len(entries)), key=lambda number: (homes[number], entries[number].places[homes[number][0]].offset)
    )
    batches: list[Batch] = []
    for (tier, _, _), group in groupby(order, key=homes.__getitem__):
        numbers = list(group)
        on_device = tier is Tier.DEVICE
        rooms = [room_of(entries[number].form.nbytes) for number in numbers]
        for run in [slice(0, len(numbers))] if on_device else runs(rooms, slot_bytes):
            members = [entries[number] for number in numbers[run]]
            batch = Batch(members, [first[number] for number in numbers[run]], [entry.base for entry in members], tier)
            if on_device:
                slots = [entry.places[tier] for entry in members]
                batch.buffer, batch.offsets = slots[0].chunk.bytes, [slot.start for slot in slots]
                batch.fences = [slot.fence for slot in slots]
            batches.append(batch)
    return batches


def runs(rooms: Sequence[int], slot_bytes: int) -> Iterator[slice]:
    """Cut a row of records into runs that fit one staging slot, as long as possible, in order.

    Args:
        rooms: bytes that each record takes in a slot.
        slot_bytes: bytes of a slot.

    Raises:
        ValueError: a record is larger than a slot; before the first run.
    """
    if rooms and max(rooms) > slot_bytes:
        raise ValueError(f"a record takes {max(rooms)} bytes; allowed are the {slot_bytes} of a staging slot")
    start = filled = 0
    for number, room in enumerate(rooms):
        if filled + room > slot_bytes:
            yield slice(start, number)
            start, filled = number, 0
        filled += room
    if start < len(rooms):
        yield slice(start, len(rooms))
