"""Books: the codes that rows of keys and values may be in, each row of which can be written and read alone. Integers
only.

    fp8     the codes (E4M3), and one scale
    nvfp4   the codes (E2M1), two a byte, even column low; one E4M3 scale for 16 columns; and one scale

The scale of a row is a power of two, as one byte (E8M0), so that what comes back is exact in every dtype that models
have, and makes the same bytes again. A row is filled up to whole words of 4 bytes, so that a GPU reads four at once.
"""

from enum import StrEnum

from tiered.kernels.record_layout import CODE_BYTES, GROUP

WORD = 4


class RowCode(StrEnum):
    """What the elements of a row become."""

    FP8 = "fp8"
    NVFP4 = "nvfp4"

    def row_bytes(self, elements: int) -> int:
        """Of a row of `elements`, in whole words."""
        codes = elements if self is RowCode.FP8 else (CODE_BYTES + 1) * -(-elements // GROUP)
        return -(-(codes + 1) // WORD) * WORD

    @property
    def working(self) -> int:
        """Bytes of an element at work on its way into the codes or back, by plain torch: in fp8 the value in float32,
        scaled and clamped, and its code; in nvfp4 the value in float32, scaled, an int64 and the bytes of the code."""
        return 3 * 4 + 1 if self is RowCode.FP8 else 8 + 2 * 4 + 2
