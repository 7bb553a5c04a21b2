"""Small host values, such as sizes and flags, copied to the device without a wait."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Host `values` as a tensor on `device`.

    A copy from pageable memory to CUDA waits for all earlier work of the device. A copy from pinned memory does not,
    and torch keeps that memory until the copy has ended.
    """
    device, host = torch.device(device), torch.as_tensor(values)
    if device.type == "cuda":
        with torch.cuda.device(device):  # pinning is for the current device, and creates its context
            host = host.pin_memory()
    return host.to(device, non_blocking=True)
