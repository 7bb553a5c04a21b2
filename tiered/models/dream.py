"""The Dream family (arXiv 2508.15487): Dream-v0, Dream-Coder and DiffuCoder, in the layout of Qwen2.5.

Grouped-query attention with biases on q, k and v only, and a gated MLP. A row predicts the token behind its own
position (`ModelShape.prediction_shift`); logits here are by row, unshifted.
"""

from collections.abc import Mapping

from tiered.models.base import DiffusionModel
from tiered.models.layout import Layout, ModelConfig

_LAYOUT = Layout(family="Dream", allowed={"attention_bias": (True,), "hidden_act": ("silu",)})


def read_dream_config(config: Mapping[str, object]) -> ModelConfig:
    # As in Qwen2, the width of a window is unused while `use_sliding_window` is off.
    given = {**config, "sliding_window": None}
    return ModelConfig(**_LAYOUT.read(given, biases=("q_proj", "k_proj", "v_proj"), prediction_shift=1))


class Dream(DiffusionModel):
    read_config = staticmethod(read_dream_config)
