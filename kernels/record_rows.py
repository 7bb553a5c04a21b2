"""Where the rows of packed records lie, inside Triton kernels: `Nvfp4Layout` and `RecordTable`, row by row."""

import triton
import triton.language as tl


@triton.jit
def record_rows(row, real, starts, at, record_of_row, GROUPS: tl.constexpr, DELTA: tl.constexpr):
    """For rows [ROWS] of a table, where `real`: their record, and the bytes at which their codes, their record's
    scale, their projection and their block scales begin; all int64."""
    record = tl.load(record_of_row + row, real, other=0)
    start = tl.load(starts + record, real, other=0)
    count = tl.load(starts + record + 1, real, other=0) - start
    # The compiler must know that records are aligned, to load several codes at once.
    base = tl.multiple_of(tl.load(at + record, real, other=0), [128])
    within = row - start
    codes = base + within * (GROUPS * 8)
    scale = base + count * (GROUPS * 8)
    projection = scale + 4 + within * 2
    block_scales = scale + 4 + within * GROUPS
    if DELTA:
        block_scales += count * 2
    return record, codes, scale, projection, block_scales
