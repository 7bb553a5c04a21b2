"""Rows to bytes and back, in every codec.

A row's bytes depend on the row and its centroid alone, and the row that comes back on its bytes and its centroid alone:
where the bytes lay in between makes no difference to a single bit.
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
    """Write `rows` to the rows `numbers` of `out`, which are distinct. `base`: the centroid of each row; None for a
    codec that needs none."""
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
    """Write the rows `numbers` of `coded` to the rows `places` of `out`, which are distinct. `out` has the dtype of the
    rows that were encoded. `base`: as for `encode`."""
    if codec.code is None:
        out.index_copy_(0, places, coded.view(out.dtype).index_select(0, numbers))
    else:
        for_device(decode_rows, out.device)(coded, codec.code, out, numbers, places, base)
