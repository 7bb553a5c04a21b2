"""What every measurement of a link needs: random bytes, targets that hold something else, a look at each byte after."""

import statistics
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

POISON = 0xA5


def fill_at_random(target: UInt8[Tensor, " bytes"], seed: int) -> None:
    """Random bytes into host memory, whose size is a multiple of 8: gigabytes a second, on one core."""
    words = target.numpy().view(np.uint64)
    words[:] = np.random.SFC64(seed).random_raw(words.size)


def poison(target: UInt8[Tensor, " bytes"]) -> None:
    """What no copy brings, everywhere, and there when this returns."""
    target.fill_(POISON)
    if target.is_cuda:
        torch.cuda.synchronize(target.device)


def difference(found: UInt8[Tensor, " bytes"], wanted: UInt8[Tensor, " bytes"]) -> str | None:
    """How many bytes are not as wanted, and the first of them; None where all are. Compared on the host, where bytes of
    a device come by way of ordinary memory."""
    found, wanted = found.cpu(), wanted.cpu()
    if torch.equal(found, wanted):
        return None
    wrong = (found != wanted).nonzero().flatten()
    return f"{len(wrong)} of {len(wanted)} bytes are wrong, the first at {int(wrong[0])}"


def speeds(nbytes: int, seconds: Sequence[float]) -> dict[str, float]:
    """`gb_per_s` of the median time, with the speeds that a fifth of the rounds falls short of and that four fifths do;
    `noise_share`: how far the medians of the two halves of the rounds are apart."""
    ordered = sorted(nbytes / time / 1e9 for time in seconds)
    middle = statistics.median(ordered)
    halves = [statistics.median(part) for part in (seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]) if part]
    return {
        "gb_per_s": middle,
        "gb_per_s_p20": ordered[len(ordered) // 5],
        "gb_per_s_p80": ordered[-1 - len(ordered) // 5],
        "noise_share": (max(halves) - min(halves)) / statistics.median(seconds),
    }


def checked(why: str | None) -> dict[str, object]:
    """The part of a row that says whether the bytes were right."""
    return {"ok": True} if why is None else {"ok": False, "why": why}
