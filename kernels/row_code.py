"""Books: the codes of rows, each of which can be written and read alone. Integers only.

                                     bits   columns with a scale   scale of the row   whole
    keys, values, hidden    fp8      8      -                      E8M0               words
                            nvfp4    4      16, E4M3               E8M0               words
    weights                 fp8      8      -                      float32            vectors
                            int8     8      -                      float32            vectors
                            int4     4      32, bfloat16           -                  vectors
                            nvfp4    4      16, E4M3               float32            vectors

An element is E4M3 in fp8, E2M1 in nvfp4, two's complement in int8 and int4. All are symmetric: a value is its code
times its scale, or times both scales. The parts of a row are, in order:

1. its codes; those of 4 bits two a byte, even column low;
2. the scales of its groups, the last of which is padded with zeros;
3. its own scale, at a multiple of its size;
4. zeros up to whole words of 4 bytes, which a GPU reads at once, or whole vectors of 16.

A residual against a base ends with its projection, a BF16 number: the row is projection · base + residual.

E8M0 is a power of two in one byte. So decoded values are exact in every dtype that models have, and encode to the same
bytes again. But in float16 a finite row that reaches 63488 may decode to infinity. 255 marks a row that was not finite,
which decodes to NaN. A float32 holds the scales of weights that are quantised already.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

GROUP = 16  # columns that share one E4M3 scale
PROJECTION_BYTES = 2
WORD, VECTOR = 4, 16

# Elements that the CPU codes at once, 1 MiB in float32: enough to amortise the start of an operation, and few enough to
# stay in the caches from one operation to the next.
CHUNK_ELEMENTS = 1 << 18


class Code(StrEnum):
    """The code of a row's elements.

    Attributes:
        bits: bits of an element.
        group: columns that share a scale; 1 if only the row has one.
        group_scale: bytes of the scale of a group.
        row_scale: bytes of the scale of the row: 1 for E8M0, 4 for float32, 0 for none.
        whole: bytes of which a row's size is a multiple.
    """

    bits: int
    group: int
    group_scale: int
    row_scale: int
    whole: int

    def __new__(cls, name: str, bits: int, group: int, group_scale: int, row_scale: int, whole: int) -> "Code":
        code = str.__new__(cls, name)
        code._value_ = name
        code.bits, code.group, code.group_scale = bits, group, group_scale
        code.row_scale, code.whole = row_scale, whole
        return code

    def groups(self, elements: int) -> int:
        """Groups of a row; the last of them is padded."""
        return -(-elements // self.group)

    def code_bytes(self, elements: int) -> int:
        """Bytes of the codes of a row; the scales of its groups begin there."""
        return self.groups(elements) * self.group * self.bits // 8

    def scale_at(self, elements: int) -> int:
        """Byte of a row at which its scale begins, or, if it has none, at which the scales of its groups end."""
        return _whole(self.code_bytes(elements) + self.groups(elements) * self.group_scale, max(1, self.row_scale))

    def row_bytes(self, elements: int, *, residual: bool = False) -> int:
        """Bytes of a row of `elements`, or of its residual against a base."""
        return _whole(self.scale_at(elements) + self.row_scale + residual * PROJECTION_BYTES, self.whole)

    @property
    def working(self) -> int:
        """Peak bytes by element of coding or decoding in plain torch. Of 8 bits: the value in float32, scaled and
        clamped, and its code. Of 4 bits: the value in float32, scaled, an int64 and the bytes of the code."""
        return 3 * 4 + 1 if self.bits == 8 else 8 + 2 * 4 + 2


class RowCode(Code):
    """The codes of keys, values and hidden states, which are written and read at every step."""

    FP8 = "fp8", 8, 1, 0, 1, WORD
    NVFP4 = "nvfp4", 4, GROUP, 1, 1, WORD


class WeightCode(Code):
    """The codes of weights [out, inner], whose rows are their outputs; written once."""

    FP8 = "fp8", 8, 1, 0, 4, VECTOR
    INT8 = "int8", 8, 1, 0, 4, VECTOR
    INT4 = "int4", 4, 32, 2, 0, VECTOR
    NVFP4 = "nvfp4", 4, GROUP, 1, 4, VECTOR


class RowLayout(NamedTuple):
    """The code of a row, and the bytes at which its parts begin; kernels are compiled for it. Uncoded values have
    groups of 0."""

    elements: int
    fp8: bool
    group: int
    code_bytes: int
    scale_at: int
    row_bytes: int

    @classmethod
    def of(cls, code: Code, elements: int, *, residual: bool = False) -> "RowLayout":
        codes, scale_at = code.code_bytes(elements), code.scale_at(elements)
        row_bytes = code.row_bytes(elements, residual=residual)
        return cls(elements, code == RowCode.FP8, code.group, codes, scale_at, row_bytes)

    @classmethod
    def raw(cls, elements: int, element_bytes: int) -> "RowLayout":
        return cls(elements, False, 0, 0, 0, elements * element_bytes)


def chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of `rows` rows of `width` columns, each small enough to be coded at once."""
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of
