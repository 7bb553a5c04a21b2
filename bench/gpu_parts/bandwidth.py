"""How fast device memory is: the measured ceiling that floors are counted from."""

from functools import cache

import torch

from tiered.offload.device_timer import device_times

COPY_BYTES = 1 << 30  # far more than any cache holds
TINY_BYTES = 1 << 20
ROUNDS = 5


@cache
def copy_bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes a second, read and written together, of a large copy within the memory of `device`: the best of a few,
    since it serves as a ceiling. Measured once a process, between two buffers of random bytes that are freed again."""
    nbytes = TINY_BYTES if tiny else COPY_BYTES
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)
    target = torch.empty_like(source)
    return 2 * nbytes / min(device_times(lambda: target.copy_(source), device, rounds=ROUNDS, hold=True))
