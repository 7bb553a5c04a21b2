"""accelerate's `disk_offload` of a Llama: a module's weights come from files when it is called, and leave after it."""

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tiered.core.extras import needing


def offloaded(llama: LlamaForCausalLM, folder: Path) -> tuple[Any, str]:
    """`llama` with all its weights in files of `folder`, embedding and head among them, and accelerate's version.

    Raises:
        ModuleNotFoundError: accelerate is not installed; says how to install it.
    """
    with needing("accelerate"):
        accelerate: Any = importlib.import_module("accelerate")
    return accelerate.disk_offload(llama, folder, execution_device=torch.device("cpu")), accelerate.__version__
