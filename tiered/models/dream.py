"""The Dream family (arXiv 2508.15487): Dream-v0, Dream-Coder and DiffuCoder, in the layout of Qwen2.

A row predicts the token behind its own position (`ModelShape.prediction_shift`); logits here are row by row, unshifted.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tiered.models.base import DiffusionModel
from tiered.models.config_fields import ModelConfig
from tiered.models.dream_config import read_dream_config
from tiered.models.projection import project
from tiered.models.rms_norm import RMSNorm
from tiered.models.rope import Rotary

_OFFICIAL_PREFIX = "model."


class DreamAttention(nn.Module):
    """The projections of one layer's attention, under their official names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.shape
        self.q_proj = nn.Linear(shape.width, shape.width)
        self.k_proj = nn.Linear(shape.width, shape.kv_width)
        self.v_proj = nn.Linear(shape.width, shape.kv_width)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)


class DreamMLP(nn.Module):
    """The projections of one layer's MLP, under their official names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.shape
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)


class DreamLayer(nn.Module):
    """The weights of one layer, under their official names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.shape.width, config.norm_eps)
        self.self_attn = DreamAttention(config)
        self.post_attention_layernorm = RMSNorm(config.shape.width, config.norm_eps)
        self.mlp = DreamMLP(config)


class Dream(DiffusionModel):
    """See `DiffusionModel`. Construct it under `torch.device("meta")` to take no memory before the weights arrive."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = config.shape
        self.mask_token_id = config.mask_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(DreamLayer(config) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, config.norm_eps)
        if not config.head_tied:
            self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.requires_grad_(False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Dream":
        return cls(read_dream_config(config))

    def parameter_name(self, official: str) -> str:
        return official.removeprefix(_OFFICIAL_PREFIX)

    def layer(self, layer: int) -> DreamLayer:
        """The weights of `layer`."""
        weights = self.layers[layer]
        assert isinstance(weights, DreamLayer)
        return weights

    def rotary(self, positions: Int[Tensor, "batch length"]) -> Rotary:
        return Rotary.of(positions, self.shape.head_dim, self.config.rope_theta)

    def embed(self, ids: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch rows width"]:
        return self.embed_tokens(ids)

    def attention_norm(
        self, layer: int, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        return self.layer(layer).input_layernorm(hidden)

    def keys(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        return rotary.rotate(self._heads(normed, self.layer(layer).self_attn.k_proj))

    def values(
        self, layer: int, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        return self._heads(normed, self.layer(layer).self_attn.v_proj)

    def queries(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        return rotary.rotate(self._heads(normed, self.layer(layer).self_attn.q_proj))

    def attention_out(
        self, layer: int, mixed: Float[Tensor, "batch rows heads_width"]
    ) -> Float[Tensor, "batch rows width"]:
        return project(mixed, self.layer(layer).self_attn.o_proj.weight)

    def feed_forward(self, layer: int, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows width"]:
        weights = self.layer(layer)
        normed, mlp = weights.post_attention_layernorm(hidden), weights.mlp
        gated = F.silu(project(normed, mlp.gate_proj.weight)) * project(normed, mlp.up_proj.weight)
        return project(gated, mlp.down_proj.weight)

    def logits(self, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows vocab"]:
        head = self.embed_tokens.weight if self.config.head_tied else self.lm_head.weight
        return project(self.norm(hidden), head).float()

    def _heads(
        self, normed: Float[Tensor, "batch rows width"], projection: nn.Linear
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        """`projection` of the rows with its bias, head by head."""
        # In place: the projection is as large as the result, and nobody else holds it.
        projected = project(normed, projection.weight).add_(projection.bias)
        return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
