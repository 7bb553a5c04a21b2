"""The SDAR families (arXiv 2510.06303), dense and with mixtures of experts: the layouts of Qwen3 and of Qwen3-MoE with
block-causal attention.

Heads and keys are normed head by head before they are rotated; no biases. A row predicts its own position. The
config.json of the released chat models lacks the length of blocks; that of training copies has it (`block_size`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiered.models.base import DiffusionModel
from tiered.models.config_fields import positive, switch, value_of
from tiered.models.layout import HEAD_NORMS, NAMES, Layout, ModelConfig
from tiered.models.mixture import MixtureConfig, MixtureModel
from tiered.models.router import Router, experts_of
from tiered.models.shape import ROUTER

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
_MOE_LAYOUT = replace(
    _LAYOUT,
    family="SDAR-MoE",
    names={**_LAYOUT.names, "blocks.experts": "mlp.experts", f"blocks.{ROUTER}": "mlp.gate.weight"},
    reads=frozenset({"num_experts"}),
)


def read_sdar_config(config: Mapping[str, object]) -> ModelConfig:
    return ModelConfig(**_read(_LAYOUT, config))


def read_sdar_moe_config(config: Mapping[str, object]) -> MixtureConfig:
    layers, every = positive(config, "num_hidden_layers"), positive(config, "decoder_sparse_step", 1)
    dense = value_of(config, "mlp_only_layers", [])
    if not isinstance(dense, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in dense):
        raise ValueError(f"config.json: mlp_only_layers = {dense!r}; a list of layers is allowed")
    dense = tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % every)
    experts = experts_of(config, dense=dense)
    normalised = switch(config, "norm_topk_prob")
    router = Router(score="softmax", picked=experts.picked, normalised=normalised).check(experts.count)
    return MixtureConfig(**_read(_MOE_LAYOUT, config, experts=experts), router=router)


def _read(layout: Layout, config: Mapping[str, object], **facts: Any) -> dict[str, Any]:
    windowed = switch(config, "use_sliding_window")
    facts |= {"sight": "blocks", "cuts_answers": False, "finishes_blocks": True}
    return layout.read_in_blocks(config, windowed=windowed, more=HEAD_NORMS, **facts)


class Sdar(DiffusionModel):
    read_config = staticmethod(read_sdar_config)


class SdarMoE(MixtureModel):
    read_config = staticmethod(read_sdar_moe_config)
