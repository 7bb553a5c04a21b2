"""Errors that callers may want to catch by type; every other bad argument is a `ValueError` or a `TypeError`."""

from tiered.byte_size import format_bytes
from tiered.features import Tier


class TierCapacityError(RuntimeError):
    """A tier's byte budget does not hold what is asked of it. Raised before the work starts that would exceed it.

    Attributes:
        needed: bytes that the request needs in the tier.
        available: bytes that the budget leaves for it.
        tier: the tier that is too small.
        hint: what to lower or raise.
    """

    def __init__(self, needed: int, available: int, tier: Tier, hint: str) -> None:
        super().__init__(
            f"the {tier} tier needs {format_bytes(needed)} but has {format_bytes(available)} "
            f"({needed} of {available} bytes); {hint}"
        )
        self.needed = needed
        self.available = available
        self.tier = tier
        self.hint = hint


class RecordLostError(RuntimeError):
    """A record's last bytes went with a copy that failed. Storing it again makes it readable again."""
