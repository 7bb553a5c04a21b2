"""Every kernel at a model's size, against float64 and, where bits are the law, against its reference."""

from typing import Any

from gpu_parts.kernel_case import interpret
from gpu_parts.kernel_cases import CHECKED, generator_of, sized
from gpu_parts.kernel_check import check
from gpu_parts.setting import Setting


def cases(setting: Setting) -> list[str]:
    """All, by kernel."""
    return list(sized(CHECKED, setting.tiny))


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Errors and their bounds; `bits` where these are the law."""
    interpret(setting.on)
    checked = sized(CHECKED, setting.tiny)[case]
    return {"kernel": checked.kernel} | check(checked, generator_of(case, setting.seed, setting.on))
