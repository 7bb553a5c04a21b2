"""Tools of measurements of a link: random bytes, targets that hold other bytes, and a comparison of each byte."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from jaxtyping import UInt8
from measuring.device_timer import device_times
from measuring.statistics import spread
from torch import Tensor

POISON = 0xA5
_COPY_BYTES, _TINY_COPY_BYTES = 1 << 30, 1 << 20  # the first is far more than any cache holds


def fill_at_random(target: UInt8[Tensor, " bytes"], seed: int) -> None:
    """Random bytes into host memory, whose size is a multiple of 8, at gigabytes a second on one core."""
    words = target.numpy().view(np.uint64)
    words[:] = np.random.SFC64(seed).random_raw(words.size)


def random_memory(device: torch.device, nbytes: int, seed: int) -> UInt8[Tensor, " bytes"]:
    """Random bytes of a device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


def poison(target: UInt8[Tensor, " bytes"]) -> None:
    """Fill `target` with bytes that no copy brings, and wait until they are there."""
    target.fill_(POISON)
    if target.is_cuda:
        torch.cuda.synchronize(target.device)


def difference(found: UInt8[Tensor, " bytes"], wanted: UInt8[Tensor, " bytes"]) -> str | None:
    """The number of bytes that are not as wanted, and the first of them; None if all are. They are compared on the
    host; bytes of a device come there by way of ordinary memory."""
    found, wanted = found.cpu(), wanted.cpu()
    if torch.equal(found, wanted):
        return None
    wrong = (found != wanted).nonzero().flatten()
    return f"{len(wrong)} of {len(wanted)} bytes are wrong, the first at {int(wrong[0])}"


def speeds(nbytes: int, seconds: Sequence[float]) -> dict[str, float]:
    """`gb_per_s` of the median time, with the 20th and the 80th percentile of the speeds. `noise_share`: distance of
    the medians of the two halves of the rounds, over the median."""
    slow, _, fast = spread([nbytes / time / 1e9 for time in seconds])
    median = spread(seconds)[1]
    halves = [spread(part)[1] for part in (seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]) if part]
    return {
        "gb_per_s": nbytes / median / 1e9,
        "gb_per_s_p20": slow,
        "gb_per_s_p80": fast,
        "noise_share": (max(halves) - min(halves)) / median,
    }


@cache
def copy_bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes a second, read and written together, of a large copy within the memory of `device`. It is the best of a
    few, for floors. Measured once a process, between two buffers that are freed again."""
    source = random_memory(device, _TINY_COPY_BYTES if tiny else _COPY_BYTES, 0)
    target = torch.empty_like(source)
    return 2 * len(source) / min(device_times(lambda: target.copy_(source), device, rounds=5, hold=True))
