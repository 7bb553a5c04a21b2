"""Speeds of copies over the link, by kind of host memory and direction, and the time of pinning."""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import UInt8
from measuring.device_timer import device_times
from torch import Tensor

from gpu_parts.moved_bytes import copy_bandwidth, difference, fill_at_random, poison, random_memory, speeds
from gpu_parts.setting import Setting, checked, skipped
from tiered.offload.chunk import Chunk
from tiered.offload.pinning import PINNERS

KINDS = ("cupy", "registered", "pageable")
DIRECTIONS = ("to device", "to host", "both ways")
WITHIN = "device to device"
MIB = 1 << 20
ROUNDS = 8
Pairs = Sequence[tuple[UInt8[Tensor, " bytes"], UInt8[Tensor, " bytes"]]]  # targets and their sources

_device_memory = lru_cache(maxsize=1)(random_memory)
_streams = lru_cache(maxsize=1)(lambda device: (torch.cuda.Stream(device), torch.cuda.Stream(device)))


def cases(setting: Setting) -> list[str]:
    """Each kind of memory in each direction, then a copy within the device."""
    return [*(f"{kind} {direction}" for kind in KINDS for direction in DIRECTIONS), WITHIN]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Speeds of a large copy and, as `medium_…`, of a smaller one. `pin_ms_per_gib`: time to obtain the memory; None if
    it is not pinned."""
    large, medium = (MIB, MIB // 16) if setting.tiny else (256 * MIB, 16 * MIB)
    memory = _device_memory(setting.on, 2 * large, setting.seed)
    if case == WITHIN:
        row = _copied([(memory[large:], memory[:large])], setting, sides=2)  # read and written
        return row | {"ceiling_gb_per_s": copy_bandwidth(setting.on, setting.tiny) / 1e9}
    kind, _, direction = case.partition(" ")
    if not PINNERS[kind].available(setting.on):
        return skipped(f"pinner {kind!r} does not work for device {setting.on} here")
    chunk, pin_seconds = _host_memory(kind, setting.on, 2 * large, setting.seed)
    pairs = _pairs(direction, chunk.bytes, memory)
    whole, part = (
        _copied([(target[:nbytes], source[:nbytes]) for target, source in pairs], setting) for nbytes in (large, medium)
    )
    pinning = 1e3 * pin_seconds / (2 * large / (1 << 30)) if chunk.pinned else None
    row = {"pinner": kind, "direction": direction, "pinned": chunk.pinned, "pin_ms_per_gib": pinning, **whole}
    row |= {f"medium_{name}": value for name, value in part.items() if name not in ("ok", "why")}
    return row | checked(whole.get("why"), part.get("why"))


def copy_all(pairs: Pairs, device: torch.device) -> None:
    """Copy each source to its target, two at the same time, in order with the current stream of `device`."""
    if len(pairs) == 1 or device.type != "cuda":
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        return
    current = torch.cuda.current_stream(device)
    streams = _streams(device)
    for (target, source), stream in zip(pairs, streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    for stream in streams:
        current.wait_stream(stream)


def _copied(pairs: Pairs, setting: Setting, sides: int = 1) -> dict[str, Any]:
    moved = sides * sum(map(len, (target for target, _ in pairs)))
    times = device_times(lambda: copy_all(pairs, setting.on), setting.on, rounds=ROUNDS, hold=True)
    for target, _ in pairs:
        poison(target)
    copy_all(pairs, setting.on)
    if setting.on.type == "cuda":
        torch.cuda.synchronize(setting.on)
    faults = (difference(target, source) for target, source in pairs)
    return {"bytes": moved, **speeds(moved, times), **checked(*faults)}


def _pairs(direction: str, host: UInt8[Tensor, " two"], device: UInt8[Tensor, " two"]) -> Pairs:
    """First halves are sources, second halves targets, so that no two copies share bytes."""
    half = len(host) // 2
    down, up = (device[half:], host[:half]), (host[half:], device[:half])
    return {"to device": [down], "to host": [up], "both ways": [down, up]}[direction]


@lru_cache(maxsize=1)  # one kind of memory at a time
def _host_memory(kind: str, device: torch.device, nbytes: int, seed: int) -> tuple[Chunk, float]:
    """Memory, random in its first half, and the seconds of its allocation."""
    pinner = PINNERS[kind](device)
    pinner.allocate(1 << 16).free()  # imports, and CUDA's first call
    begin = time.perf_counter()
    chunk = pinner.allocate(nbytes)
    seconds = time.perf_counter() - begin
    fill_at_random(chunk.bytes[: nbytes // 2], seed)
    return chunk, seconds
