"""Books: the bytes that rows take in each codec. Integers only.

    raw           the elements in the model's dtype
    fp8           1 byte an element (E4M3); one scale a row, in whole words of 4 bytes
    nvfp4         4 bits an element (E2M1); one E4M3 scale per 16 elements; one FP32 scale a record
    nvfp4_delta   as nvfp4, of the row's residual against its centroid; one BF16 projection on the centroid a row

The FP32 scale of nvfp4 is the record's, so that a record can be rewritten alone.

A row of LLaDA-8B (4096 elements) takes 8192 B raw, 4100 B in fp8 and 2304 B in nvfp4. A record of 64 such rows takes
147460 B in nvfp4 (4 B over the 64 · 2304 of codes and block scales) and 147588 B in nvfp4_delta (132 B over, 0.09 %).
The centroids that nvfp4_delta decodes against are not in the record; `centroid_bytes` counts them.

A codec is a member of `Codec`, a row of `_FORMS` here, and a row of `tiered.offload.codecs.CODECS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tiered.kernels.record_layout import CODE_BYTES, GROUP, PROJECTION_BYTES, RECORD_SCALE_BYTES
from tiered.kernels.row_code import RowCode


class Codec(StrEnum):
    """The form of rows in a tier."""

    RAW = "raw"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    NVFP4_DELTA = "nvfp4_delta"

    @property
    def needs_base(self) -> bool:
        """True if a record is encoded and decoded against a centroid."""
        return _FORMS[self].needs_base


@dataclass(frozen=True, slots=True)
class _Form:
    """Bytes of a codec.

    Attributes:
        row: bytes of one row, from its elements and the bytes of an element.
        record: bytes of a record beside its rows.
        working: bytes of temporaries for each element, while a record is encoded or decoded.
        needs_base: see `Codec.needs_base`.
    """

    row: Callable[[int, int], int]
    record: int = 0
    working: int = 0
    needs_base: bool = False


def _nvfp4_row(width: int) -> int:
    return -(-width // GROUP) * (CODE_BYTES + 1)  # the codes of a group and its scale


_FORMS = {
    Codec.RAW: _Form(lambda width, element_bytes: width * element_bytes),
    Codec.FP8: _Form(lambda width, _: RowCode.FP8.row_bytes(width), working=RowCode.FP8.working),
    Codec.NVFP4: _Form(lambda width, _: _nvfp4_row(width), RECORD_SCALE_BYTES, working=RowCode.NVFP4.working),
    Codec.NVFP4_DELTA: _Form(
        lambda width, _: _nvfp4_row(width) + PROJECTION_BYTES,
        RECORD_SCALE_BYTES,
        working=RowCode.NVFP4.working,
        needs_base=True,
    ),
}


def codec_bytes(codec: Codec | str, rows: int, width: int, *, element_bytes: int, records: int = 1) -> int:
    """Bytes of `rows` rows stored with `codec`, in `records` records.

    Args:
        codec: a `Codec` or its name.
        rows: rows in all records together.
        width: elements of a row. The NVFP4 codecs pad it to whole groups of 16.
        element_bytes: bytes of an element in the model's dtype; only `raw` depends on it.
        records: parts that are scaled and moved on their own; a record has at least one row.

    Raises:
        ValueError: an unknown codec, a size that is negative or zero, or more records than rows.
    """
    if codec not in list(Codec):
        raise ValueError(f"unknown codec {str(codec)!r}; allowed: {', '.join(Codec)}")
    if rows < 0 or width < 1 or element_bytes < 1 or records < 1:
        raise ValueError(
            f"rows = {rows} must be 0 or more; width = {width}, element_bytes = {element_bytes} and "
            f"records = {records} must be positive"
        )
    if rows == 0:
        return 0
    if records > rows:
        raise ValueError(f"{rows} rows cannot fill {records} records")
    form = _FORMS[Codec(codec)]
    return rows * form.row(width, element_bytes) + records * form.record


def workspace_bytes(codec: Codec, rows: int, width: int) -> int:
    """Temporaries, at most, of a record of `rows` rows on its way into its bytes or back, by the plain torch codecs."""
    return rows * width * _FORMS[codec].working


def centroid_bytes(clusters: int, width: int, *, element_bytes: int) -> int:
    """Bytes of `clusters` centroids, which stay in the model's dtype.

    Raises:
        ValueError: a negative number of clusters, or a size that is not positive.
    """
    if clusters < 0 or width < 1 or element_bytes < 1:
        raise ValueError(
            f"clusters = {clusters} must be 0 or more; width = {width} and element_bytes = {element_bytes} positive"
        )
    return clusters * width * element_bytes
