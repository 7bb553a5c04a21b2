"""The bases that residuals of rows are relative to."""

from typing import NamedTuple

from jaxtyping import BFloat16, Float, Float64, Int64
from torch import Tensor


class RowBase(NamedTuple):
    """One base for each row.

    Attributes:
        bases: the bases, in the dtype that decoding uses.
        of_row: index of each row's base.
    """

    bases: Float[Tensor, "bases width"]
    of_row: Int64[Tensor, " n"]

    def taken(self, part: slice) -> Float[Tensor, "rows width"]:
        return self.bases.index_select(0, self.of_row[part])

    def squares(self) -> Float64[Tensor, " bases"]:
        return self.bases.double().square_().sum(1)

    def projections(
        self, rows: Float[Tensor, "rows width"], part: slice, squares: Float64[Tensor, " bases"]
    ) -> BFloat16[Tensor, " rows"]:
        """<row, base> / <base, base> in BF16; 0 if that is not finite.

        In float64, where the products are exact: in any order of the sum, every device rounds to the same BF16 number.
        """
        products = rows.double().mul_(self.taken(part)).sum(1)
        along = products / squares.index_select(0, self.of_row[part])
        return along.float().bfloat16().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def base_arguments(base: RowBase | None) -> tuple[Tensor | None, int, Tensor | None]:
    """A kernel's arguments for `base`: bases with contiguous rows, their stride, and the index of each row's base."""
    if base is None:
        return None, 0, None
    bases = base.bases if base.bases.stride(1) == 1 else base.bases.contiguous()
    return bases, bases.stride(0), base.of_row
