"""Books: the regions of a canvas as a step sees them, in columns."""

import itertools
from enum import StrEnum


class Region(StrEnum):
    """Where a column stands to the block being denoised; the regions cover every column once."""

    PROMPT = "prompt"
    PAST = "past"  # finished blocks before the previous one
    PREVIOUS = "previous"  # the block before the current one
    CURRENT = "current"
    NEXT = "next"  # the block behind the current one
    FUTURE = "future"  # everything behind the next block


def region_spans(prompt_length: int, start: int, stop: int, length: int) -> dict[Region, tuple[int, int]]:
    """First column of every region and the column behind its last; equal where the region has none.

    `start` and `stop` are the columns of the current block, `prompt_length` those of the prompt with its padding, and
    `length` those of the canvas.
    """
    before, behind = max(prompt_length, 2 * start - stop), min(length, 2 * stop - start)
    edges = (0, prompt_length, before, start, stop, behind, length)
    return dict(zip(Region, itertools.pairwise(edges), strict=True))
