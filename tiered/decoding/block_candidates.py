"""Candidates of a block from the rows that a step has computed, where these are not the whole block in order."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.decoding.rules.base import Candidates


def predicted_columns(
    output: Rows, shift: int, start: int, stop: int
) -> tuple[Int[Tensor, "batch rows"], Bool[Tensor, "batch rows"]] | None:
    """Which column of the block (0: `start`) each row of `output` predicts, and whether it counts: filler and rows of
    sequences that wait do not. None for a span, which is the whole block.

    `shift`: row r predicts column r + shift.
    """
    if output.index is None:
        return None
    columns = output.index + (shift - start)
    inside = (columns >= 0) & (columns < stop - start)
    valid = inside if output.valid is None else inside & output.valid
    return columns.where(valid, 0), valid


def spread(
    candidates: Candidates, columns: Int[Tensor, "batch rows"], valid: Bool[Tensor, "batch rows"], block: int
) -> Candidates:
    """`candidates` of rows that predict `columns`, as those of the block's `block` columns: nothing is pending where
    no valid row predicts."""
    batch = len(columns)
    # One column more, for the rows that do not count.
    place = columns.where(valid, block)

    def scattered(values: Tensor, fill: float | int | bool) -> Tensor:
        full = torch.full((batch, block + 1), fill, dtype=values.dtype, device=values.device)
        return full.scatter_(1, place, values)[:, :block]

    return replace(
        candidates,
        tokens=scattered(candidates.tokens, 0),
        confidence=scattered(candidates.confidence, -torch.inf),
        pending=scattered(candidates.pending, False),
    )
