"""Tiny models whose rows see blocks, prompts for them, and transformers' Ministral 3 of the same weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.ministral3 import Ministral3Config, Ministral3ForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
SDAR: dict[str, Any] = {
    **SIZES,
    "model_type": "sdar",
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
    "mask_token_id": 127,
    "eos_token_id": 126,
    "pad_token_id": 125,
}
# Queries grow from position 8 on, and the rotation is stretched.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
NEMOTRON: dict[str, Any] = {
    **SIZES,
    "model_type": "nemotron_labs_diffusion",
    "rope_parameters": ROPE,
    "sliding_window": None,
    "block_size": 4,
    "dlm_paradigm": "bidirectional",
    "bos_token_id": 1,
}
LENGTHS = (29, 9, 18, 4)


def ministral3(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Ministral3ForCausalLM:
    """transformers' model of a Nemotron-Labs checkpoint; what its rows see is up to the mask."""
    given: dict[str, Any] = {name: config[name] for name in (*SIZES, "rope_parameters", "sliding_window")}
    given["attn_implementation"] = "eager"
    model = Ministral3ForCausalLM(Ministral3Config(**given)).eval()
    names = {name: name.replace("encoder.", "model.").replace("diffusion_head", "lm_head") for name in weights}
    model.load_state_dict({names[name]: weight for name, weight in weights.items()})
    return model


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 5) -> list[Tensor]:
    """One of each length, of tokens that are special in none of these models."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 99, (length,), generator=generator) for length in lengths]


def prompt(length: int = LENGTHS[0]) -> Tensor:
    """One alone, [1, length]."""
    return prompts((length,))[0][None]


def batch(lengths: Sequence[int] = LENGTHS, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Their padded token ids and attention mask."""
    rows, side = prompts(lengths), "left" if left else "right"
    ids = pad_sequence(rows, batch_first=True, padding_value=3, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
