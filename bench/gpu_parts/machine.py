"""The device, the versions, which attention torch takes there, and what of the toolchain is not there."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from gpu_parts.setting import Setting
from tiered.offload.device import cublas_workspace_bytes

PACKAGES = (
    *("torch", "transformers", "triton", "numpy", "cupy", "faiss", "jaxtyping"),
    *("beartype", "torchao", "hypothesis"),
)
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "faiss": ("faiss-cpu",)}
PROGRAMS = ("compute-sanitizer", "ncu", "nvidia-smi")


def cases(setting: Setting) -> list[str]:
    """One."""
    return ["device"]


def measure(setting: Setting, case: str) -> dict[str, Any]:
    """Names and versions; figures of the card as torch and the driver know them."""
    row: dict[str, Any] = {
        "name": "cpu",
        "packages": {package: _version(package) for package in PACKAGES},
        "programs": {program: shutil.which(program) is not None for program in PROGRAMS},
        "attention": _attention(setting.on),
    }
    if setting.on.type != "cuda":
        return row
    properties = torch.cuda.get_device_properties(setting.on)
    return row | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas_workspace_bytes": cublas_workspace_bytes(setting.on),
        "driver": _driver(),
    }


def _attention(device: torch.device) -> dict[str, Any]:
    """Which backends calls allow, and which of them torch picks for 32 rows of LLaDA-8B at 1k positions."""
    flags = torch.backends.cuda
    picked = {}
    for name in ("bfloat16", "bfloat16, padded", "float32"):
        dtype, masked = getattr(torch, name.split(",")[0]), name.endswith("padded")
        queries, keys = (torch.zeros(1, 32, rows, 128, dtype=dtype, device=device) for rows in (32, 1024))
        mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool, device=device) if masked else None
        picked[name] = SDPBackend(torch.ops.aten._fused_sdp_choice(queries, keys, keys, mask)).name
    return {
        "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(),
        "math": flags.math_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(),
        "picked": picked,
    }


def _version(package: str) -> str | None:
    """None where it is not installed."""
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    """The driver's version, as nvidia-smi says it."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
