"""Which token positions of each sequence go through a layer."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.scatter_rows_ref import scatter_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of every sequence: a span that all share, or an index of their own; build with `span` or `at`.

    Attributes:
        count: rows of each sequence.
        start: first column of a span; None for scattered rows.
        index: column of every scattered row, in any order; None for a span.
        valid: False at rows that are computed and never written: of a sequence that waits, or filler.
        within: columns, first and behind the last, that hold all scattered rows; None if only the device knows.
    """

    count: int
    start: int | None = None
    index: Int[Tensor, "batch rows"] | None = None
    valid: Bool[Tensor, "batch rows"] | None = None
    within: tuple[int, int] | None = None

    @classmethod
    def span(cls, start: int, stop: int) -> "Rows":
        """Columns `start` to `stop` (exclusive) of every sequence."""
        return cls(count=stop - start, start=start)

    @classmethod
    def at(
        cls,
        index: Int[Tensor, "batch rows"],
        valid: Bool[Tensor, "batch rows"] | None = None,
        within: tuple[int, int] | None = None,
    ) -> "Rows":
        """Columns `index[b]` of sequence b, in any order. Columns of valid rows are distinct within a sequence."""
        return cls(count=index.shape[1], index=index, valid=valid, within=within)

    def only(self, sequences: Bool[Tensor, " batch"]) -> "Rows":
        """The same rows, valid in `sequences` alone."""
        chosen = sequences[:, None].expand(-1, self.count)
        return replace(self, valid=chosen if self.valid is None else self.valid & chosen)

    def doubled(self) -> "Rows":
        """The same rows for a batch that is there twice over, as classifier-free guidance has it."""
        index, valid = (None if part is None else torch.cat([part, part]) for part in (self.index, self.valid))
        return replace(self, index=index, valid=valid)

    def __getitem__(self, part: slice) -> "Rows":
        first, last, _ = part.indices(self.count)
        return Rows(
            count=last - first,
            start=None if self.start is None else self.start + first,
            index=None if self.index is None else self.index[:, part],
            valid=None if self.valid is None else self.valid[:, part],
            within=self.within,
        )

    def moved(self, columns: int) -> "Rows":
        """The same rows by another count, in which a column's number is larger by `columns`."""
        return replace(
            self,
            start=None if self.start is None else self.start + columns,
            index=None if self.index is None else self.index + columns,
            within=None if self.within is None else (self.within[0] + columns, self.within[1] + columns),
        )

    def parts(self, size: int) -> list[slice]:
        """Slices of at most `size` rows that cover all rows in order."""
        return [slice(first, min(first + size, self.count)) for first in range(0, self.count, size)]

    def columns(self, values: Shaped[Tensor, "batch length"]) -> Shaped[Tensor, "batch rows"]:
        """The entries of `values`, such as token ids, at the rows."""
        if self.start is not None:
            return values[:, self.start : self.start + self.count]
        return values.gather(1, self._index())

    def positions(self, batch: int, device: torch.device) -> Int[Tensor, "batch rows"]:
        """The column of every row, of a span too."""
        if self.start is None:
            return self._index()
        return torch.arange(self.start, self.start + self.count, device=device).expand(batch, -1)

    def take(
        self, source: Shaped[Tensor, "batch heads length elements"]
    ) -> Shaped[Tensor, "sequences heads rows elements"]:
        """The rows of `source`; a span is a view. A batch of 1 in `source` stands for every sequence; scattered rows
        of fewer sequences than it has are of the first ones."""
        if self.start is not None:
            return source[:, :, self.start : self.start + self.count]
        index = self._index()
        sequences = torch.arange(index.shape[0], device=index.device) if source.shape[0] > 1 else index.new_zeros(1)
        return source[sequences[:, None], :, index].transpose(1, 2)

    def put(
        self,
        target: Float[Tensor, "batch heads length elements"],
        values: Float[Tensor, "batch heads rows elements"],
    ) -> None:
        """Write `values` into our rows of `target`, valid ones only."""
        if self.start is None:
            for_device(scatter_rows, target.device)(target, values, self._index(), self.valid)
            return
        destination = target[:, :, self.start : self.start + self.count]
        if self.valid is None:
            destination.copy_(values)
        else:
            torch.where(self.valid[:, None, :, None], values, destination, out=destination)

    def _index(self) -> Int[Tensor, "batch rows"]:
        assert self.index is not None, "rows are a span or an index"
        return self.index


def rows_where(*masks: Bool[Tensor, "batch length"], within: tuple[int, int] | None = None) -> tuple[Rows, list[int]]:
    """The True columns of the first mask, ascending, then those of the second, and so on, each with filler behind in
    sequences that have fewer. A column counts in its first mask alone. `within`: as in `Rows`.

    Returns the rows, and how many are of each mask. Reads from the device once.
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
