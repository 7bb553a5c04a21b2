"""The Nemotron-Labs-Diffusion family: the layout of Ministral 3, with a causal context and blocks that see themselves.

Final tokens, those of the prompt and of finished blocks, see what is in front of them; a block that is not final yet
sees all of itself too. Queries grow with their positions (`Rotation.query_growth`) from a sequence's first token on.

From what is public: config.json as quoted by others, and descriptions of how it decodes. Not compared with the released
code, of which no copy was at hand.
"""

from collections.abc import Mapping

from tiered.models.base import DiffusionModel
from tiered.models.config_fields import length_or_none, value_of, windows_of
from tiered.models.layout import NAMES, Layout, ModelConfig

_LAYOUT = Layout(
    family="Nemotron-Labs",
    allowed={
        "dlm_paradigm": ("bidirectional",),
        "hidden_act": ("silu",),
        "weight_tying": (False,),  # in this family `tie_word_embeddings`
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
    """`config.json` as the forward reads it; raises as `Layout.read`, `windows_of` and `length_or_none`."""
    windows, given = windows_of({**config, "max_window_layers": 0}, used=True)
    # Where no token is named for padding, the end is: what stands there is never looked at.
    pad = value_of(config, "pad_token_id", value_of(config, "eos_token_id", _LAYOUT.tokens[1]))
    given, length = {**given, "block_size": None, "pad_token_id": pad}, length_or_none(config, "block_size")
    return ModelConfig(**_LAYOUT.read(given, sight="context", block_length=length, windows=windows))


class Nemotron(DiffusionModel):
    read_config = staticmethod(read_nemotron_config)
