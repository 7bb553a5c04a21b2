"""The device, versions of packages, the attention that torch picks there, and the programs that are there."""

import importlib.metadata
import shutil
import subprocess
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from gpu_parts.setting import Setting
from tiered.offload.device import cublas_workspace_bytes

_PACKAGES = ("torch", "transformers", "triton", "numpy", "jaxtyping", "beartype", "torchao", "hypothesis")
# Packages that have several names.
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "faiss": ("faiss-cpu",)}
_PROGRAMS = ("compute-sanitizer", "ncu", "nvidia-smi")


def cases(setting: Setting) -> list[str]:
    """One case."""
    return ["device"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Names and versions, None for a package that is not installed; figures of the card from torch and the driver."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    packages = {name: (name,) for name in _PACKAGES} | _DISTRIBUTIONS
    row: dict[str, Any] = {"name": "cpu", "attention": _attention(setting.on)}
    row["packages"] = {
        name: next((installed[each] for each in names if each in installed), None) for name, names in packages.items()
    }
    row["programs"] = {program: shutil.which(program) is not None for program in _PROGRAMS}
    if setting.on.type != "cuda":
        return row
    card = torch.cuda.get_device_properties(setting.on)
    row |= {"name": card.name, "capability": f"{card.major}.{card.minor}", "memory_bytes": card.total_memory}
    row |= {"multiprocessors": card.multi_processor_count, "l2_bytes": card.L2_cache_size, "driver": _driver()}
    row |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return row | {"cublas_workspace_bytes": cublas_workspace_bytes(setting.on)}


def _attention(device: torch.device) -> dict[str, Any]:
    """The backends that are allowed, and those that torch picks for 32 rows of LLaDA-8B at 1k positions."""
    flags = torch.backends.cuda
    picked = {}
    for name in ("bfloat16", "bfloat16, padded", "float32"):
        dtype, masked = getattr(torch, name.split(",")[0]), name.endswith("padded")
        queries, keys = (torch.zeros(1, 32, rows, 128, dtype=dtype, device=device) for rows in (32, 1024))
        mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool, device=device) if masked else None
        picked[name] = SDPBackend(torch.ops.aten._fused_sdp_choice(queries, keys, keys, mask)).name
    allowed = {"flash": flags.flash_sdp_enabled(), "efficient": flags.mem_efficient_sdp_enabled()}
    allowed |= {"math": flags.math_sdp_enabled(), "cudnn": flags.cudnn_sdp_enabled()}
    return {**allowed, "picked": picked}


def _driver() -> str | None:
    """The driver's version by nvidia-smi; None without it."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
