"""Books: where the parts of a packed NVFP4 record lie. Integers only.

      byte 0                              codes           rows × groups × 8    two E2M1 codes a byte, even column low
      rows × groups × 8                   record scale    4                    FP32
      … + 4                               projections     rows × 2             BF16; a delta record only
      … + 4 (+ rows × 2)                  block scales    rows × groups        E4M3, one for 16 columns

Codes come first, so they are as well aligned as the record itself; every part is aligned to its own elements, whatever
the number of rows. A row is padded with zeros to whole groups of 16 columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GROUP = 16  # columns that share one E4M3 scale
CODE_BYTES = GROUP // 2  # of one group
RECORD_SCALE_BYTES = 4
PROJECTION_BYTES = 2

# Elements that are coded at once by the CPU, 1 MiB in float32: so many that the time of an operation is that of its
# elements, so few that the caches hold them from one to the next.
CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Nvfp4Layout:
    """Byte offsets within a record of `rows` rows of `width` columns; `delta`: it holds a projection for every row."""

    rows: int
    width: int
    delta: bool

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.width // GROUP)

    @property
    def record_scale(self) -> int:
        """Offset of the FP32 scale, which is also the size of the codes."""
        return self.rows * self.groups * CODE_BYTES

    @property
    def projections(self) -> int:
        """Offset of the projections."""
        return self.record_scale + RECORD_SCALE_BYTES

    @property
    def block_scales(self) -> int:
        """Offset of the block scales."""
        return self.projections + self.delta * self.rows * PROJECTION_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return self.block_scales + self.rows * self.groups


def part_bytes(rows: Sequence[int], width: int, delta: bool) -> list[tuple[int, int, int, int]]:
    """Bytes of codes, scale, projections and block scales of records of so many rows each."""
    row = Nvfp4Layout(1, width, delta)
    codes, projections, block_scales = row.record_scale, row.block_scales - row.projections, row.groups
    return [(count * codes, RECORD_SCALE_BYTES, count * projections, count * block_scales) for count in rows]


def chunks(rows: int, width: int) -> Iterator[slice]:
    """`rows` rows of `width` columns, as many at a time as are coded at once."""
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
