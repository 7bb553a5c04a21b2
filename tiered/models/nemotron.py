"""The Nemotron-Labs-Diffusion family: the layout of Ministral 3, with a causal context and bidirectional blocks.

Final tokens, those of the prompt and of finished blocks, attend to themselves and the tokens in front of them. A block
that is not final yet also attends to all of itself. Queries grow with their positions (`Rotation.query_growth`) from a
sequence's first token on.

Based on public material: config.json as quoted by others, and descriptions of its decoding. Not compared with the
released code. A public copy of it takes a block's first token from the causal forward in front of it; that is not done
here (docs/models.md).
"""

from collections.abc import Mapping

from tiered.models.base import DiffusionModel
from tiered.models.layout import NAMES, Layout, ModelConfig

_LAYOUT = Layout(
    family="Nemotron-Labs",
    allowed={
        "dlm_paradigm": ("bidirectional",),
        "hidden_act": ("silu",),
    },
    names={
        **NAMES,
        "wte": "encoder.embed_tokens",
        "blocks": "encoder.layers",
        "ln_f": "encoder.norm",
        "ff_out": "diffusion_head",
    },
    norm_eps=1e-5,
    heads_fill_width=False,
    tokens=(100, 11, None),
)


def read_nemotron_config(config: Mapping[str, object]) -> ModelConfig:
    return ModelConfig(**_LAYOUT.read_in_blocks({**config, "max_window_layers": 0}, windowed=True, sight="context"))


class Nemotron(DiffusionModel):
    read_config = staticmethod(read_nemotron_config)
