"""Where the rows of pages stand in a workspace: the same for every layer, so made once and kept."""

from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.forward.pages import Pages
from tiered.kernels.host_values import on_device

_INT64 = 8


class PageIndices:
    """Indices of the groups of pages that were used last, in `limit` bytes."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._device = device
        self._known: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}  # the one unused for longest first
        self._held = 0

    def of(self, layout: Pages, pages: Sequence[int]) -> Int[Tensor, " rows"]:
        """Places of the rows of the pages' records, page after page, among all rows of a workspace."""
        key = (layout.heads, layout.columns, tuple(pages))
        index = self._known.pop(key, None)
        if index is None:
            nbytes = _INT64 * sum(layout.rows(page) for page in pages)
            while self._known and self._held + nbytes > self._limit:
                self._held -= self._known.pop(next(iter(self._known))).nbytes
            index = _index(layout, pages, self._device)
            if self._held + nbytes > self._limit:
                return index
            self._held += nbytes
        self._known[key] = index
        return index


def _index(layout: Pages, pages: Sequence[int], device: torch.device) -> Int[Tensor, " rows"]:
    heads = torch.arange(layout.heads, device=device)[:, None] * layout.columns
    parts: list[Tensor] = []
    for width, group in groupby(pages, key=layout.width):
        places = [layout.sequence_and_part(page) for page in group]
        firsts = [sequence * layout.heads * layout.columns + part * layout.page_rows for sequence, part in places]
        origins = on_device(firsts, device)[:, None, None]
        parts.append((origins + heads + torch.arange(width, device=device)).flatten())
    return parts[0] if len(parts) == 1 else torch.cat(parts)
