"""Books: what is true, after a forward, of the state that caches hold of a canvas column. Flags, no tensors."""

from enum import IntFlag


class Place(IntFlag):
    """Where the state of a column is and what the forward did to it; several may be true, none is `DEVICE`."""

    DEVICE = 0  # nothing of it lies below the device, and the forward read it as it was
    STORED = 1  # a member of clusters whose rows lie below the device, in one layer or more
    STREAMED = 2  # some layers of its features lie below the device, and pass through it when they are read
    RECOMPUTED = 4  # its keys and values were computed anew, in one layer or more
    FETCHED = 8  # its stored row came to the device, in one layer or more, and its cluster was recomputed
