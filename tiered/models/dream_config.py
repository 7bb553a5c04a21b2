"""Books: config.json of the Dream family (Dream-v0, Dream-Coder, DiffuCoder) with its official keys, as sizes and
numbers.

The layout is Qwen2.5's: grouped-query attention with biases on q, k and v alone, a gated MLP, and Qwen2's tensor names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tiered.models.config_fields import positive_number, token_id
from tiered.models.shape import ModelShape, checkpoint_dtype, positive, require

# What the released models use; another value changes the function computed, so it is refused rather than ignored.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (True,),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamConfig:
    """What the Dream forward needs beside the sizes.

    `head_tied`: the language-model head is the embedding (`tie_word_embeddings`).
    """

    shape: ModelShape
    rope_theta: float
    norm_eps: float
    head_tied: bool
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int


def dream_shape(config: Mapping[str, object]) -> ModelShape:
    """Sizes and weights of a Dream checkpoint.

    Raises:
        ValueError: a size is absent or impossible, or a switch asks for a variant that the family does not have.
    """
    require(config, _ALLOWED, "Dream")
    width, layers, heads, mlp_width, vocab_size = (
        positive(config, key)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    )
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
    if not config.get("tie_word_embeddings", False):
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


def read_dream_config(config: Mapping[str, object]) -> DreamConfig:
    """`config.json` as the Dream forward reads it.

    Raises:
        ValueError: as `dream_shape`; also a token id outside the vocabulary.
    """
    shape = dream_shape(config)
    return DreamConfig(
        shape=shape,
        rope_theta=positive_number(config, "rope_theta", 10000.0),
        norm_eps=positive_number(config, "rms_norm_eps", 1e-6),
        head_tied=bool(config.get("tie_word_embeddings", False)),
        mask_token_id=token_id(config, "mask_token_id", shape.vocab_size),
        eos_token_id=token_id(config, "eos_token_id", shape.vocab_size),
        pad_token_id=token_id(config, "pad_token_id", shape.vocab_size),
    )
