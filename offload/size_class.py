"""Books: sizes of pieces of memory that successive calls can share."""

UNIT = 4096  # bytes: a page, and the block of most file systems
EXACT_UNITS = 64  # up to here every number of units is a size class
STEPS = 16  # classes between a power of two and the next


def size_class(nbytes: int) -> int:
    """Bytes of the piece of memory for `nbytes`, at most 1/16 more, so that calls of similar sizes share pieces."""
    units = -(-nbytes // UNIT)
    if units > EXACT_UNITS:
        step = (1 << units.bit_length() - 1) // STEPS
        units = -(-units // step) * step
    return units * UNIT
