"""The GIDD family (arXiv 2503.04482; gidd-unif and gidd-mask, 3B and 10B): uniform, mask or mixed noise.

Beside LLaDA's layer: soft-capped scores, a learned key and value that every row attends to, final tokens that see
final tokens alone, q/k norms over the full width, an MLP of squared ReLU, and scaled branches and head.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tiered.kernels.capped_attention_ref import capped_attention
from tiered.kernels.choice import for_device
from tiered.models.base import DiffusionModel
from tiered.models.gidd_config import GiddConfig, read_gidd_config
from tiered.models.projection import project
from tiered.models.rope import Rotary

_OFFICIAL_PREFIX = "model."


class ZeroCentredNorm(nn.Module):
    """Root-mean-square norm in float32, scaled by 1 + weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        normed = F.rms_norm(hidden.float(), self.weight.shape, eps=self.eps)
        return ((1 + self.weight.float()) * normed).to(hidden.dtype)


class _SelfAttention(nn.Module):
    def __init__(self, config: GiddConfig) -> None:
        super().__init__()
        shape = config.shape
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        if config.qk_norm:
            self.q_norm = ZeroCentredNorm(shape.width, config.norm_eps)
            self.k_norm = ZeroCentredNorm(shape.width, config.norm_eps)
        if shape.sink_tokens:
            self.k_bias = nn.Parameter(torch.zeros(shape.heads, shape.head_dim))
            self.v_bias = nn.Parameter(torch.zeros(shape.heads, shape.head_dim))


class _MLP(nn.Module):
    def __init__(self, config: GiddConfig) -> None:
        super().__init__()
        shape = config.shape
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=config.mlp_bias)


class GiddLayer(nn.Module):
    """The weights of one layer, under their official names."""

    def __init__(self, config: GiddConfig) -> None:
        super().__init__()
        self.attn_layernorm = ZeroCentredNorm(config.shape.width, config.norm_eps)
        self.self_attn = _SelfAttention(config)
        self.mlp_layernorm = ZeroCentredNorm(config.shape.width, config.norm_eps)
        self.mlp = _MLP(config)


class Gidd(DiffusionModel):
    """See `DiffusionModel`. Construct it under `torch.device("meta")` to take no memory before the weights arrive."""

    def __init__(self, config: GiddConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = config.shape
        self.noise = config.noise
        self.mask_token_id = config.mask_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(GiddLayer(config) for _ in range(shape.layers))
        self.norm = ZeroCentredNorm(shape.width, config.norm_eps)
        if not config.head_tied:
            self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self._branch_scale = config.residual_scale / shape.layers
        self.requires_grad_(False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Gidd":
        return cls(read_gidd_config(config))

    def parameter_name(self, official: str) -> str:
        return official.removeprefix(_OFFICIAL_PREFIX)

    def layer(self, layer: int) -> GiddLayer:
        """The weights of `layer`."""
        weights = self.layers[layer]
        assert isinstance(weights, GiddLayer)
        return weights

    def rotary(self, positions: Int[Tensor, "batch length"]) -> Rotary:
        return Rotary.of(positions, self.shape.head_dim, self.config.rope_theta)

    def embed(self, ids: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch rows width"]:
        return self.embed_tokens(ids)

    def attention_norm(
        self, layer: int, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        return self.layer(layer).attn_layernorm(hidden)

    def keys(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        attention = self.layer(layer).self_attn
        keys = self._scaled(normed, attention.k_proj.weight)
        return rotary.rotate(self._heads(attention.k_norm(keys) if self.config.qk_norm else keys))

    def values(
        self, layer: int, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        return self._heads(self._scaled(normed, self.layer(layer).self_attn.v_proj.weight))

    def queries(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        attention = self.layer(layer).self_attn
        queries = self._scaled(normed, attention.q_proj.weight)
        return rotary.rotate(self._heads(attention.q_norm(queries) if self.config.qk_norm else queries))

    def sinks(self, layer: int) -> tuple[Float[Tensor, "heads sinks head_dim"], Float[Tensor, "heads sinks head_dim"]]:
        """Keys and values, not rotated, that every row attends to beside those of the canvas."""
        attention = self.layer(layer).self_attn
        if self.shape.sink_tokens:
            return attention.k_bias[:, None], attention.v_bias[:, None]
        none = attention.k_proj.weight.new_empty(self.shape.heads, 0, self.shape.head_dim)
        return none, none

    def sink_keys(self, layer: int) -> Float[Tensor, "heads sinks head_dim"] | None:
        return self.sinks(layer)[0] if self.shape.sink_tokens else None

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "batch heads rows head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        values: Float[Tensor, "batch kv_heads length head_dim"],
        key_mask: Bool[Tensor, "batch 1 1 length"] | None,
        visible: Int[Tensor, "batch rows"] | None = None,
    ) -> Float[Tensor, "batch rows heads_width"]:
        sink_keys, sink_values = self.sinks(layer)
        assert self.shape.soft_cap is not None, "the config reader takes no other models"
        mixed = for_device(capped_attention, queries.device)(
            queries,
            keys,
            values,
            soft_cap=self.shape.soft_cap,
            sink_keys=sink_keys,
            sink_values=sink_values,
            key_mask=None if key_mask is None else key_mask[:, 0, 0],
            visible=visible,
        )
        return mixed.transpose(1, 2).flatten(2)

    def attention_out(
        self, layer: int, mixed: Float[Tensor, "batch rows heads_width"]
    ) -> Float[Tensor, "batch rows width"]:
        return self._scaled(mixed, self.layer(layer).self_attn.o_proj.weight) * self._branch_scale

    def feed_forward(self, layer: int, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows width"]:
        weights = self.layer(layer)
        up, down = weights.mlp.up_proj, weights.mlp.down_proj
        inner = self._scaled(weights.mlp_layernorm(hidden), up.weight)
        # In place as far as gradients allow: nothing of a layer is larger.
        inner = (inner if up.bias is None else inner.add_(up.bias)).relu_().square()
        branch = self._scaled(inner, down.weight)
        return (branch if down.bias is None else branch + down.bias) * self._branch_scale

    def logits(self, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows vocab"]:
        head = self.embed_tokens.weight if self.config.head_tied else self.lm_head.weight
        # In place: a step holds nothing larger.
        return project(self.norm(hidden), head).float().mul_(self.config.head_scale)

    def _scaled(
        self, hidden: Float[Tensor, "batch rows width"], weight: Float[Tensor, "out width"]
    ) -> Float[Tensor, "batch rows out"]:
        scale = self.config.weight_scale
        if not isinstance(scale, float):
            scale = weight.shape[1 if scale == "fan_in" else 0] ** -0.5
        projected = project(hidden, weight)
        return projected if scale == 1.0 else projected * scale

    def _heads(self, projected: Float[Tensor, "batch rows heads_width"]) -> Float[Tensor, "batch heads rows head_dim"]:
        return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
