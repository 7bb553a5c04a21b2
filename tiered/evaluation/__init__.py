"""lm-evaluation-harness on this runtime: the model `tiered`, and the harness's command line.

The extra `eval` installs the harness (`pip install '.[eval]'` in the checkout); it is imported with the model.
"""

from typing import TYPE_CHECKING, Any

from tiered.core.extras import needing

if TYPE_CHECKING:
    from tiered.evaluation.lm import TieredLM

__all__ = ["TieredLM", "register"]


def register() -> None:
    """Register the model for `--model tiered` and `simple_evaluate(model="tiered")`. Raises `ImportError`, with the
    command to install it, if the harness is missing."""
    with needing("eval"):
        from lm_eval.api.registry import model_registry
    if "tiered" not in model_registry:
        model_registry.register("tiered", target="tiered.evaluation.lm:TieredLM")


def __getattr__(name: str) -> Any:
    if name != "TieredLM":
        raise AttributeError(f"module 'tiered.evaluation' has no attribute {name!r}")
    register()
    from tiered.evaluation.lm import TieredLM

    return TieredLM
