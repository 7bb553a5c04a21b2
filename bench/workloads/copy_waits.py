"""The time of a small copy beside large ones of another transport, which has the same link.

Sizes are those of a GPU over `SCALE`: a streamed layer of 436 MB, pieces of `PIECE_BYTES`, a small record of 64 KiB. So
many large copies go as the link takes, one behind the other. Small ones are submitted at random times, each once the
one before has ended. The link is simulated. A layer takes `LAYER_SECONDS`, a multiple of its time on a GPU's link,
because threads of this machine wake up too late for less.
"""

import random
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from simulation import LinkSpeed, SharedLink, SimulatedThreads

from tiered.offload.transport import PIECE_BYTES, Copy, Lane

SCALE = 16
LAYER, SMALL = 436_000_000 // SCALE, (64 << 10) // SCALE
LAYER_SECONDS = 0.1
WHOLE, PIECES = "whole", "in pieces"


def measure(*, copies: int, seed: int) -> list[dict[str, Any]]:
    """A row for each way in which large copies move. It has the time from a small copy's submission to its end, in ms,
    and the 99th percentile over the time of a layer. `copies`: number of small copies."""
    return [{"way": way} | waits(way, copies, seed) for way in (WHOLE, PIECES)]


def waits(way: str, copies: int, seed: int) -> dict[str, float]:
    """The figures of one row."""
    link = SharedLink(fetch=LinkSpeed(bandwidth=LAYER / LAYER_SECONDS))
    large, small = SimulatedThreads(link=link), SimulatedThreads(link=link)
    large.piece_bytes = sys.maxsize if way == WHOLE else PIECE_BYTES // SCALE
    layer, record = (Copy(*torch.zeros(2, nbytes, dtype=torch.uint8)) for nbytes in (LAYER, SMALL))
    draws, times = random.Random(seed), list[float]()
    under_way = [large.copy(Lane.FETCH, [layer]) for _ in range(2)]
    for _ in range(copies):
        time.sleep(draws.uniform(0, LAYER_SECONDS))
        while under_way[0].done():  # one is carried, and one waits
            under_way = [*under_way[1:], large.copy(Lane.FETCH, [layer])]
        event = small.copy(Lane.FETCH, [record])
        event.synchronize()
        assert event.times.ended is not None
        times.append((event.times.ended - event.times.submitted) / 1e6)
    for transport in (large, small):
        transport.close()
    p99 = float(np.percentile(times, 99))
    return {"p50_ms": median(times), "p99_ms": p99, "p99_over_layer": p99 / 1e3 / LAYER_SECONDS}
