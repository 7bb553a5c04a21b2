"""Small values, such as sizes and flags, copied between host and device."""

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


class AsyncRead:
    """Values of the device, copied to the host. The copy begins at once, and the device goes on with what it is asked
    for next: the host waits only for the work in front of the copy."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            with torch.cuda.device(values.device):  # as in `on_device`
                self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()

    def tolist(self) -> Any:
        """The values; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
