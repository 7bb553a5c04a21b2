"""Books: config.json of the dense LLaDA family (LLaDA-8B, LLaDA-1.5) with its official keys, as sizes and numbers."""

from collections.abc import Mapping

from tiered.models.config_fields import ModelConfig, common_fields, switch
from tiered.models.shape import MOST_LAYERS, ModelShape, checkpoint_dtype, positive, require

# What the released models use; another value changes the function computed, so it is refused rather than ignored.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "activation_type": ("silu",),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "bias_for_layer_norm": (False,),
    "block_group_size": (1,),
    "block_type": ("llama",),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "input_emb_norm": (False,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "rope": (True,),
    "rope_full_precision": (True,),
    "scale_logits": (False,),
    "tie_word_embeddings": (False,),  # in this family `weight_tying`
}


def llada_shape(config: Mapping[str, object]) -> ModelShape:
    """Sizes and weights of a LLaDA checkpoint.

    Raises:
        ValueError: a size is absent or impossible, or a switch asks for a variant that the forward does not have.
    """
    require(config, _ALLOWED, "LLaDA")
    width, heads = (positive(config, key) for key in ("d_model", "n_heads"))
    layers = positive(config, "n_layers", most=MOST_LAYERS)
    kv_heads = positive(config, "n_kv_heads", default=1 if switch(config, "multi_query_attention") else heads)
    if width % heads or (width // heads) % 2:
        raise ValueError(f"config.json: d_model = {width} must be an even multiple of n_heads = {heads}")
    if heads % kv_heads:
        raise ValueError(f"config.json: n_heads = {heads} must be a multiple of n_kv_heads = {kv_heads}")
    head_dim = width // heads
    # `mlp_ratio` is official too, and official code ignores it where `mlp_hidden_size` is set.
    mlp_width = positive(config, "mlp_hidden_size", default=positive(config, "mlp_ratio", default=4) * width)
    tokens = positive(config, "vocab_size")
    vocab_size = positive(config, "embedding_size", default=tokens)
    if vocab_size < tokens:
        raise ValueError(f"config.json: embedding_size = {vocab_size} must be at least vocab_size = {tokens}")
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
    if not switch(config, "weight_tying"):
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


def read_llada_config(config: Mapping[str, object]) -> ModelConfig:
    """`config.json` as the LLaDA forward reads it.

    Raises:
        ValueError: as `llada_shape` and `common_fields`.
    """
    fields = common_fields(config, llada_shape(config), head_tied=switch(config, "weight_tying"), norm_eps=1e-5)
    return ModelConfig(**fields)
