"""Books: the chunks of a feature, and where their bytes lie in the home and in the slot of a layer.

A home has the layout of its slot, which is that of a resident layer: [sequences, heads, columns] rows. So readers
compute the same bits from a slot, a layer that was written in full is one copy, and a span of columns is one copy a
head and sequence, of no more bytes than were written. A chunk is `chunk_rows` columns of one sequence, the last of a
sequence maybe fewer; it is the part of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

from tiered.offload.copy_segments import Segment, merge_neighbours
from tiered.tiers.parts import Parts

GAP_BYTES = 16 << 10  # of one head: a copy takes longer than these bytes would


@dataclass(eq=False, slots=True)
class Chunks:
    """The layout of every layer of a feature.

    Attributes:
        sequences, heads, columns: of a home.
        row_bytes: bytes of a row of one head.
        chunk_rows: columns of a chunk.
        homes: sequence in the home of each sequence in a slot.
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
        """Chunks of one sequence."""
        return -(-self.columns // self.chunk_rows)

    @property
    def parts(self) -> int:
        """Chunks of a layer, sequence after sequence as they lie in the home."""
        return self.sequences * self.each

    def keep(self, sequences: Sequence[int]) -> None:
        """Let slots have these of their sequences alone (ascending). Slots are empty."""
        self.homes = [self.homes[sequence] for sequence in sequences]

    def of(self, sequences: int) -> Parts:
        """All chunks of the first so many sequences."""
        return self.touched(np.ones((sequences, self.columns), dtype=bool))

    def touched(self, columns: Bool[np.ndarray, "sequences columns"]) -> Parts:
        """Chunks with one of the `columns` of the first sequences."""
        return self._parts(np.any(self._by_chunk(columns, False), axis=2))

    def covered(self, columns: Bool[np.ndarray, "sequences columns"]) -> Parts:
        """Chunks with all of their columns among these."""
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
        """`columns` with the short gaps between them, as far as these are in the chunks `parts`: fewer copies, and no
        more bytes than those of the chunks."""
        framed = np.pad(columns, ((0, 0), (1, 1))).astype(np.int8)
        sequences, edges = np.nonzero(np.diff(framed, axis=1))
        ends, starts = edges[1:-1:2], edges[2::2]
        short = (sequences[1:-1:2] == sequences[2::2]) & ((starts - ends) * self.row_bytes < GAP_BYTES)
        gaps = np.zeros((len(columns), self.columns + 1), dtype=np.int8)
        gaps[sequences[1:-1:2][short], ends[short]] += 1
        gaps[sequences[2::2][short], starts[short]] -= 1
        inside = gaps.cumsum(axis=1)[:, : self.columns] > 0
        return columns | (inside & self.columns_of(parts, len(columns)))

    def runs(self, columns: Bool[np.ndarray, "sequences columns"]) -> list[tuple[int, int, int, int]]:
        """Columns that stand one after another: sequence in the slot and in the home, first and behind the last."""
        framed = np.pad(columns, ((0, 0), (1, 1))).astype(np.int8)
        found, ends = np.nonzero(np.diff(framed, axis=1))
        pairs = zip(found[::2].tolist(), ends[::2].tolist(), ends[1::2].tolist(), strict=True)
        return [(sequence, self.homes[sequence], start, stop) for sequence, start, stop in pairs]

    def _by_chunk(
        self, columns: Bool[np.ndarray, "sequences columns"], beyond: bool
    ) -> Bool[np.ndarray, "sequences chunks chunk_rows"]:
        """`columns` by chunk; `beyond`: what stands for columns behind the last."""
        more = self.each * self.chunk_rows - self.columns
        padded = np.pad(columns, ((0, 0), (0, more)), constant_values=beyond)
        return padded.reshape(len(columns), self.each, self.chunk_rows)

    def _parts(self, chunks: Bool[np.ndarray, "sequences chunks"]) -> Parts:
        parts = np.zeros((self.sequences, self.each), dtype=bool)
        parts[self.homes[: len(chunks)]] = chunks
        return parts.ravel()
