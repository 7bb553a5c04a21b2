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


class OnTheWay:
    """Values of the device that go to the host. The device does what it is asked for meanwhile, and the host waits for
    no more than what it was asked for before."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    def tolist(self) -> Any:
        """Wait for the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
