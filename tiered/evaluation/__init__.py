"""lm-evaluation-harness on this runtime: the model `tiered`, its command line, and tasks that need no download.

    lm = tiered.evaluation.TieredLM("embedded", policy="polestar", batch_size=8)
    lm_eval.simple_evaluate(lm, tasks=["gsm8k_cot"], apply_chat_template=True)

    python -m tiered.evaluation run --model tiered --model_args pretrained=embedded --tasks gsm8k_cot …

The extra `eval` brings the harness (`pip install '.[eval]'` in the checkout); it is imported when the model is first
asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.evaluation.lm import TieredLM

__all__ = ["TieredLM"]


def __getattr__(name: str) -> Any:
    if name != "TieredLM":
        raise AttributeError(f"module 'tiered.evaluation' has no attribute {name!r}")
    from tiered.evaluation.harness import require_harness

    require_harness()
    from tiered.evaluation.lm import TieredLM

    return TieredLM
