"""The columns that rows may touch, known on the host: what a store in pages has to have there."""

import torch

from tiered.core.rows import Rows


class TouchedColumns:
    """Remembers what it had to read back from the device: rows, and parts of them, are the same in every layer."""

    def __init__(self) -> None:
        # The indices themselves are kept: while they are alive, no other tensor has their address.
        self._read: list[tuple[torch.Tensor, int, tuple[int, int]]] = []

    def of(self, rows: Rows) -> tuple[int, int]:
        """First column and the one behind the last. Scattered rows whose maker does not say it (`Rows.within`) cost
        one read from the device for as long as their index stays the same tensor."""
        if rows.start is not None:
            return rows.start, rows.start + rows.count
        if rows.within is not None:
            return rows.within
        index = rows.index
        assert index is not None, "rows are a span or an index"
        if not index.numel():
            return 0, 0
        for known, version, columns in self._read:
            if known.data_ptr() == index.data_ptr() and known.shape == index.shape and version == index._version:
                return columns
        if self._read and self._read[0][0].untyped_storage()._cdata != index.untyped_storage()._cdata:
            self._read.clear()  # other rows
        first, last = torch.stack(index.aminmax()).tolist()
        self._read.append((index, index._version, (first, last + 1)))
        return first, last + 1
