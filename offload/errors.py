"""Errors of memory and copies. A message is formatted from the error's `args`, so the error can be pickled."""


class OffloadError(RuntimeError):
    """The base of the errors below."""


class NoRoomError(OffloadError):
    """A device, or the disk under a scratch file, has no room.

    Attributes:
        needed: bytes requested.
        available: free bytes.
        capacity: bytes of the device or the disk.
        what: name of the device or the file.
        hint: the setting to change; "" for the budget.
    """

    def __init__(self, needed: int, available: int, capacity: int, what: str, hint: str = "") -> None:
        super().__init__(needed, available, capacity, what, hint)
        self.needed, self.available, self.capacity = needed, available, capacity
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what} of {self.capacity} bytes has no room for {self.needed} bytes ({self.available} are free)"


class PinError(OffloadError):
    """The system refused to pin host memory.

    Attributes:
        needed: bytes requested.
        message: the system's answer and the setting to change.
    """

    def __init__(self, needed: int, message: str) -> None:
        super().__init__(needed, message)
        self.needed, self.message = needed, message

    def __str__(self) -> str:
        return self.message


class TransferError(OffloadError):
    """A copy failed, or its transport is gone (closed, dead, or of the parent of a forked process)."""


class CorruptRecordError(OffloadError):
    """A record read from disk is not the one written there: its checksum or size differs."""
