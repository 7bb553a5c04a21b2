"""Books: what a call takes of each tier for features of which some layers are streamed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.core.features import Account, Feature
from tiered.forward.pages import Pages
from tiered.forward.sizes import CallShape, stored_row
from tiered.offload.slabs import UNIT, SlabBook, size_class

FETCH_SLOTS = 4  # of the ring that pages arrive in: decoded, arrived, and two filling
STORE_SLOTS = 2  # one is filled while the other is copied
SLOT_BYTES = 4 << 20  # of a staging slot, at most, unless a page is larger: a link is at full speed from there
MOST_PAGE_ROWS, FEWEST_PAGE_ROWS = 128, 16
_PAGES = 8  # of a short sequence: a step writes few columns, and what it writes goes back in whole pages
_INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStream:
    """One feature of which some layers are streamed.

    Attributes:
        feature: which.
        layers: that are streamed, ascending.
        of_layers: layers for which it is kept in all.
        workspaces: on the device that these pass through.
        pages: of one layer.
        layer_bytes: of one layer of all sequences, on the device.
        record_bytes: of its records.
    """

    feature: Feature
    layers: tuple[int, ...]
    of_layers: int
    workspaces: int
    pages: Pages
    layer_bytes: int
    record_bytes: int

    @property
    def account(self) -> Account:
        """Under which all of it is booked."""
        return Account(self.feature)

    @property
    def records(self) -> int:
        """Bytes below the device."""
        return len(self.layers) * self.record_bytes

    @property
    def saved(self) -> int:
        """Bytes of the device that it would take if all layers were resident."""
        return (len(self.layers) - self.workspaces) * self.layer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBytes:
    """Bytes of the streamed features of one call.

    Attributes:
        streams: what is streamed.
        element_bytes: of an element in the model's dtype.
        slot_bytes: of a staging slot, and of the slabs of the arena at the least.
        fetch_slots, store_slots: of the rings on the device.
    """

    streams: tuple[FeatureStream, ...]
    element_bytes: int
    slot_bytes: int
    fetch_slots: int = FETCH_SLOTS
    store_slots: int = STORE_SLOTS

    @classmethod
    def of(
        cls, sizes: CallShape, counts: Mapping[Feature, int], *, workspaces: int, least_slot: int = 0
    ) -> "StreamBytes | None":
        """Of `counts` layers of each feature, spread evenly over the stack so that copies run beside the layers between
        them; None where there are none.

        Args:
            sizes: of the call.
            counts: streamed layers by feature.
            workspaces: of each feature.
            least_slot: bytes that a staging slot has at the least, because others use the rings as well.
        """
        element, of_layers = sizes.element, sizes.shape.layers
        streams: list[FeatureStream] = []
        for feature, count in counts.items():
            if not count:
                continue
            columns = sizes.columns(feature)
            pages = _pages(sizes, feature, columns)
            of_sequence = (pages.each - 1) * pages.bytes(0, element) + pages.bytes(pages.each - 1, element)
            streams.append(
                FeatureStream(
                    feature=feature,
                    layers=spread(count, of_layers),
                    of_layers=of_layers,
                    workspaces=min(workspaces, count),
                    pages=pages,
                    layer_bytes=sizes.sequences * columns * pages.heads * pages.elements * element,
                    record_bytes=sizes.sequences * of_sequence,
                )
            )
        if not streams:
            return None
        page = max(stream.pages.bytes(0, element) for stream in streams)
        layer = max(stream.record_bytes for stream in streams)
        slot = -(-max(size_class(page), min(SLOT_BYTES, layer // 8), least_slot) // UNIT) * UNIT
        return cls(streams=tuple(streams), element_bytes=element, slot_bytes=slot)

    @property
    def moved(self) -> int:
        """Bytes that go up to the device in a forward that reads everything."""
        return sum(stream.records for stream in self.streams)

    @property
    def index_bytes(self) -> int:
        """Bytes on the device of the places of pages in workspaces: of all pages in two groupings."""
        layouts = {(stream.pages.heads, stream.pages.columns): stream.pages.batch for stream in self.streams}
        return sum(2 * _INT64 * batch * heads * columns for (heads, columns), batch in layouts.items())

    @property
    def activations(self) -> int:
        """Bytes on the device beside features and rings: the indices, the rows of a staging slot on their way to it,
        and what making their indices takes."""
        leaving = 0
        for pages in (stream.pages for stream in self.streams):
            rows = pages.rows(0) * pages.in_slot(self.slot_bytes, self.element_bytes)
            leaving = max(leaving, rows * (pages.elements * self.element_bytes + 4 * _INT64))
        return self.index_bytes + leaving

    @property
    def store_bytes(self) -> int:
        """Of a staging slot that records leave from."""
        return self.slot_bytes

    @property
    def slab_bytes(self) -> int:
        """Of a slab of the arena, where nothing else wants larger ones."""
        return self.slot_bytes

    @property
    def records(self) -> dict[Account, int]:
        """Bytes below the device, by account."""
        return {stream.account: stream.records for stream in self.streams}

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON. Sizes are bytes."""
        return {
            "layers": {stream.feature.value: list(stream.layers) for stream in self.streams},
            "bytes_per_forward": self.moved,
        }

    def arena(self, slab_bytes: int, *, header: int = 0) -> int:
        """Bytes of the slabs that hold all records, with `header` bytes in front of each: in every size class as many
        as there are, and those that a store puts beside what it replaces."""
        book = SlabBook(slab_bytes)
        records: Counter[int] = Counter()
        for stream in self.streams:
            pages, each = stream.pages, stream.pages.each
            for page, count in ((0, each - 1), (each - 1, 1)):
                nbytes = header + pages.bytes(page, self.element_bytes)
                records[book.room_for(nbytes)] += len(stream.layers) * pages.batch * count
        slabs = sum(
            -(-(count + min(count, self.slot_bytes // room)) // book.slots_per_slab(room))
            for room, count in records.items()
        )
        return slabs * slab_bytes


def spread(count: int, layers: int) -> tuple[int, ...]:
    """So many of the layers, spread evenly over the stack, ascending."""
    return tuple((2 * number + 1) * layers // (2 * count) for number in range(count))


def _pages(sizes: CallShape, feature: Feature, columns: int) -> Pages:
    rows = FEWEST_PAGE_ROWS
    while rows < min(MOST_PAGE_ROWS, columns / _PAGES):
        rows *= 2
    heads, elements = stored_row(sizes.shape, feature, sizes.kv, sizes.element)
    return Pages(sizes.sequences, heads, columns, elements, rows)
