"""lm-evaluation-harness on this runtime: the model `tiered`, its command line, and tasks that need no download.

    lm = tiered.evaluation.TieredLM("embedded", policy="polestar", batch_size=8)
    lm_eval.simple_evaluate(lm, tasks=["gsm8k_cot"], apply_chat_template=True)

    python -m tiered.evaluation run --model tiered --model_args pretrained=embedded --tasks gsm8k_cot …

The extra `eval` installs the harness (`pip install '.[eval]'` in the checkout); it is imported with the model.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tiered.core.extras import Extra

if TYPE_CHECKING:
    from tiered.evaluation.lm import TieredLM

__all__ = ["TieredLM", "register"]

MODEL_NAME = "tiered"


def register() -> None:
    """Add `--model tiered`, and `simple_evaluate(model="tiered")`, to the harness, which looks for no plugins.

    Raises:
        ImportError: the harness is not installed; the error says how to get it.
    """
    _require_harness()
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target="tiered.evaluation.lm:TieredLM")


def _require_harness() -> None:
    with Extra("eval"):
        importlib.import_module("lm_eval")


def __getattr__(name: str) -> Any:
    if name != "TieredLM":
        raise AttributeError(f"module 'tiered.evaluation' has no attribute {name!r}")
    _require_harness()
    from tiered.evaluation.lm import TieredLM

    return TieredLM
