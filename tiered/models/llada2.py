"""The LLaDA2 family (LLaDA2.0 and LLaDA2.1): mixtures of experts with block-causal attention.

One matrix projects to queries, keys and values. Heads and keys are normed head by head, and a part of each is rotated.
A router sums the two best experts of each group, keeps the best groups, and picks in them; its bias only counts for the
choice. Block routing (LLaDA2.2) is refused, because no copy of its code was at hand.
"""

from collections.abc import Mapping

from tiered.models.base import Projection
from tiered.models.config_fields import count, number_in, positive, switch
from tiered.models.layout import HEAD_NORMS, IN_BLOCK, NAMES, Layout
from tiered.models.mixture import MixtureConfig, MixtureModel
from tiered.models.rotation import part_outside
from tiered.models.router import Router, experts_of
from tiered.models.shape import ROUTER, ROUTER_BIAS

_LAYOUT = Layout(
    family="LLaDA2",
    allowed={
        "expert_capacity": (),
        "hidden_act": ("silu",),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "score_function": ("sigmoid",),
        "use_bias": (False,),
        "use_qk_norm": (True,),
        "use_qkv_bias": (False,),
        "use_rmsnorm": (True,),
        "using_split_qkv_in_self_attention": (False,),
    },
    names={
        **NAMES,
        "wte": "model.word_embeddings",
        "blocks.qkv_proj": "attention.query_key_value",
        "blocks.q_norm": "attention.query_layernorm",
        "blocks.k_norm": "attention.key_layernorm",
        "blocks.attn_out": "attention.dense",
        "blocks.experts": "mlp.experts",
        f"blocks.{ROUTER}": "mlp.gate.weight",
        f"blocks.{ROUTER_BIAS}": "mlp.gate.expert_bias",
        "blocks.shared_proj": "mlp.shared_experts.gate_proj",
        "blocks.shared_up": "mlp.shared_experts.up_proj",
        "blocks.shared_out": "mlp.shared_experts.down_proj",
    },
    in_block={"qkv_proj": ("qkv_width", "width")}
    | {name: dims for name, dims in IN_BLOCK.items() if name not in ("q_proj", "k_proj", "v_proj")},
    reads=frozenset({"num_experts", "partial_rotary_factor"}),
    heads_fill_width=False,
    tokens=(156895, 156892, None),
)
_NEEDED = ("n_group", "topk_group", "num_shared_experts", "first_k_dense_replace", "routed_scaling_factor")
_NEEDED += ("partial_rotary_factor",)


def read_llada2_config(config: Mapping[str, object]) -> MixtureConfig:
    config = part_outside(config)
    # Required, because the defaults of other families are wrong for these keys.
    if lacking := [key for key in _NEEDED if config.get(key) is None]:
        raise ValueError(f"config.json lacks {lacking[0]!r}, which this model family needs")
    experts = experts_of(
        config,
        shared_width=count(config, "num_shared_experts") * positive(config, "moe_intermediate_size"),
        biased=switch(config, "moe_router_enable_expert_bias", True),
        dense=tuple(range(count(config, "first_k_dense_replace"))),
    )
    router = Router(
        score="sigmoid",
        picked=experts.picked,
        groups=positive(config, "n_group"),
        kept_groups=positive(config, "topk_group"),
        normalised=switch(config, "norm_topk_prob", True) and experts.picked > 1,
        scale=number_in(config, "routed_scaling_factor", 1.0),
    )
    return MixtureConfig(
        **_LAYOUT.read_in_blocks(
            config,
            windowed=switch(config, "use_sliding_window"),
            more=HEAD_NORMS,
            sight="blocks",
            finishes_blocks=True,
            experts=experts,
        ),
        router=router.check(experts.count),
    )


class LLaDA2(MixtureModel):
    read_config = staticmethod(read_llada2_config)

    def _projection(self, layer: int, name: str) -> Projection:
        queries, keys = self.shape.heads_width, self.shape.kv_width
        first = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[name]
        rows = slice(first, first + (queries if name == "q_proj" else keys))
        return Projection(self.blocks[layer].qkv_proj.weight[rows])
