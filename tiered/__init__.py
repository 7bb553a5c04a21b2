"""Memory-tiered inference for diffusion language models.

    import tiered
    with tiered.from_pretrained("embedded") as runtime:
        out = runtime.generate("sort: Nora Ben Ivan Cleo", max_new_tokens=32)
    out.text, out.num_forwards, out.memory.peak_device_bytes

Names are imported at their first use, so that `import tiered` and the help of commands are fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.core.budget import MemoryBudget
    from tiered.core.errors import NonFiniteError, TierCapacityError
    from tiered.loading import from_pretrained
    from tiered.options import GenerationOptions
    from tiered.output import GenerationOutput
    from tiered.planning.plan import Plan, plan
    from tiered.policies.base import Policy
    from tiered.runtime import Runtime

__version__ = "0.1.0"

_HOMES = {
    "GenerationOptions": "tiered.options",
    "GenerationOutput": "tiered.output",
    "MemoryBudget": "tiered.core.budget",
    "NonFiniteError": "tiered.core.errors",
    "Plan": "tiered.planning.plan",
    "Policy": "tiered.policies.base",
    "Runtime": "tiered.runtime",
    "TierCapacityError": "tiered.core.errors",
    "from_pretrained": "tiered.loading",
    "plan": "tiered.planning.plan",
}

__all__ = [
    "GenerationOptions",
    "GenerationOutput",
    "MemoryBudget",
    "NonFiniteError",
    "Plan",
    "Policy",
    "Runtime",
    "TierCapacityError",
    "from_pretrained",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiered' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
