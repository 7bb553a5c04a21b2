"""All kernel cases: what is checked, what is timed against its bytes, and a small run of every kernel.

They are found: `CHECKED` and `TIMED` of every module `kernel_cases_*`, in the order of its name.

For the sanitizer's part, `small_cases() -> list[tuple[str, Callable[[torch.device], None]]]`: the name of each kernel,
and what runs it once at a tiny size on a device and waits for it. It checks nothing.
"""

import importlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_parts.kernel_case import KernelCase, interpret

_MODULES = [
    importlib.import_module(f"gpu_parts.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("kernel_cases_*.py"))
]
CHECKED: tuple[KernelCase[Any], ...] = tuple(case for module in _MODULES for case in module.CHECKED)
TIMED: tuple[KernelCase[Any], ...] = tuple(case for module in _MODULES for case in module.TIMED)


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
        if case.triton:
            first.setdefault(case.kernel, case.tiny())
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
