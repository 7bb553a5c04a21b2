"""The LLaDA-MoE family: LLaDA with mixtures of experts; rows attend to the whole canvas.

Heads and keys are normed head by head before they are rotated. A router's weights are the unnormalised probabilities of
the experts that it picks; a bias, if any, counts for the choice and stays in the weights.
"""

from collections.abc import Mapping

from tiered.models.config_fields import length_or_none, positive, switch
from tiered.models.layout import HEAD_NORMS, NAMES, Layout
from tiered.models.mixture import MixtureConfig, MixtureModel
from tiered.models.router import Router, experts_of
from tiered.models.shape import ROUTER, ROUTER_BIAS

_LAYOUT = Layout(
    family="LLaDA-MoE",
    allowed={
        "hidden_act": ("silu",),
        "moe_router_score_function": ("softmax",),
        "qk_layernorm": (True,),
        "routed_scaling_factor": (1,),
        "router_num_group": (),
        "router_topk_group": (),
    },
    names={
        **NAMES,
        "blocks.q_norm": "self_attn.q_norm",
        "blocks.k_norm": "self_attn.k_norm",
        "blocks.experts": "mlp.experts",
        f"blocks.{ROUTER}": "mlp.gate.weight",
        f"blocks.{ROUTER_BIAS}": "mlp.expert_bias",
        "blocks.shared_proj": "shared_expert.gate_proj",
        "blocks.shared_up": "shared_expert.up_proj",
        "blocks.shared_out": "shared_expert.down_proj",
    },
    reads=frozenset({"num_experts", "partial_rotary_factor"}),
    norm_eps=1e-5,
    heads_fill_width=False,
    tokens=(156895, 156892, 156892),
)


def read_llada_moe_config(config: Mapping[str, object]) -> MixtureConfig:
    layers = positive(config, "num_hidden_layers")
    kinds = config.get("moe_layer_freq") or [1] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (0, 1) for kind in kinds):
        raise ValueError(f"config.json: moe_layer_freq = {kinds!r}; 0 or 1 for each of {layers} layers is allowed")
    experts = experts_of(
        config,
        width="expert_intermediate_size",
        shared_width=length_or_none(config, "shared_expert_intermediate_size") or 0,
        biased=switch(config, "moe_router_enable_expert_bias"),
        dense=tuple(layer for layer, kind in enumerate(kinds) if not kind),
    )
    # The MLP of a layer without a mixture, or the shared expert of every row.
    width = config.get("dense_intermediate_size") if experts.dense else experts.shared_width or experts.width
    return MixtureConfig(
        **_LAYOUT.read(
            {**config, "intermediate_size": width},
            more=HEAD_NORMS,
            experts=experts,
        ),
        router=Router(score="softmax", picked=experts.picked, weighs_bias=True).check(experts.count),
    )


class LLaDAMoE(MixtureModel):
    read_config = staticmethod(read_llada_moe_config)
