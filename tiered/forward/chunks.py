"""Books: the chunks of a feature, and their bytes in the home and in the slot of a layer.

A home has the layout of its slot, which is that of a resident layer: [sequences, heads, columns] rows. So readers
compute the same bits from a slot. A layer that was written in full is one copy. A span of columns is one copy for each
head and sequence, of no more bytes than were written. A chunk is `chunk_rows` columns of one sequence, or fewer at its
end; it is the part of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

from tiered.offload.copy_segments import Segment, merge_neighbours
from tiered.tiers.parts import Parts

GAP_BYTES = 16 << 10  # of one head: below this, moving the bytes of a gap is faster than a second copy


@dataclass(eq=False, slots=True)
class Chunks:
    """The layout of every layer of a feature.

    Attributes:
        sequences, heads, columns: size of a home.
        row_bytes: bytes of a row of one head.
        chunk_rows: columns of a chunk.
        homes: for each sequence in a slot, its sequence in the home.
    """

    sequences: int
    heads: int
    columns: int
    row_bytes: int
    chunk_rows: int
    homes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.homes = list(range(self.sequences))

    @property
    def each(self) -> int:
        """Number of chunks of one sequence."""
        return -(-self.columns // self.chunk_rows)

    @property
    def parts(self) -> int:
        """Number of chunks of a layer. Their order is that of sequences in the home."""
        return self.sequences * self.each

    def keep(self, sequences: Sequence[int]) -> None:
        """Keep only these `sequences` of the slots (ascending). The slots must be empty."""
        self.homes = [self.homes[sequence] for sequence in sequences]

    def of(self, sequences: int) -> Parts:
        """All chunks of the first `sequences`."""
        return self._parts(np.ones((sequences, self.each), dtype=bool))

    def touched(self, columns: Bool[np.ndarray, "sequences columns"]) -> Parts:
        """Chunks with at least one of the `columns` of the first sequences."""
        return self._parts(np.any(self._by_chunk(columns, False), axis=2))

    def covered(self, columns: Bool[np.ndarray, "sequences columns"]) -> Parts:
        """Chunks whose columns are all among `columns`."""
        return self._parts(np.all(self._by_chunk(columns, True), axis=2))

    def columns_of(self, parts: Parts, sequences: int) -> Bool[np.ndarray, "sequences columns"]:
        """All columns of the chunks `parts`, of the first sequences."""
        chunks = parts.reshape(self.sequences, self.each)[self.homes[:sequences]]
        return chunks.repeat(self.chunk_rows, axis=1)[:, : self.columns]

    def segments(self, parts: Parts) -> list[Segment]:
        """The bytes of `parts`, from the home to the slot."""
        return self.segments_of(self.columns_of(parts, len(self.homes)))

    def segments_of(self, columns: Bool[np.ndarray, "sequences columns"]) -> list[Segment]:
        """The bytes of `columns` of the first sequences, from the home to the slot."""
        pieces: list[tuple[int, int, int]] = []
        head = self.columns * self.row_bytes
        for sequence, home, start, stop in self.runs(columns):
            for number in range(self.heads):
                at, to = ((each * self.heads + number) * head + start * self.row_bytes for each in (home, sequence))
                pieces.append((at, to, (stop - start) * self.row_bytes))
        return merge_neighbours(pieces)

    def joined(
        self, columns: Bool[np.ndarray, "sequences columns"], parts: Parts
    ) -> Bool[np.ndarray, "sequences columns"]:
        """`columns` with the short gaps between them, as far as these gaps are in the chunks `parts`. This takes fewer
        copies, and no more bytes than the chunks have."""
        sequences, edges = _edges(columns)
        ends, starts = edges[1:-1:2], edges[2::2]
        short = (sequences[1:-1:2] == sequences[2::2]) & ((starts - ends) * self.row_bytes < GAP_BYTES)
        if not short.any():
            return columns
        gaps = np.zeros((len(columns), self.columns + 1), dtype=np.int8)
        gaps[sequences[1:-1:2][short], ends[short]] += 1
        gaps[sequences[2::2][short], starts[short]] -= 1
        inside = gaps.cumsum(axis=1)[:, : self.columns] > 0
        return columns | (inside & self.columns_of(parts, len(columns)))

    def runs(self, columns: Bool[np.ndarray, "sequences columns"]) -> list[tuple[int, int, int, int]]:
        """Runs of adjacent columns: sequence in the slot, sequence in the home, first column, end."""
        found, ends = _edges(columns)
        pairs = zip(found[::2].tolist(), ends[::2].tolist(), ends[1::2].tolist(), strict=True)
        return [(sequence, self.homes[sequence], start, stop) for sequence, start, stop in pairs]

    def _by_chunk(
        self, columns: Bool[np.ndarray, "sequences columns"], beyond: bool
    ) -> Bool[np.ndarray, "sequences chunks chunk_rows"]:
        """`columns` by chunk. `beyond`: the value for columns behind the last."""
        padded = np.full((len(columns), self.each * self.chunk_rows), beyond)
        padded[:, : self.columns] = columns
        return padded.reshape(len(columns), self.each, self.chunk_rows)

    def _parts(self, chunks: Bool[np.ndarray, "sequences chunks"]) -> Parts:
        parts = np.zeros((self.sequences, self.each), dtype=bool)
        parts[self.homes[: len(chunks)]] = chunks
        return parts.ravel()


def _edges(columns: Bool[np.ndarray, "sequences columns"]) -> tuple[np.ndarray, np.ndarray]:
    """Sequence and column of each edge of a run of adjacent columns: its first column, and the one behind its last."""
    # `np.pad` takes a multiple of the time, and each streamed layer of each forward asks.
    framed = np.zeros((len(columns), columns.shape[1] + 2), dtype=bool)
    framed[:, 1:-1] = columns
    sequences, edges = np.nonzero(framed[:, 1:] != framed[:, :-1])
    return sequences, edges
