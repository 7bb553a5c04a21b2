"""Books: the parts of a record, and their places in its home and in a slot."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from tiered.offload.copy_segments import Segment

Parts = Bool[np.ndarray, " parts"]


@runtime_checkable
class Layout(Protocol):
    """The places of a record's parts in its home and in a slot."""

    @property
    def parts(self) -> int:
        """Number of parts of the record."""
        ...

    def segments(self, parts: Parts) -> Iterable[Segment]:
        """The bytes of `parts`, from the home to the slot."""
        ...


@dataclass(frozen=True, slots=True)
class Equal:
    """`parts` of `part_bytes` each, contiguous in the home and in a slot."""

    part_bytes: int
    parts: int = 1

    def segments(self, parts: Parts) -> list[Segment]:
        edges = np.flatnonzero(np.diff(parts, prepend=False, append=False)) * self.part_bytes
        return [Segment(start, start, stop - start) for start, stop in edges.reshape(-1, 2).tolist()]


class Wanted(NamedTuple):
    """Parts of a record; None for all. Parts that were never written have no bytes, so they are not copied."""

    key: Hashable
    parts: Parts | None = None
