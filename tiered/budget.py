"""How many bytes each tier may hold."""

from dataclasses import dataclass
from pathlib import Path

from tiered.byte_size import parse_bytes
from tiered.features import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A hard cap, in bytes, on what the runtime allocates in each tier; `None` leaves a tier uncapped.

    Sizes are ints or strings (`"12GiB"`). Weights, caches, logits, activations and staging all count.

    Raises:
        TypeError, ValueError: a size that is no byte size, or a disk cap without a `disk_path`.
    """

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None
    disk_path: str | Path | None = None

    def __post_init__(self) -> None:
        for tier in Tier:
            size = getattr(self, tier.value)
            if size is not None:
                object.__setattr__(self, tier.value, parse_bytes(size))
        if self.disk and self.disk_path is None:
            raise ValueError(f"a disk budget of {self.disk} bytes needs a disk_path to put the file in")

    def cap(self, tier: Tier) -> int | None:
        """The cap of `tier` in bytes, or None where it has none."""
        return getattr(self, tier.value)

    @classmethod
    def of(cls, memory: "MemoryBudget | int | str | None") -> "MemoryBudget":
        """`memory` as a budget: one size is the device tier's cap, None caps nothing."""
        return memory if isinstance(memory, MemoryBudget) else cls(device=memory)
