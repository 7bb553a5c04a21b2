"""lm-evaluation-harness on this runtime: the model `tiered`, and the harness's command line with it.

The extra `eval` installs the harness (`pip install '.[eval]'` in the checkout); it is imported with the model.
"""

from typing import TYPE_CHECKING, Any

from tiered.core.extras import needing

if TYPE_CHECKING:
    from tiered.evaluation.lm import TieredLM

__all__ = ["TieredLM", "register"]


def register() -> None:
    """Add `--model tiered`, and `simple_evaluate(model="tiered")`, to the harness, which looks for no plugins. Raises
    `ImportError`, which says how to get it, if the harness is not installed."""
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
