"""Books: config.json of the GIDD family (gidd-unif, gidd-mask) with its official keys, as sizes and numbers.

Multi-head attention with q/k norms over the full width and, with `attention_bias`, one learned key/value token per
layer; an MLP without a gate. Absent keys take the defaults of the official `GiddConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tiered.models.config_fields import ModelConfig, common_fields, finite_number, positive_number, switch
from tiered.models.noise import MOST_LOG_SNR, Noise
from tiered.models.shape import MOST_LAYERS, ModelShape, checkpoint_dtype, positive, require

_SCALINGS = ("fan_in", "fan_out")
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "use_qk_norm": (False, True),
    "weight_tying": (False,),  # in this family `tie_word_embeddings`
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GiddConfig(ModelConfig):
    """What the GIDD forward needs beside the sizes and what every forward needs.

    Attributes:
        qk_norm: whether queries and keys are normed over the full width.
        mlp_bias: whether the MLP has biases.
        residual_scale: of all branches together: each is scaled by it over the number of layers.
        weight_scale: what every projection is multiplied by: a number, or "fan_in" or "fan_out", to the power of −½.
        head_scale: what logits are multiplied by.
        noise: the process that the model was trained on.
    """

    qk_norm: bool
    mlp_bias: bool
    residual_scale: float
    weight_scale: float | str
    head_scale: float
    noise: Noise


def _noise_type(config: Mapping[str, object]) -> float:
    """A shift of the log-SNR: far above 0 for uniform noise, far below for mask."""
    return finite_number(config, "noise_type", 0.0)


def gidd_shape(config: Mapping[str, object]) -> ModelShape:
    """Sizes and weights of a GIDD checkpoint.

    Raises:
        ValueError: a size is absent or impossible, or a switch asks for a variant that the family does not have.
    """
    require(config, _ALLOWED, "GIDD")
    width, heads, mlp_width, vocab_size = (
        positive(config, key) for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
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
    if switch(config, "use_qk_norm", True):
        block |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    if switch(config, "attention_bias"):
        block |= {"self_attn.k_bias": (heads, head_dim), "self_attn.v_bias": (heads, head_dim)}
    if switch(config, "mlp_bias"):
        block |= {"mlp.up_proj.bias": (mlp_width,), "mlp.down_proj.bias": (width,)}
    weights = {
        "model.embed_tokens.weight": (vocab_size, width),
        **{f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()},
        "model.norm.weight": (width,),
    }
    if not switch(config, "tie_word_embeddings"):
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
        noise="uniform" if _noise_type(config) > 0 else "mask",
        noise_masked=True,
        soft_cap=positive_number(config, "attn_soft_cap", 30.0),
        sink_tokens=int(switch(config, "attention_bias")),
        weight_shapes=weights,
    )


def read_gidd_config(config: Mapping[str, object]) -> GiddConfig:
    """`config.json` as the GIDD forward reads it.

    Raises:
        ValueError: as `gidd_shape` and `common_fields`; also another number out of range.
    """
    shape = gidd_shape(config)
    scale = config.get("weight_scaling", "fan_in")
    if scale not in _SCALINGS:
        scale = positive_number(config, "weight_scaling", 1.0)
    low, high = (
        finite_number(config, key, default, most=MOST_LOG_SNR)
        for key, default in (("min_log_snr", -9.0), ("max_log_snr", 9.0))
    )
    if not low < high:
        raise ValueError(f"config.json: min_log_snr = {low} must be below max_log_snr = {high}")
    head_tied = switch(config, "tie_word_embeddings")
    fields = common_fields(config, shape, head_tied=head_tied, norm_eps=1e-6, tokens=(3, 1, 2))
    return GiddConfig(
        **fields,
        qk_norm=switch(config, "use_qk_norm", True),
        mlp_bias=switch(config, "mlp_bias"),
        residual_scale=positive_number(config, "resid_scale", 4.0),
        weight_scale=scale if isinstance(scale, str) else float(scale),
        head_scale=positive_number(config, "head_scaling", 1.0),
        noise=Noise(
            shift=_noise_type(config),
            min_log_snr=low,
            max_log_snr=high,
            vocab_size=shape.vocab_size,
            mask_token_id=fields["mask_token_id"],
        ),
    )
