"""Small values of the host, such as sizes and flags, on the device without a wait for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any] | Tensor, device: torch.device | str) -> Tensor:
    """`values`, of the host, as a tensor on `device`.

    A copy from ordinary memory to CUDA waits until the device has done all that it was given before. From pinned memory
    it does not; torch keeps that memory until the copy has ended.
    """
    device, host = torch.device(device), torch.as_tensor(values)
    if device.type == "cuda":
        with torch.cuda.device(device):  # memory is pinned for the current device, whose context that makes
            host = host.pin_memory()
    return host.to(device, non_blocking=True)
