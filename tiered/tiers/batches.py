"""Records that travel together: one staging slot, one copy or few, one launch of the codec."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from tiered.core.features import Tier
from tiered.offload.arena import Slot
from tiered.offload.fence import Fence
from tiered.offload.ring import RingSlot
from tiered.offload.transport import TransferEvent
from tiered.tiers.banks import DeltaBase
from tiered.tiers.record_book import Entry

FASTEST_FIRST = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(eq=False, slots=True)
class Destination:
    """Where the rows of a fetch go: row i to `out[rows[i]]`, or to `out[i]`; shared by its batches.

    Attributes:
    """

    out: Float[Tensor, "any width"] | None = None
    rows: Int[Tensor, " answer"] | None = None

    def check(self, shape: tuple[int, int]) -> None:
        """Raise ValueError where an answer of `shape` does not fit."""
        (count, width), out, rows = shape, self.out, self.rows
        if out is None and rows is not None:
            raise ValueError("rows say where in `out` each row goes: give `out` as well")
        if out is not None and (out.dim() != 2 or out.shape[1] != width or (rows is None and len(out) < count)):
            raise ValueError(f"out has shape {tuple(out.shape)}; needed are {count} rows of width {width}")
        if rows is not None and (tuple(rows.shape) != (count,) or rows.dtype != torch.int64):
            raise ValueError(f"rows is {rows.dtype} {tuple(rows.shape)}; needed are {count} places in `out` as int64")


@dataclass(eq=False, slots=True)
class Batch:
    """A part of a fetch.

    Attributes:
        entries: one version of each record, in the order of their bytes where they lie.
        rows: the first row of each in the answer.
        bases: what each is decoded against; the batch is a holder of their banks.
        tier: where they were found.
        to: where the answer goes, once that is known.
        reading: whether the book has the batch as a reader of its entries.
        buffer, offsets: what they are decoded from, and the first byte of each there; None before they set out.
        fences: what guards these bytes.
        slot: the staging slot that `buffer` is; None for records on the device, and for what was set aside.
        aside: bytes of `buffer` where it was set aside, which are booked.
        arrival: the end of their copy to it.
        landed: the end of their decoding.
    """

    entries: Sequence[Entry]
    rows: Sequence[int]
    bases: Sequence[DeltaBase | None]
    tier: Tier
    to: Destination
    reading: bool = True
    buffer: UInt8[Tensor, " bytes"] | None = None
    offsets: Sequence[int] = ()
    fences: Sequence[Fence] = ()
    slot: RingSlot | None = None
    aside: int = 0
    arrival: TransferEvent | None = None
    landed: TransferEvent | None = None


def cut(
    entries: Sequence[Entry],
    first: Sequence[int],
    to: Destination,
    staged: Callable[[int], int],
    slot_bytes: int,
) -> list[Batch]:
    """The entries of a fetch as batches: by tier and codec, in the order of their bytes there.

    Args:
        entries: what was asked for.
        first: the first row of each in the answer.
        to: where the answer goes.
        staged: bytes that a record of some bytes takes in a staging slot.
        slot_bytes: bytes of a staging slot. Records on the device need none: those of one chunk are one batch.
    """

    def home(number: int) -> tuple[Tier, str, int]:
        entry = entries[number]
        tier = next(tier for tier in FASTEST_FIRST if tier in entry.slots)
        return tier, entry.form.codec, id(memory_slot(entry, tier).chunk) if tier is Tier.DEVICE else 0

    homes = [home(number) for number in range(len(entries))]
    order = sorted(
        range(len(entries)), key=lambda number: (homes[number], entries[number].slots[homes[number][0]].offset)
    )
    batches: list[Batch] = []
    for (tier, _, _), group in groupby(order, key=homes.__getitem__):
        numbers = list(group)
        on_device = tier is Tier.DEVICE
        taken = [staged(entries[number].form.nbytes) for number in numbers]
        for run in [slice(0, len(numbers))] if on_device else runs(taken, slot_bytes):
            members = [entries[number] for number in numbers[run]]
            bases = [entry.base for entry in members]
            batch = Batch(members, [first[number] for number in numbers[run]], bases, tier, to)
            if on_device:
                slots = [memory_slot(entry, tier) for entry in members]
                batch.buffer, batch.offsets = slots[0].chunk.bytes, [slot.start for slot in slots]
                batch.fences = [slot.fence for slot in slots]
            batches.append(batch)
    return batches


def memory_slot(entry: Entry, tier: Tier) -> Slot:
    """Where `entry` lies in a tier of memory."""
    slot = entry.slots[tier]
    assert isinstance(slot, Slot), "device and host are arenas"
    return slot


def runs(taken: Sequence[int], slot_bytes: int) -> Iterator[slice]:
    """Cut a row of records into runs that fit one staging slot, as long as possible, in order.

    Args:
        taken: bytes that each record takes in a slot.
        slot_bytes: bytes of a slot, in which each of them fits.
    """
    start = filled = 0
    for number, room in enumerate(taken):
        if filled + room > slot_bytes:
            yield slice(start, number)
            start, filled = number, 0
        filled += room
    if start < len(taken):
        yield slice(start, len(taken))
