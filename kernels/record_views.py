"""The parts of a packed NVFP4 record as tensors, without a copy."""

from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float32, UInt8
from torch import Tensor

from tiered.kernels.record_layout import Nvfp4Layout


class RecordViews(NamedTuple):
    """What lies in one record."""

    codes: UInt8[Tensor, "rows code_bytes"]
    scale: Float32[Tensor, "1"]
    projections: BFloat16[Tensor, " rows"] | None
    block_scales: UInt8[Tensor, "rows groups"]


def record_views(record: UInt8[Tensor, " bytes"], layout: Nvfp4Layout) -> RecordViews:
    """The parts of `record`, which begins at a multiple of 4 bytes of its storage."""
    return RecordViews(
        record[: layout.record_scale].view(layout.rows, -1),
        record[layout.record_scale : layout.projections].view(torch.float32),
        record[layout.projections : layout.block_scales].view(torch.bfloat16) if layout.delta else None,
        record[layout.block_scales : layout.nbytes].view(layout.rows, -1),
    )
