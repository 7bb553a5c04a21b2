"""Rows to bytes and back, in every codec.

A row's bytes depend only on the row and its centroid. The decoded row depends only on its bytes and its centroid. So
results are bit for bit the same in every tier.
"""

from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.decode_rows_ref import decode_rows
from tiered.kernels.encode_rows_ref import encode_rows
from tiered.kernels.row_base import RowBase
from tiered.offload.codec_bytes import Codec


def encode(
    codec: Codec,
    rows: Float[Tensor, "n width"],
    out: UInt8[Tensor, "any row_bytes"],
    numbers: Int64[Tensor, " n"],
    base: RowBase | None,
) -> None:
    """Write `rows` to the distinct rows `numbers` of `out`. `base`: the centroid of each row; None for a codec without
    centroids."""
    if codec.code is None:
        out.view(rows.dtype).index_copy_(0, numbers, rows)
    else:
        for_device(encode_rows, rows.device)(rows, codec.code, out, numbers, base)


def decode(
    codec: Codec,
    coded: UInt8[Tensor, "any row_bytes"],
    numbers: Int64[Tensor, " n"],
    out: Float[Tensor, "rows width"],
    places: Int64[Tensor, " n"],
    base: RowBase | None,
) -> None:
    """Write the rows `numbers` of `coded` to the distinct rows `places` of `out`. `out` has the dtype of the rows that
    were encoded. `base` as in `encode`."""
    if codec.code is None:
        out.index_copy_(0, places, coded.view(out.dtype).index_select(0, numbers))
    else:
        for_device(decode_rows, out.device)(coded, codec.code, out, numbers, places, base)
