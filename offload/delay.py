"""Where a transport lets a test hold it up, so that every order of events happens that may happen."""

import time
from collections.abc import Callable
from enum import StrEnum

from tiered.offload.transport import Lane


class Point(StrEnum):
    """What is about to happen."""

    SUBMIT = "submit"  # a job is handed over, in the caller's thread
    WAIT = "wait"  # a job waits for one event of its `after`
    COPY = "copy"  # one piece is copied


# Seconds to sleep first, given the point and the lane (None: compute). What it raises is raised at that point.
Delay = Callable[[Point, Lane | None], float]


def hold_up(delay: Delay | None, point: Point, lane: Lane | None) -> None:
    """Sleep as `delay` says."""
    if delay is not None and (seconds := delay(point, lane)) > 0:
        time.sleep(seconds)
