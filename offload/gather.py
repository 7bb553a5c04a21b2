"""Pieces as the one launch of a gather kernel, where they are such that it can take them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.kernels.byte_segments import ALIGNMENT, check_segments
from tiered.kernels.host_values import on_device
from tiered.offload.routes import Segment
from tiered.offload.transport import Copy

PROGRAMS = 4  # thread blocks: enough for the link (a few hundred KiB under way), few enough to leave to the model


@dataclass(frozen=True, slots=True)
class Gather:
    """Segments of one buffer, pinned host memory, that go to one buffer on the device."""

    source: UInt8[Tensor, " source_bytes"]
    destination: UInt8[Tensor, " destination_bytes"]
    segments: Sequence[Segment]

    def launch(self, device: torch.device) -> None:
        """Copy on the current stream of `device`."""
        from tiered.kernels.gather_copy import gather_copy

        source, destination, sizes = on_device(list(zip(*self.segments, strict=True)), device)
        gather_copy(self.source, source, self.destination, destination, sizes, programs=PROGRAMS)


def gather_of(pieces: Sequence[Copy]) -> Gather | None:
    """The pieces (see `check_copies`) as one gather; None where they lie in several buffers at either side, where their
    destinations overlap, or where an address or size is not a multiple of 16 bytes."""
    source, destination = _buffer(pieces[0].source), _buffer(pieces[0].destination)
    buffers = source.data_ptr(), destination.data_ptr()
    for piece in pieces:
        if (piece.source.untyped_storage().data_ptr(), piece.destination.untyped_storage().data_ptr()) != buffers:
            return None
    segments = [
        Segment(int(piece.source.storage_offset()), int(piece.destination.storage_offset()), piece.source.numel())
        for piece in pieces
    ]
    try:
        check_segments(
            *([segment[field] for segment in segments] for field in range(3)),
            source_bytes=source.numel(),
            destination_bytes=destination.numel(),
        )
    except ValueError:
        return None
    return None if any(address % ALIGNMENT for address in buffers) else Gather(source, destination, segments)


def _buffer(part: Tensor) -> UInt8[Tensor, " bytes"]:
    """All the memory that `part` is a view of."""
    storage = part.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage, 0, (storage.nbytes(),), (1,))
