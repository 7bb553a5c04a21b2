"""The compute device: which one, how much memory it has, and what its allocator has seen."""

import torch


def pick_device(device: str | torch.device) -> torch.device:
    """`device`, where "auto" is the current CUDA device, or the CPU on a machine without one.

    Raises:
        ValueError: no such kind of device, or CUDA asked for where there is none.
    """
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'") from error
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'")
    if picked.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (picked.index or 0) >= count:
            raise ValueError(f"device {device!r} is not there: this machine has {count} CUDA devices")
        if picked.index is None:  # tensors say which, and a device without its number is unequal to theirs
            return torch.device("cuda", torch.cuda.current_device())
    return picked


def synchronize(device: torch.device) -> None:
    """Block the host until `device` has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def restart_allocator_peak(device: torch.device) -> None:
    """Begin a new measurement of `allocator_peak`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocator_peak(device: torch.device) -> int | None:
    """Bytes that torch's allocator held at most since `restart_allocator_peak`; None on the CPU, which counts none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
