"""Rows times a coded weight: the oracle, in plain torch, used on the CPU."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.launch import PROGRAMS

# Elements of the weight that are decoded at once, 4 MiB in float32: enough to amortise the start of an operation, and
# few enough to stay in the caches until their product.
TILE_ELEMENTS = 1 << 20
# The kernel decodes a weight first for as many rows and more, so many elements at once: 16 MiB in 16 bits, which occupy
# a large GPU and stay in its caches until their product.
DECODED_FROM, DECODED_ELEMENTS = 256, 1 << 23
MOST_TILE = 32 * 64  # numbers of a program that splits columns
LEAST_COLUMNS = 512  # of a weight that a program of the kernel takes for fewer rows, if it has as many


def weight_product(rows: Float[Tensor, "n inner"], weight: CodedRows) -> Float[Tensor, "n out"]:
    """`rows` · `weight`ᵀ, a tile of output rows at a time; the result has its rows as the innermost axis in memory.
    Raises as `check_factors`."""
    check_factors(rows, weight)
    out, inner = weight.shape
    product = rows.new_empty(out, len(rows))
    step = max(1, TILE_ELEMENTS // inner)
    for start in range(0, out, step):
        part = slice(start, start + step)
        values = weight[part].values()
        # As in projection.py: fewer rows are the left factor, so that their sums come in the same order.
        product[part] = values @ rows.t() if len(rows) >= 16 else F.linear(rows, values).t()
    return product.t()


def decoded_rows(out: int, inner: int) -> int:
    """Rows of a weight [out, inner] that the kernel decodes at once; by 16, so that each part begins at a multiple of
    16 bytes."""
    return min(out, max(16, DECODED_ELEMENTS // inner // 16 * 16))


def most_sums(count: int, out: int, inner: int) -> int:
    """Most numbers in which the kernel keeps sums of some columns, for up to `count` rows by tiles."""
    return min(inner // LEAST_COLUMNS * count * out, PROGRAMS * MOST_TILE)


def check_factors(rows: Float[Tensor, "n inner"], weight: CodedRows) -> None:
    """Raise `ValueError` if width, dtype or device of the rows are not the weight's."""
    given, wanted = (rows.shape[1:], rows.dtype, rows.device), (weight.shape[1:], weight.dtype, weight.device)
    if given != wanted:
        raise ValueError(
            f"rows {list(rows.shape)} of {rows.dtype} on {rows.device} do not fit the {weight.code} weight "
            f"{list(weight.shape)} of {weight.dtype} on {weight.device}"
        )
