"""The dense LLaDA family (arXiv 2502.09992): LLaDA-8B and LLaDA-1.5, multi-head or grouped-query attention."""

from collections.abc import Mapping

from tiered.models.base import DiffusionModel
from tiered.models.config_fields import positive, switch
from tiered.models.layout import IN_BLOCK, KEYS, Layout, ModelConfig

_LAYOUT = Layout(
    family="LLaDA",
    allowed={
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
    },
    keys={
        **KEYS,
        "width": "d_model",
        "layers": "n_layers",
        "heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "mlp_width": "mlp_hidden_size",
        "vocab_size": "embedding_size",
        "max_context": "max_sequence_length",
        "head_tied": "weight_tying",
    },
    names={name: f"model.transformer.{name}" for name in ("wte", "blocks", "ln_f", "ff_out")}
    | {f"blocks.{name}": name for name in IN_BLOCK},
    norm_eps=1e-5,
)


def read_llada_config(config: Mapping[str, object]) -> ModelConfig:
    # `mlp_ratio` is official too; official code ignores it if `mlp_hidden_size` is set.
    defaults = {"mlp_width": positive(config, "mlp_ratio", 4) * positive(config, "d_model")}
    defaults["vocab_size"] = tokens = positive(config, "vocab_size")
    if config.get("multi_query_attention") is not None:
        # In the official code it sets the number of key heads unless `n_kv_heads` does; otherwise both must agree.
        defaults["kv_heads"] = heads = 1 if switch(config, "multi_query_attention") else positive(config, "n_heads")
        if positive(config, "n_kv_heads", heads) != heads:
            raise ValueError(
                f"config.json: multi_query_attention = {config['multi_query_attention']} means n_kv_heads = {heads}, "
                f"not {config['n_kv_heads']}"
            )
    read = ModelConfig(**_LAYOUT.read(config, defaults=defaults, tokens=tokens))
    if read.shape.vocab_size < tokens:
        raise ValueError(
            f"config.json: embedding_size = {read.shape.vocab_size} must be at least vocab_size = {tokens}"
        )
    return read


class LLaDA(DiffusionModel):
    read_config = staticmethod(read_llada_config)
