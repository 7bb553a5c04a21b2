"""Books: the pages of a feature, which columns of which sequence each holds, and the record that stands for it.

A page is `page_rows` columns of one sequence, the last of a sequence maybe fewer. As a record it has one row for each
head and column. Sets of pages are integers, as in `tiered.forward.page_book`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiered.offload.slabs import SlabBook


@dataclass(frozen=True, slots=True)
class Pages:
    """Numbers of pages: sequence after sequence.

    Attributes:
        batch, heads, columns, elements: of a workspace; elements of the model's dtype, also where they hold codes.
        page_rows: columns of a page.
    """

    batch: int
    heads: int
    columns: int
    elements: int
    page_rows: int

    @property
    def each(self) -> int:
        """Pages of one sequence."""
        return -(-self.columns // self.page_rows)

    def of(self, sequences: int) -> int:
        """All pages of the first so many sequences."""
        return (1 << sequences * self.each) - 1

    def touched(self, sequences: int, first: int, stop: int) -> int:
        """Pages of the first so many sequences with a column from `first` to `stop`."""
        last = -(-min(stop, self.columns) // self.page_rows)
        return self._repeated(sequences, first // self.page_rows, last) if first < stop else 0

    def covered(self, sequences: int, first: int, stop: int) -> int:
        """Pages that have all of their columns there."""
        last = self.each if stop == self.columns else stop // self.page_rows
        return self._repeated(sequences, -(-first // self.page_rows), last)

    def sequence_and_part(self, page: int) -> tuple[int, int]:
        """The sequence of a page, and its number within that."""
        return divmod(page, self.each)

    def rows(self, page: int) -> int:
        """Rows of a page's record."""
        return self.heads * self.width(page)

    def width(self, page: int) -> int:
        """Columns of a page."""
        return min(self.page_rows, self.columns - page % self.each * self.page_rows)

    def bytes(self, page: int, element_bytes: int) -> int:
        """Of a page's record."""
        return self.rows(page) * self.elements * element_bytes

    def in_slot(self, slot_bytes: int, element_bytes: int) -> int:
        """Records of pages that fit a staging slot, each in as much room as it takes in host memory.

        Raises:
            ValueError: not one.
        """
        return SlabBook(slot_bytes).slots_per_slab(self.bytes(0, element_bytes))

    def kept(self, pages: int, sequences: Sequence[int]) -> int:
        """`pages` by their numbers once these sequences alone are there."""
        one = (1 << self.each) - 1
        return sum((pages >> old * self.each & one) << new * self.each for new, old in enumerate(sequences))

    def _repeated(self, sequences: int, first: int, last: int) -> int:
        if last <= first:
            return 0
        one = (1 << last) - (1 << first)
        return sum(one << sequence * self.each for sequence in range(sequences))


def members(pages: int) -> Iterator[int]:
    """The pages of a set, ascending."""
    while pages:
        lowest = pages & -pages
        yield lowest.bit_length() - 1
        pages ^= lowest


def union(pages: Sequence[int]) -> int:
    """The set of these pages."""
    return sum(1 << page for page in pages)
