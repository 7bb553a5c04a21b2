"""Books: the bytes of rows in each codec. Integers only.

    raw           the elements in the model's dtype
    fp8           a row in the code of that name (`tiered.kernels.row_code`)
    nvfp4         likewise
    nvfp4_delta   as nvfp4, of the row's residual against its centroid; one BF16 projection on the centroid a row

A row of LLaDA-8B (4096 elements) takes 8192 B raw, 4100 B in fp8, 2308 B in nvfp4 and in nvfp4_delta. The centroids
of nvfp4_delta are extra.

Each codec is a member of `Codec`, and a code.
"""

from enum import StrEnum

from tiered.kernels.row_code import RowCode


class Codec(StrEnum):
    """The form of rows in a tier."""

    RAW = "raw"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    NVFP4_DELTA = "nvfp4_delta"

    @property
    def needs_base(self) -> bool:
        """True if a row is encoded and decoded against a centroid."""
        return self is Codec.NVFP4_DELTA

    @property
    def code(self) -> RowCode | None:
        """Code of the rows, or of their residuals; None for uncoded elements."""
        return {Codec.RAW: None, Codec.FP8: RowCode.FP8}.get(self, RowCode.NVFP4)

    @property
    def working(self) -> int:
        """Peak bytes of temporaries by element, for encoding or decoding in plain torch."""
        return 0 if self.code is None else self.code.working

    def row_bytes(self, width: int, element_bytes: int) -> int:
        """Bytes of a row of `width` elements, which take `element_bytes` each in the model's dtype."""
        code = self.code
        return width * element_bytes if code is None else code.row_bytes(width, residual=self.needs_base)
