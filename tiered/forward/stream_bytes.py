"""Books: bytes by tier of features with streamed layers."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiered.core.buffers import Buffer
from tiered.core.features import Account, Feature
from tiered.forward.chunks import Chunks
from tiered.forward.sizes import CallShape, stored_row
from tiered.offload.size_class import UNIT, size_class

MOST_CHUNK_ROWS, FEWEST_CHUNK_ROWS = 128, 16
_CHUNKS = 8  # at least as many chunks in a short sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStream:
    """One feature with streamed layers.

    Attributes:
        feature: the feature.
        layers: its streamed layers, ascending.
        of_layers: number of layers that may be streamed (`ModelShape.streamable`).
        slots: device slots that the streamed layers share.
        sequences, heads, columns: size of a layer.
        row_bytes: bytes of a row of one head.
        chunk_rows: columns of a chunk, which is fetched as a whole or not at all.
    """

    feature: Feature
    layers: tuple[int, ...]
    of_layers: int
    slots: int
    sequences: int
    heads: int
    columns: int
    row_bytes: int
    chunk_rows: int

    def chunks(self) -> Chunks:
        return Chunks(self.sequences, self.heads, self.columns, self.row_bytes, self.chunk_rows)

    @property
    def account(self) -> Account:
        """Its account below the device."""
        return Account(self.feature)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of all sequences."""
        return self.sequences * self.heads * self.columns * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.layer_bytes // UNIT) * UNIT

    @property
    def room(self) -> int:
        """Host bytes for one layer, rounded up so that calls of similar sizes reuse the same pieces."""
        return size_class(self.layer_bytes)

    @property
    def records(self) -> int:
        """Bytes of all streamed layers."""
        return len(self.layers) * self.layer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBytes:
    """Bytes of the streamed features `streams` of one call of `sizes`."""

    sizes: CallShape
    streams: tuple[FeatureStream, ...]

    @classmethod
    def of(cls, sizes: CallShape, counts: Mapping[Feature, int], *, slots: int) -> "StreamBytes | None":
        """The bytes of `counts` streamed layers of each feature; None if there are none. The layers are spread evenly
        over the stack, so copies overlap the computation of the layers between them.

        Args:
            sizes: sizes of the call.
            counts: number of streamed layers by feature.
            slots: device slots of each feature.
        """
        streams: list[FeatureStream] = []
        found = sizes.shape.streamable()
        for feature, count in counts.items():
            if not count or found is None:
                continue
            _, kind = found
            columns, rows = sizes.columns(feature), FEWEST_CHUNK_ROWS
            while rows < min(MOST_CHUNK_ROWS, columns / _CHUNKS):
                rows *= 2
            heads, elements = stored_row(kind.shape, feature, sizes.kv, sizes.element)
            if not elements:
                continue
            streams.append(
                FeatureStream(
                    feature=feature,
                    layers=tuple(kind.layers[place] for place in spread(count, len(kind.layers))),
                    of_layers=len(kind.layers),
                    slots=min(slots, count),
                    sequences=sizes.sequences,
                    heads=heads,
                    columns=columns,
                    row_bytes=elements * sizes.element,
                    chunk_rows=rows,
                )
            )
        return cls(sizes=sizes, streams=tuple(streams)) if streams else None

    def beside(self, buffers: Iterable[Buffer]) -> list[Buffer]:
        """`buffers` of a call without the streamed layers."""
        streamed = {stream.account: len(stream.layers) for stream in self.streams}
        (streamable, _), left, seen = self.sizes.shape.streamable() or (0, None), [], Counter[Account]()
        for buffer in buffers:  # one for each kind of layers, in their order
            if buffer.account in streamed and seen[buffer.account] == streamable:
                layers = buffer.shape[0] - streamed[buffer.account]
                left.append(replace(buffer, shape=(layers, *buffer.shape[1:])))
            else:
                left.append(buffer)
            seen[buffer.account] += 1
        return left

    @property
    def moved(self) -> int:
        """Host-to-device bytes of a forward that reads everything."""
        return sum(stream.records for stream in self.streams)

    @property
    def buffers(self) -> list[Buffer]:
        """Slots on the device."""
        return [
            Buffer(f"slots of {stream.feature.value}", Account.STAGING, (stream.slots, stream.slot_bytes))
            for stream in self.streams
        ]

    @property
    def host(self) -> dict[Account, int]:
        """Host bytes by account."""
        spare = sum(len(stream.layers) * (stream.room - stream.layer_bytes) for stream in self.streams)
        return {stream.account: stream.records for stream in self.streams} | {Account.SPARE: spare}

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON. Sizes are bytes."""
        return {
            "layers": {stream.feature.value: list(stream.layers) for stream in self.streams},
            "bytes_per_forward": self.moved,
        }


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of the layers, spread evenly over the stack, ascending."""
    return tuple((2 * number + 1) * layers // (2 * count) for number in range(count))
