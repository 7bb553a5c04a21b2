"""The compute device, its properties and its allocator's figures."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def pick_device(device: str | torch.device) -> torch.device:
    """`device`; "auto" is the current CUDA device, or the CPU on a machine without one. Raises `ValueError` for an
    unknown kind of device, or a CUDA device that this machine lacks."""
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    picked = read_device(device)
    if picked.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (picked.index or 0) >= count:
            raise ValueError(f"device {device!r} is not there: this machine has {count} CUDA devices")
        if picked.index is None:  # tensors have an index, and a device without one is unequal to theirs
            return torch.device("cuda", torch.cuda.current_device())
    return picked


def read_device(device: str | torch.device) -> torch.device:
    """`device`, which need not be there. Raises `ValueError` for an unknown kind."""
    try:
        read = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'") from error
    if read.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'")
    return read


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Make `device` the current one within the block, because contexts, library handles and pinned memory belong to the
    current device, not to that of tensors.

    On CUDA it also switches cuDNN's attention off, for the whole process and for good. cuDNN builds a plan for each
    number of rows, and its version changes answers. All threads share the switch, so restoring it at the end of a
    block would restore it inside another thread's block.
    """
    if device.type != "cuda":
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.cuda.device(device):
        yield


def cublas_workspace_bytes(device: torch.device) -> int:
    """Bytes that torch gives cuBLAS on the CUDA `device`, once for each thread and stream; before torch 2.13 as
    documented."""
    if (said := getattr(torch.backends.cuda, "cublas_workspace_size", None)) is not None:
        with torch.cuda.device(device):
            return said()
    if chosen := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
        return sum(int(kib) * int(count) for kib, count in chosen) << 10
    return 32 << 20 if torch.cuda.get_device_capability(device)[0] >= 9 else (2 * 4096 + 8 * 16) << 10


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def synchronize(device: torch.device) -> None:
    """Block the host until `device` has done all its work; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five calls of `work`, after a warm-up call. On CUDA the device is synchronised
    before and after each call."""
    work()
    times = []
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that this process may still allocate on the CUDA `device`, whose context exists: free bytes of the driver,
    and cached bytes of torch's allocator. None on the CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def restart_allocator_peak(device: torch.device) -> None:
    """Begin a new measurement of `allocator_peak`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocator_peak(device: torch.device) -> int | None:
    """Peak bytes of torch's allocator since `restart_allocator_peak`; None on the CPU, which counts none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
