"""The weights of a LLaDA in transformers' `LlamaForCausalLM`, asked without its causal mask.

LLaDA is Llama's architecture in which every row attends to every row. With `is_causal=False` in the call of a model,
transformers changes both its mask and the flag of the attention kernel. A version that takes the argument and goes on
masking would answer badly and fast, so `llama_of` checks it first.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from tiered.models.llada import LLaDA

# Names of a layer's weights: LLaDA's, then Llama's.
_LAYER = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_OUTSIDE = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}


def llama_of(model: object) -> LlamaForCausalLM:
    """`model`'s weights, the same tensors, as a Llama that sees ahead.

    Raises:
        ValueError: `model` is no LLaDA.
        RuntimeError: this version of transformers masks columns ahead all the same.
    """
    if not isinstance(model, LLaDA):
        raise ValueError(f"transformers has no {type(model).__name__}: its Llama computes what LLaDA does alone")
    shape, config = model.shape, model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.mlp_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.max_context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rotation.theta},
            tie_word_embeddings=config.head_tied,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    weights = {_llama_name(name): parameter for name, parameter in model.named_parameters()}
    if config.head_tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    llama.load_state_dict(weights, assign=True)
    # The weights are on their device already; tensors that Llama computes from its config (RoPE) follow.
    llama.model.rotary_emb.to(device=model.wte.weight.device)
    llama.requires_grad_(False).eval()
    if not sees_ahead(llama):
        raise RuntimeError("LlamaForCausalLM masks what is ahead even with is_causal=False; it is no baseline here")
    return llama


def forward(
    llama: LlamaForCausalLM,
    ids: Tensor,
    *,
    mask: Tensor | None,
    positions: Tensor,
    output: Tensor,
    cache: Cache | None = None,
    **options: Any,
) -> Tensor:
    """Logits [batch, outputs, vocab] of a bidirectional pass, in the model's dtype.

    Args:
        ids: [batch, rows], behind the columns of `cache`.
        mask: [batch, columns], 0 at padding, cached columns first; None for no padding.
        positions: [batch or 1, rows] of RoPE.
        output: [outputs], the rows whose logits are wanted.
        cache: grows by the rows' keys and values; None to keep nothing.
        **options: arguments of the model that replace those passed here.
    """
    given: dict[str, Any] = {"is_causal": False, "use_cache": cache is not None, "past_key_values": cache}
    out = llama(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=output, **(given | options))
    return out.logits


@torch.no_grad()
def sees_ahead(llama: LlamaForCausalLM, **options: Any) -> bool:
    """True if another last token changes the first row's logits; `options` as in `forward`."""
    device = llama.lm_head.weight.device
    ids, positions = torch.tensor([[0, 1, 1], [0, 1, 2]], device=device), torch.arange(3, device=device)[None]
    first = forward(llama, ids, mask=None, positions=positions, output=positions[0, :1], **options)
    return not torch.equal(first[0], first[1])


def _llama_name(name: str) -> str:
    """`blocks.3.q_proj.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    first, *rest = name.split(".")
    if first == "blocks":
        return f"model.layers.{rest[0]}.{_LAYER[rest[1]]}.{rest[2]}"
    return ".".join([_OUTSIDE[first], *rest])
