"""Write rows of keys or values into their columns of a layer's store: the oracle, in plain torch."""

from jaxtyping import Bool, Float, Int
from torch import Tensor


def scatter_rows(
    target: Float[Tensor, "batch heads length elements"],
    values: Float[Tensor, "batch heads rows elements"],
    index: Int[Tensor, "batch rows"],
    valid: Bool[Tensor, "batch rows"] | None = None,
) -> None:
    """`target[b, :, index[b, r]] = values[b, :, r]` in place, for every valid row.

    The columns of a sequence's valid rows are distinct; those of invalid rows may be any in range.
    """
    if valid is not None and index.shape[1]:
        # Without host synchronisation or race: an invalid row repeats the write of its sequence's first valid row. In a
        # sequence without one it writes the stored values back.
        first = valid.int().argmax(dim=1, keepdim=True)
        columns = index.gather(1, first)
        standing = target.gather(2, _spread(columns, target))
        repeated = values.gather(2, _spread(first, values)).where(valid.any(1)[:, None, None, None], standing)
        index = index.where(valid, columns)
        values = values.where(valid[:, None, :, None], repeated)
    target.scatter_(2, _spread(index, target), values)


def _spread(index: Int[Tensor, "batch rows"], like: Float[Tensor, "batch heads length elements"]) -> Tensor:
    return index[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])
