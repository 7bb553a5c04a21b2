"""The token positions of each sequence that go through a layer."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.scatter_rows_ref import scatter_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows, equally many of every sequence; built by `span` or `at`.

    Attributes:
        index: column of every row, in any order; a span has one index for all sequences.
        valid: False at rows that are computed but never written, which are filler or of waiting sequences; None for no
            such row.
        within: host range that includes all columns; empty if only the device knows them.
        is_span: whether the rows are the columns of `within`, in order, so that slices replace gathers.
    """

    index: Int[Tensor, "#batch rows"]
    valid: Bool[Tensor, "batch rows"] | None = None
    within: range = range(0)
    is_span: bool = False

    @classmethod
    def span(cls, start: int, stop: int, device: torch.device | None = None) -> "Rows":
        """Columns `start` to `stop` (exclusive) of every sequence. A slice of such rows launches no kernel."""
        return cls(torch.arange(start, stop, device=device)[None], within=range(start, stop), is_span=True)

    @classmethod
    def at(
        cls,
        index: Int[Tensor, "batch rows"],
        valid: Bool[Tensor, "batch rows"] | None = None,
        within: range = range(0),
    ) -> "Rows":
        """Columns `index[b]` of sequence b, in any order. Columns of valid rows are distinct within a sequence."""
        return cls(index, valid, within=within)

    @property
    def count(self) -> int:
        return self.index.shape[1]

    @property
    def flags(self) -> Bool[Tensor, "#batch rows"]:
        """`valid`, or True for all rows if it is None."""
        return torch.ones_like(self.index, dtype=torch.bool) if self.valid is None else self.valid

    def only(self, rows: Bool[Tensor, " batch #rows"]) -> "Rows":
        """The same rows, valid only if also True in `rows`."""
        valid = rows.expand(-1, self.count) if self.valid is None else self.valid & rows
        return replace(self, valid=valid)

    def doubled(self) -> "Rows":
        """The same rows for both halves of a batch with classifier-free guidance."""
        index = self.index if self.is_span else torch.cat([self.index, self.index])
        return replace(self, index=index, valid=None if self.valid is None else torch.cat([self.valid, self.valid]))

    def __getitem__(self, part: slice) -> "Rows":
        first, last, _ = part.indices(self.count)
        if last - first == self.count:
            return self
        within = self.within[first:last] if self.is_span else self.within
        valid = None if self.valid is None else self.valid[:, first:last]
        return Rows(self.index[:, first:last], valid, within, self.is_span)

    def columns(self, values: Shaped[Tensor, "batch length"]) -> Shaped[Tensor, "batch rows"]:
        """The entries of `values`, such as token ids, at the rows."""
        if self.is_span:
            return values[:, self.within.start : self.within.stop]
        return values.gather(1, self.index)

    def take(
        self, source: Shaped[Tensor, "batch heads length elements"]
    ) -> Shaped[Tensor, "sequences heads rows elements"]:
        """The rows of `source`, as a view for a span. A batch of 1 in `source` serves every sequence. If scattered rows
        are of fewer sequences than `source` has, they are of the first ones."""
        if self.is_span:
            return source[:, :, self.within.start : self.within.stop]
        index = self.index
        sequences = torch.arange(index.shape[0], device=index.device) if source.shape[0] > 1 else index.new_zeros(1)
        return source[sequences[:, None], :, index].transpose(1, 2)

    def put(
        self,
        target: Float[Tensor, "batch heads length elements"],
        values: Float[Tensor, "batch heads rows elements"],
        first: int = 0,
    ) -> None:
        """Write `values` to the valid rows of `target`. `first`: canvas column of the first row of `target`."""
        if not self.is_span:
            index = self.index - first if first else self.index
            for_device(scatter_rows, target.device)(target, values, index, self.valid)
            return
        destination = target[:, :, self.within.start - first : self.within.stop - first]
        if self.valid is None:
            destination.copy_(values)
        else:
            torch.where(self.valid[:, None, :, None], values, destination, out=destination)


def parts_of(rows: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover `rows` rows in order."""
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def rows_where(*masks: Bool[Tensor, "batch length"]) -> tuple[Rows, list[int]]:
    """The True columns of each mask in turn, ascending, followed by filler in sequences that have fewer. A column
    counts only in its first mask.

    Returns the rows, and the number of rows of each mask. Reads from the device once.
    """
    apart, taken = [masks[0]], masks[0]
    for mask in masks[1:]:
        apart.append(mask & ~taken)
        taken = taken | mask
    sizes = [mask.sum(dim=1, keepdim=True) for mask in apart]
    counts = torch.stack([size.amax() for size in sizes]).tolist()
    index = torch.cat([_ascending(mask, count) for mask, count in zip(apart, counts, strict=True)], dim=1)
    numbers = torch.cat([torch.arange(count, device=index.device) for count in counts])
    valid = numbers < torch.cat([size.expand(-1, count) for size, count in zip(sizes, counts, strict=True)], dim=1)
    return Rows.at(index, valid), counts


def _ascending(mask: Bool[Tensor, "batch length"], count: int) -> Tensor:
    """The first `count` columns of each sequence by the mask: True ones ascending, then 0."""
    place = (mask.cumsum(dim=1) - 1).where(mask, count)
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return columns.new_zeros(len(mask), count + 1).scatter_(1, place, columns)[:, :count]
