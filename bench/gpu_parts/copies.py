"""Part of a GPU day: how fast the link copies, by kind of host memory and direction, and what pinning costs."""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from gpu_parts.bandwidth import copy_bandwidth
from gpu_parts.moved_bytes import checked, difference, fill_at_random, poison, speeds
from gpu_parts.setting import Setting
from tiered.offload.chunk import Chunk
from tiered.offload.device_timer import device_times
from tiered.offload.pinning import pick_pinner

KINDS = ("cupy", "registered", "torch", "pageable")
DIRECTIONS = ("to device", "to host", "both ways")
WITHIN = "device to device"
MIB = 1 << 20
ROUNDS = 8
Pairs = Sequence[tuple[UInt8[Tensor, " bytes"], UInt8[Tensor, " bytes"]]]  # targets and their sources

_CASES = {f"{kind} {direction}": (kind, direction) for kind in KINDS for direction in DIRECTIONS}


def cases(setting: Setting) -> list[str]:
    """Each kind of memory in each direction, then a copy within the device."""
    return [*_CASES, WITHIN]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Speeds of a large copy and, as `medium_…`, of a smaller one; `pin_ms_per_gib`: the time to obtain the memory,
    None where it is not pinned."""
    large, medium = (MIB, MIB // 16) if setting.tiny else (256 * MIB, 16 * MIB)
    if case == WITHIN:
        return _within(setting, large)
    kind, direction = _CASES[case]
    try:
        pick_pinner(kind, setting.on)
    except ValueError as error:
        return {"skipped": str(error)}
    chunk, pin_seconds = _host_memory(kind, setting.on, 2 * large, setting.seed)
    pairs = _pairs(direction, chunk.bytes, _device_memory(setting.on, 2 * large, setting.seed))
    row: dict[str, Any] = {
        "pinner": kind,
        "direction": direction,
        "pinned": chunk.pinned,
        "pin_ms_per_gib": 1e3 * pin_seconds / (2 * large / (1 << 30)) if chunk.pinned else None,
    }
    why = None
    for prefix, nbytes in (("", large), ("medium_", medium)):
        parts = [(target[:nbytes], source[:nbytes]) for target, source in pairs]
        moved = nbytes * len(parts)
        times = device_times(lambda parts=parts: copy_all(parts, setting.on), setting.on, rounds=ROUNDS, hold=True)
        row |= {f"{prefix}bytes": moved} | {prefix + name: value for name, value in speeds(moved, times).items()}
        for target, _ in parts:
            poison(target)
        copy_all(parts, setting.on)
        if setting.on.type == "cuda":
            torch.cuda.synchronize(setting.on)
        why = why or next(filter(None, (difference(target, source) for target, source in parts)), None)
    return row | checked(why)


def copy_all(pairs: Pairs, device: torch.device) -> None:
    """Each source to its target, at the same time where there are two; in order with the current stream of `device`."""
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


def _pairs(direction: str, host: UInt8[Tensor, " two"], device: UInt8[Tensor, " two"]) -> Pairs:
    """First halves are sources, second halves targets, so that no two copies share bytes."""
    half = len(host) // 2
    down, up = (device[half:], host[:half]), (host[half:], device[:half])
    return {"to device": [down], "to host": [up], "both ways": [down, up]}[direction]


def _within(setting: Setting, nbytes: int) -> dict[str, Any]:
    memory = _device_memory(setting.on, 2 * nbytes, setting.seed)
    source, target = memory[:nbytes], memory[nbytes:]
    times = device_times(lambda: target.copy_(source), setting.on, rounds=ROUNDS, hold=True)
    poison(target)
    target.copy_(source)
    return {
        "bytes": 2 * nbytes,  # read and written
        **speeds(2 * nbytes, times),
        "ceiling_gb_per_s": copy_bandwidth(setting.on, setting.tiny) / 1e9,
        **checked(difference(target, source)),
    }


@lru_cache(maxsize=1)  # one kind of memory at a time
def _host_memory(kind: str, device: torch.device, nbytes: int, seed: int) -> tuple[Chunk, float]:
    """Memory, random in its first half, and the seconds that it took to obtain."""
    pinner = pick_pinner(kind, device)
    pinner.allocate(1 << 16).free()  # imports, and CUDA's first call
    begin = time.perf_counter()
    chunk = pinner.allocate(nbytes)
    seconds = time.perf_counter() - begin
    fill_at_random(chunk.bytes[: nbytes // 2], seed)
    return chunk, seconds


@lru_cache(maxsize=1)
def _device_memory(device: torch.device, nbytes: int, seed: int) -> UInt8[Tensor, " bytes"]:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


@lru_cache(maxsize=1)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
