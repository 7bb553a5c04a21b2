"""Whether lm-evaluation-harness is here, and the name under which it finds our model."""

import importlib

from tiered.core.extras import Extra

MODEL_NAME = "tiered"
MODEL = "tiered.evaluation.lm:TieredLM"


def require_harness() -> None:
    """Check that the harness can be imported.

    Raises:
        ImportError: it is not installed; says how to get it.
    """
    with Extra("eval"):
        importlib.import_module("lm_eval")


def register() -> None:
    """Make `--model tiered`, and `simple_evaluate(model="tiered")`, known to the harness. It looks for no plugins.

    Raises:
        ImportError: as `require_harness`.
    """
    require_harness()
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=MODEL)
