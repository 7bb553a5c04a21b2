"""Books: events of records. All statistics of the tiers are sums over these."""

from dataclasses import dataclass

from tiered.core.features import Tier
from tiered.offload.lane import Lane


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A job of copies ended; times in ns on one clock. `layer`: layer of the records; None for several layers."""

    lane: Lane
    nbytes: int
    copies: int
    submitted: int
    started: int
    ended: int
    failed: bool = False
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Records were stored in `tier` for the first time."""

    tier: Tier
    records: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A fetch requested records from `tier`."""

    tier: Tier
    records: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Waited:
    """Compute decoded a fetched batch, or encoded one to store. `late`: whether it had to wait for a copy, from `began`
    to `ended`. Times and `layer` as in `CopyEnded`."""

    lane: Lane
    late: bool
    began: int
    ended: int
    layer: int | None = None

    @property
    def exposed_ns(self) -> int:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Picked:
    """Rows picked streamed experts of a layer.

    Attributes:
        used: number of experts.
        resident: number of these that were in a slot, or on the way to one.
        foreseen: number of these that were guessed a layer ahead.
    """

    used: int
    resident: int
    foreseen: int


TierEvent = CopyEnded | Stored | Asked | Waited | Picked
