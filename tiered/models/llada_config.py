"""Books: config.json of the dense LLaDA family (LLaDA-8B, LLaDA-1.5) with its official keys, as sizes and numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from tiered.models.config_fields import positive_number, token_id
from tiered.models.shape import ModelShape, checkpoint_dtype, positive, require

# What the released models use; another value changes the function computed, so it is refused rather than ignored.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "activation_type": ("silu",),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "bias_for_layer_norm": (False, None),
    "block_group_size": (1,),
    "block_type": ("llama",),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "input_emb_norm": (False,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "rope": (True,),
    "rope_full_precision": (True,),
    "scale_logits": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LLaDAConfig:
    """What the LLaDA forward needs beside the sizes.

    `head_tied`: the language-model head is the embedding (`weight_tying`).
    """

    shape: ModelShape
    rope_theta: float
    norm_eps: float
    head_tied: bool
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int


def llada_shape(config: Mapping[str, object]) -> ModelShape:
    """Sizes and weights of a LLaDA checkpoint.

    Raises:
        ValueError: a size is absent or impossible, or a switch asks for a variant that the forward does not have.
    """
    require(config, _ALLOWED, "LLaDA")
    width, layers, heads = (positive(config, key) for key in ("d_model", "n_layers", "n_heads"))
    kv_heads = positive(config, "n_kv_heads", default=1 if config.get("multi_query_attention") else heads)
    if width % heads or (width // heads) % 2:
        raise ValueError(f"config.json: d_model = {width} must be an even multiple of n_heads = {heads}")
    if heads % kv_heads:
        raise ValueError(f"config.json: n_heads = {heads} must be a multiple of n_kv_heads = {kv_heads}")
    head_dim = width // heads
    # `mlp_ratio` is official too, and official code ignores it where `mlp_hidden_size` is set.
    mlp_width = positive(config, "mlp_hidden_size", default=positive(config, "mlp_ratio", default=4) * width)
    vocab_size = positive(config, "embedding_size", default=positive(config, "vocab_size"))
    kv_width = kv_heads * head_dim
    block = {
        "attn_norm": (width,),
        "q_proj": (width, width),
        "k_proj": (kv_width, width),
        "v_proj": (kv_width, width),
        "attn_out": (width, width),
        "ff_norm": (width,),
        "ff_proj": (mlp_width, width),
        "up_proj": (mlp_width, width),
        "ff_out": (width, mlp_width),
    }
    weights = {
        "model.transformer.wte.weight": (vocab_size, width),
        **{
            f"model.transformer.blocks.{layer}.{name}.weight": shape
            for layer in range(layers)
            for name, shape in block.items()
        },
        "model.transformer.ln_f.weight": (width,),
    }
    if not config.get("weight_tying", False):
        weights["model.transformer.ff_out.weight"] = (vocab_size, width)
    return ModelShape(
        family="llada",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=mlp_width,
        mlp_matrices=2,
        vocab_size=vocab_size,
        max_context=positive(config, "max_sequence_length"),
        dtype=checkpoint_dtype(config),
        weight_shapes=weights,
    )


def read_llada_config(config: Mapping[str, object]) -> LLaDAConfig:
    """`config.json` as the LLaDA forward reads it.

    Raises:
        ValueError: as `llada_shape`; also a token id outside the vocabulary.
    """
    shape = llada_shape(config)
    return LLaDAConfig(
        shape=shape,
        rope_theta=positive_number(config, "rope_theta", 10000.0),
        norm_eps=positive_number(config, "rms_norm_eps", 1e-5),
        head_tied=bool(config.get("weight_tying", False)),
        mask_token_id=token_id(config, "mask_token_id", shape.vocab_size),
        eos_token_id=token_id(config, "eos_token_id", shape.vocab_size),
        pad_token_id=token_id(config, "pad_token_id", shape.vocab_size),
    )
