"""Books: config.json of the GIDD family (gidd-unif, gidd-mask) with its official keys, as sizes.

Multi-head attention with q/k norms over the full width and, with `attention_bias`, one learned key/value token per
layer; an MLP without a gate. Absent keys take the defaults of the official `GiddConfig`.
"""

from collections.abc import Mapping

from tiered.models.shape import ModelShape, checkpoint_dtype, positive, require

_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "is_causal": (False,),
    "rope_scaling": (None,),
}


def _noise(config: Mapping[str, object]) -> str:
    """Noise behind `noise_type`, a shift of the log-SNR: far above 0 for uniform noise, far below for mask."""
    shift = config.get("noise_type", 0.0)
    if isinstance(shift, bool) or not isinstance(shift, int | float):
        raise ValueError(f"config.json: noise_type = {shift!r}; a number is allowed, above 0 for uniform noise")
    return "uniform" if shift > 0 else "mask"


def gidd_shape(config: Mapping[str, object]) -> ModelShape:
    """Sizes and weights of a GIDD checkpoint.

    Raises:
        ValueError: a size is absent or impossible, or a switch asks for a variant that the family does not have.
    """
    require(config, _ALLOWED, "GIDD")
    width, layers, heads, mlp_width, vocab_size = (
        positive(config, key)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    # `max` only so that a width below the number of heads reaches the check, which names both.
    head_dim = positive(config, "head_dim", default=max(width // heads, 1))
    if head_dim * heads != width or head_dim % 2:
        raise ValueError(
            f"config.json: hidden_size = {width} must be num_attention_heads = {heads} times an even head_dim, "
            f"not {head_dim}"
        )
    block = {
        "attn_layernorm.weight": (width,),
        **{f"self_attn.{name}_proj.weight": (width, width) for name in "qkvo"},
        "mlp_layernorm.weight": (width,),
        "mlp.up_proj.weight": (mlp_width, width),
        "mlp.down_proj.weight": (width, mlp_width),
    }
    if config.get("use_qk_norm", True):
        block |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    if config.get("attention_bias", False):
        block |= {"self_attn.k_bias": (heads, head_dim), "self_attn.v_bias": (heads, head_dim)}
    if config.get("mlp_bias", False):
        block |= {"mlp.up_proj.bias": (mlp_width,), "mlp.down_proj.bias": (width,)}
    weights = {
        "model.embed_tokens.weight": (vocab_size, width),
        **{f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()},
        "model.norm.weight": (width,),
    }
    if not config.get("tie_word_embeddings", False):
        weights["lm_head.weight"] = (vocab_size, width)
    return ModelShape(
        family="gidd",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        mlp_matrices=1,
        vocab_size=vocab_size,
        max_context=positive(config, "max_position_embeddings"),
        dtype=checkpoint_dtype(config),
        noise=_noise(config),
        weight_shapes=weights,
    )
