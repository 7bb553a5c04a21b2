"""Rows of some clusters put in the place of others, where each sequence has its own and as many as it likes."""

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor


def sources(
    clusters: Int[Tensor, "batch moved"], valid: Bool[Tensor, "batch moved"] | None, count: int
) -> Int[Tensor, "batch clusters"]:
    """Where each of `count` clusters stands in `clusters`; −1 where it does not.

    Args:
        clusters: distinct where valid, anything where not.
        valid: False at filler.
        count: all clusters.
    """
    # Filler goes to a slot behind the last, which is dropped.
    slot = clusters.long() if valid is None else clusters.long().where(valid, count)
    place = torch.arange(clusters.shape[1], device=clusters.device).expand_as(slot)
    return slot.new_full((slot.shape[0], count + 1), -1).scatter_(1, slot, place)[:, :count]


def replaced_rows(
    rows: Float32[Tensor, "batch heads clusters *rest"],
    others: Float32[Tensor, "batch heads moved *rest"],
    source: Int[Tensor, "batch clusters"],
) -> Float32[Tensor, "batch heads clusters *rest"]:
    """`rows`, with row `source` of `others` wherever that is not −1."""
    if others.shape[2] == 0:
        return rows
    shape = (source.shape[0], 1, source.shape[1]) + (1,) * (rows.dim() - 3)
    index = source.view(shape)
    return torch.where(index < 0, rows, others.gather(2, index.clamp_min(0).expand_as(rows)))
