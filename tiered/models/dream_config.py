"""Books: config.json of the Dream family (Dream-v0, Dream-Coder, DiffuCoder) with its official keys, as sizes and
numbers.

The layout is Qwen2.5's: grouped-query attention with biases on q, k and v alone, a gated MLP, and Qwen2's tensor names.
"""

from collections.abc import Mapping

from tiered.models.config_fields import ModelConfig, common_fields, switch
from tiered.models.shape import MOST_LAYERS, ModelShape, checkpoint_dtype, positive, require

# What the released models use; another value changes the function computed, so it is refused rather than ignored.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (True,),
    "hidden_act": ("silu",),
    "weight_tying": (False,),  # in this family `tie_word_embeddings`
}


def dream_shape(config: Mapping[str, object]) -> ModelShape:
    """Sizes and weights of a Dream checkpoint.

    Raises:
        ValueError: a size is absent or impossible, or a switch asks for a variant that the family does not have.
    """
    # As in Qwen2, a window's width means nothing while `use_sliding_window` is off.
    require({**config, "sliding_window": None}, _ALLOWED, "Dream")
    width, heads, mlp_width, vocab_size = (
        positive(config, key) for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    if width % heads or (width // heads) % 2:
        raise ValueError(
            f"config.json: hidden_size = {width} must be an even multiple of num_attention_heads = {heads}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        )
    head_dim = width // heads
    kv_width = kv_heads * head_dim
    block = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (kv_width, width),
        "self_attn.k_proj.bias": (kv_width,),
        "self_attn.v_proj.weight": (kv_width, width),
        "self_attn.v_proj.bias": (kv_width,),
        "self_attn.o_proj.weight": (width, width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp_width, width),
        "mlp.up_proj.weight": (mlp_width, width),
        "mlp.down_proj.weight": (width, mlp_width),
    }
    weights = {
        "model.embed_tokens.weight": (vocab_size, width),
        **{f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()},
        "model.norm.weight": (width,),
    }
    if not switch(config, "tie_word_embeddings"):
        weights["lm_head.weight"] = (vocab_size, width)
    return ModelShape(
        family="dream",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        mlp_matrices=2,
        vocab_size=vocab_size,
        max_context=positive(config, "max_position_embeddings"),
        dtype=checkpoint_dtype(config),
        prediction_shift=1,
        weight_shapes=weights,
    )


def read_dream_config(config: Mapping[str, object]) -> ModelConfig:
    """`config.json` as the Dream forward reads it.

    Raises:
        ValueError: as `dream_shape` and `common_fields`.
    """
    fields = common_fields(config, dream_shape(config), head_tied=switch(config, "tie_word_embeddings"), norm_eps=1e-6)
    return ModelConfig(**fields)
