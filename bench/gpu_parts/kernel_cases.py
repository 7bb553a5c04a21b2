"""The table of kernel cases: what is checked, what is timed against its bytes, and a small run of every kernel.

For the sanitizer's part, `small_cases() -> list[tuple[str, Callable[[torch.device], None]]]`: the name of each kernel,
and what runs it once at a tiny size on a device and waits for it. It checks nothing.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch

from gpu_parts.attention_inputs import DREAM, GIDD, LLADA
from gpu_parts.kernel_case import KernelCase, interpret
from gpu_parts.kernel_cases_attention import BlockAttention, CappedAttention, ProxyAttention
from gpu_parts.kernel_cases_copies import GatherCopy, ScatterRows
from gpu_parts.kernel_cases_delta import DeltaDecode, DeltaEncode
from gpu_parts.kernel_cases_drift import FullDrift, ProxyDrift
from gpu_parts.kernel_cases_linear import Linear
from gpu_parts.kernel_cases_nvfp4 import Nvfp4Decode, Nvfp4Encode

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_RAGGED = (64, 1, 100, 63, 7)
_CAP = 30.0
# No multiples of 16, and contexts are none either. Triton compiles a kernel anew where a number is one, which takes
# seconds: so most numbers of rows are none either, and what is timed has nearly all been compiled when it was checked.
_KEYS, _MANY_KEYS, _CHANGING = 5003, 32763, 289

# What steps rest on comes first: where time runs out, the others are skipped.
CHECKED: tuple[KernelCase[Any], ...] = (
    DeltaDecode(counts=_RAGGED, width=4096, dtype=_BF16),
    DeltaDecode(counts=_RAGGED, width=4096, dtype=_BF16, pinned=True),
    DeltaDecode(counts=_RAGGED, width=4096, dtype=_BF16, delta=False),
    DeltaDecode(counts=_RAGGED, width=3584, dtype=_FP32, placed=False),
    DeltaDecode(counts=_RAGGED, width=3573, dtype=_FP16),
    DeltaEncode(counts=_RAGGED, width=4096, dtype=_BF16),
    DeltaEncode(counts=_RAGGED, width=4096, dtype=_BF16, delta=False),
    DeltaEncode(counts=_RAGGED, width=3573, dtype=_FP32, base="mean"),
    ProxyAttention(shape=LLADA, batch=2, rows=65, length=_KEYS, dtype=_BF16, masked=True),
    ProxyAttention(shape=DREAM, rows=65, length=_KEYS, dtype=_BF16, masked=True, strided=True),
    ProxyAttention(shape=GIDD, rows=65, length=_KEYS, dtype=_FP16, soft_cap=_CAP),
    ProxyAttention(shape=DREAM, batch=2, rows=9, length=_KEYS, dtype=_FP32, masked=True, strided=True),
    ProxyDrift(shape=LLADA, batch=2, rows=65, length=_KEYS, changing=_CHANGING, dtype=_BF16, masked=True),
    ProxyDrift(shape=DREAM, rows=65, length=_KEYS, changing=_CHANGING, dtype=_FP32, strided=True),
    ProxyDrift(
        shape=GIDD, batch=2, rows=65, length=_KEYS, changing=_CHANGING, dtype=_BF16, masked=True, soft_cap=_CAP, sinks=1
    ),
    ScatterRows(heads=32, length=_KEYS, elements=128, rows=257, dtype=_BF16, masked=True),
    ScatterRows(heads=1, length=_KEYS, elements=4096, rows=257, dtype=_BF16),
    ScatterRows(heads=4, length=_KEYS, elements=75, rows=257, dtype=_FP32, masked=True),
    GatherCopy(segments=40),
    GatherCopy(segments=40, down=True),
    BlockAttention(shape=DREAM, batch=2, rows=32, length=_KEYS, dtype=_BF16, masked=True, strided=True),
    CappedAttention(
        shape=GIDD, batch=2, rows=32, length=_KEYS, dtype=_BF16, masked=True, partly=True, soft_cap=_CAP, sinks=1
    ),
    CappedAttention(shape=GIDD, rows=32, length=_KEYS, dtype=_FP16, strided=True, partly=True, soft_cap=_CAP),
    CappedAttention(shape=DREAM, rows=32, length=_KEYS, dtype=_FP32, masked=True, strided=True, soft_cap=_CAP, sinks=2),
    Nvfp4Decode(rows=235, width=4096, dtype=_BF16),
    Nvfp4Decode(rows=235, width=3573, dtype=_FP32),
    Nvfp4Encode(rows=235, width=4096, dtype=_BF16),
    Nvfp4Encode(rows=235, width=3573, dtype=_FP32),
    FullDrift(shape=LLADA, batch=2, rows=65, length=_KEYS, changing=_CHANGING, dtype=_BF16, masked=True),
    FullDrift(
        shape=DREAM, rows=65, length=_KEYS, changing=_CHANGING, dtype=_FP16, strided=True, soft_cap=_CAP, sinks=1
    ),
)
_RECORDS = (63, *(64,) * 254)
_CLUSTERS = _MANY_KEYS // 64
TIMED: tuple[KernelCase[Any], ...] = (
    DeltaDecode(counts=_RECORDS, width=4096, dtype=_BF16),
    DeltaDecode(counts=_RECORDS[:5], width=4096, dtype=_BF16),  # of one layer's update
    DeltaEncode(counts=_RECORDS, width=4096, dtype=_BF16),
    ProxyAttention(shape=LLADA, rows=_CLUSTERS, length=_MANY_KEYS, dtype=_BF16, masked=True),
    ProxyAttention(shape=LLADA, rows=9, length=_MANY_KEYS, dtype=_BF16, masked=True),
    ProxyAttention(shape=DREAM, rows=_CLUSTERS, length=_MANY_KEYS, dtype=_BF16, masked=True),
    ProxyDrift(shape=LLADA, rows=_CLUSTERS, length=_MANY_KEYS, changing=_CHANGING, dtype=_BF16, masked=True),
    FullDrift(shape=LLADA, rows=_CLUSTERS, length=_MANY_KEYS, changing=_CHANGING, dtype=_BF16, masked=True),
    ScatterRows(layers=1, batch=1, heads=32, length=_MANY_KEYS, elements=128, rows=257, dtype=_BF16, masked=True),
    CappedAttention(
        shape=GIDD, rows=32, length=_MANY_KEYS, dtype=_BF16, masked=True, partly=True, soft_cap=_CAP, sinks=1
    ),
    *(
        BlockAttention(shape=LLADA, rows=32, length=length, dtype=_BF16, masked=masked)
        for length in (1024, 4096, 16384, 32768)
        for masked in (False, True)
    ),
    Linear(rows=32, inputs=4096, outputs=12288, dtype=_BF16),
    Linear(rows=32, inputs=12288, outputs=4096, dtype=_BF16),
)


def sized(cases: tuple[KernelCase[Any], ...], tiny: bool) -> dict[str, KernelCase[Any]]:
    """By the name at full size, so that a rehearsal and a day have the same rows."""
    return {case.name: case.tiny() if tiny else case for case in cases}


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Draws of one case: they do not depend on which others run."""
    return torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))


def small_cases() -> list[tuple[str, Callable[[torch.device], None]]]:
    """The first case of every kernel, tiny: the kernel's name, and what runs it once on a device and waits."""
    first: dict[str, KernelCase[Any]] = {}
    for case in CHECKED:
        first.setdefault(case.kernel, case.tiny())
    first.pop(BlockAttention.kernel)  # torch's own
    return [(name, _once(case)) for name, case in first.items()]


def _once(case: KernelCase[Any]) -> Callable[[torch.device], None]:
    def run(device: torch.device) -> None:
        interpret(device)
        given = case.draw(generator_of(case.name, 0, device))
        results = case.run(given, case.room(given))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del results

    return run
