"""The dense SDAR family (arXiv 2510.06303): the layout of Qwen3, with attention that is causal from block to block.

Heads and keys are normed head by head before they are rotated; no biases. A row predicts its own position. The
config.json of the released chat models does not say how long blocks are; those of training copies do (`block_size`).
"""

from collections.abc import Mapping

from tiered.models.base import DiffusionModel
from tiered.models.config_fields import switch
from tiered.models.layout import NAMES, Layout, ModelConfig

_LAYOUT = Layout(
    family="SDAR",
    allowed={
        "hidden_act": ("silu",),
        "use_qk_norm": (True,),
    },
    names={**NAMES, "blocks.q_norm": "self_attn.q_norm", "blocks.k_norm": "self_attn.k_norm"},
    heads_fill_width=False,
    tokens=(151669, 151643, None),
)


def read_sdar_config(config: Mapping[str, object]) -> ModelConfig:
    norms = {"q_norm.weight": ("head_dim",), "k_norm.weight": ("head_dim",)}
    windowed = switch(config, "use_sliding_window")
    return ModelConfig(
        **_LAYOUT.read_in_blocks(config, windowed=windowed, more=norms, sight="blocks", cuts_answers=False)
    )


class Sdar(DiffusionModel):
    read_config = staticmethod(read_sdar_config)
