"""Books: what happened to records, one event at a time. Every statistic of the tiers is a fold over these."""

from dataclasses import dataclass

from tiered.core.features import Tier
from tiered.offload.lane import Lane


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A job of copies ended; times in ns on one clock. `layer`: of the records; None where they are of several."""

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
    """Records were stored in `tier`: first copies, not moves."""

    tier: Tier
    records: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A fetch asked for records that lay in `tier`."""

    tier: Tier
    records: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Waited:
    """Compute decoded a batch that was fetched, or encoded one to store. `late`: a copy whose end it needs was still
    under way; compute stood still from `began` to `ended`. Times and `layer` as in `CopyEnded`."""

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
        used: experts.
        resident: those of them that were in a slot then, or on the way there.
        foreseen: those of them that were guessed a layer ahead.
    """

    used: int
    resident: int
    foreseen: int


TierEvent = CopyEnded | Stored | Asked | Waited | Picked
