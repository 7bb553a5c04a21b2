"""How fast a simulated link is: study overlap, or a slower machine, on any machine."""

import math
from dataclasses import dataclass

from tiered.offload.transport import Lane


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction.

    Attributes:
        bandwidth: bytes a second.
        latency: seconds that each piece takes beside its bytes.

    Raises:
        ValueError: a bandwidth that is not positive, a latency that is negative or not finite.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf):
            raise ValueError(
                f"bandwidth = {self.bandwidth} must be positive, latency = {self.latency} 0 or more and finite"
            )

    def seconds(self, nbytes: int, pieces: int = 1) -> float:
        """Time of `nbytes` in `pieces` pieces; at least, since what carries them takes its own time too."""
        return nbytes / self.bandwidth + pieces * self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The speed of every lane; they do not share it."""

    fetch: LinkSpeed = LinkSpeed()
    store: LinkSpeed = LinkSpeed()
    load: LinkSpeed = LinkSpeed()
    spill: LinkSpeed = LinkSpeed()

    def speed(self, lane: Lane) -> LinkSpeed:
        """The speed of `lane`."""
        return getattr(self, lane.value)
