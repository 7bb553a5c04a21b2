"""The first layers of the random LLaDA-8B, at its full width."""

from functools import cache

import torch

from gpu_parts.random_llada import llada_config, random_llada
from gpu_parts.setting import Setting
from tiered.models.llada import LLaDA


@cache
def few_layers(setting: Setting, layers: int, dtype: torch.dtype | None = None) -> LLaDA:
    """As many layers, or all that there are. Weights are those of the whole model, not copies, unless `dtype` is
    another one."""
    whole = random_llada(setting)
    with torch.device("meta"):
        model = LLaDA.from_config(llada_config(setting) | {"n_layers": min(layers, whole.shape.layers)})
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    return model if dtype is None else model.to(dtype)
