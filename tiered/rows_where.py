"""Rows by a mask: the columns of each sequence that a policy wants, ragged where sequences want different ones."""

import torch
from jaxtyping import Bool
from torch import Tensor

from tiered.rows import Rows


def rows_where(*masks: Bool[Tensor, "batch length"], within: tuple[int, int] | None = None) -> tuple[Rows, list[int]]:
    """The True columns of the first mask, ascending, then those of the second, and so on; of every mask, filler stands
    behind in sequences that have fewer. A column counts in the first mask alone that has it.

    Returns the rows, and how many are of each mask. Reads from the device once.

    Args:
        within: span of columns that holds all of them (`Rows.within`).
    """
    taken = torch.zeros_like(masks[0])
    apart: list[Tensor] = []
    for mask in masks:
        apart.append(mask & ~taken)
        taken = taken | mask
    counts = torch.stack([mask.sum(dim=1).amax() for mask in apart]).tolist()
    index = torch.cat([_ascending(mask, count) for mask, count in zip(apart, counts, strict=True)], dim=1)
    numbers = torch.cat([torch.arange(count, device=index.device) for count in counts])
    sizes = torch.cat(
        [mask.sum(dim=1, keepdim=True).expand(-1, count) for mask, count in zip(apart, counts, strict=True)], dim=1
    )
    return Rows.at(index, numbers < sizes, within), counts


def _ascending(mask: Bool[Tensor, "batch length"], count: int) -> Tensor:
    """The first `count` columns of each sequence by the mask: True ones ascending, then 0."""
    place = (mask.cumsum(dim=1) - 1).where(mask, count)
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return columns.new_zeros(len(mask), count + 1).scatter_(1, place, columns)[:, :count]
