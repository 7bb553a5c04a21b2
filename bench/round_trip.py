"""Rows encoded and decoded on the spot, bit for bit as a tier gives them back."""

import torch
from torch import Tensor

from tiered.kernels.row_base import RowBase
from tiered.offload.codec_bytes import Codec
from tiered.offload.codecs import decode, encode


def round_trip(rows: Tensor, codec: Codec, centroid: Tensor | None) -> Tensor:
    """`rows` [n, width] encoded and decoded, against `centroid` [width] for a codec that needs one."""
    numbers = torch.arange(len(rows), device=rows.device)
    row_bytes = codec.row_bytes(rows.shape[1], rows.element_size())
    coded = torch.empty(len(rows), row_bytes, dtype=torch.uint8, device=rows.device)
    base, out = None, torch.empty_like(rows)
    if codec.needs_base:
        assert centroid is not None, f"{codec} needs a centroid"
        base = RowBase(centroid[None], torch.zeros_like(numbers))
    encode(codec, rows, coded, numbers, base)
    decode(codec, coded, numbers, out, numbers, base)
    return out
