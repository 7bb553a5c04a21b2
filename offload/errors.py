"""What can go wrong below the tier manager. Each message names what to change."""


class ArenaFullError(RuntimeError):
    """An arena, or the disk under a spill file, has no room for a record.

    Attributes:
        needed: bytes that the record takes there.
        available: bytes that are free in pieces of that size.
        capacity: bytes of the arena.
        hint: what to change, where that is not the budget.
    """

    def __init__(self, needed: int, available: int, capacity: int, what: str, hint: str = "") -> None:
        super().__init__(f"{what} of {capacity} bytes has no room for {needed} bytes ({available} are free)")
        self.needed = needed
        self.available = available
        self.capacity = capacity
        self.hint = hint


class PinError(RuntimeError):
    """The system refused to pin host memory.

    Attributes:
        needed: bytes that were asked for.
    """

    def __init__(self, needed: int, message: str) -> None:
        super().__init__(message)
        self.needed = needed


class TransferError(RuntimeError):
    """A copy failed, or whoever carries copies is gone (closed, dead, or left behind by a fork)."""


class CorruptRecordError(RuntimeError):
    """A record read from disk is not what was written there: its checksum, size or name differs."""
