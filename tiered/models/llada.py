"""The dense LLaDA family (arXiv 2502.09992): LLaDA-8B and LLaDA-1.5, multi-head or grouped-query attention."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tiered.models.base import DiffusionModel
from tiered.models.config_fields import ModelConfig
from tiered.models.llada_config import read_llada_config
from tiered.models.projection import project
from tiered.models.rms_norm import RMSNorm
from tiered.models.rope import Rotary

_OFFICIAL_PREFIX = "model.transformer."


class LLaDABlock(nn.Module):
    """The weights of one layer, under their official names. `ff_proj` is the gate of the MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.shape
        self.attn_norm = RMSNorm(shape.width, config.norm_eps)
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.attn_out = nn.Linear(shape.width, shape.width, bias=False)
        self.ff_norm = RMSNorm(shape.width, config.norm_eps)
        self.ff_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.ff_out = nn.Linear(shape.mlp_width, shape.width, bias=False)


class LLaDA(DiffusionModel):
    """See `DiffusionModel`. Construct it under `torch.device("meta")` to take no memory before the weights arrive."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = config.shape
        self.mask_token_id = config.mask_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(LLaDABlock(config) for _ in range(shape.layers))
        self.ln_f = RMSNorm(shape.width, config.norm_eps)
        if not config.head_tied:
            self.ff_out = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.requires_grad_(False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LLaDA":
        return cls(read_llada_config(config))

    def parameter_name(self, official: str) -> str:
        return official.removeprefix(_OFFICIAL_PREFIX)

    def block(self, layer: int) -> LLaDABlock:
        """The weights of `layer`."""
        block = self.blocks[layer]
        assert isinstance(block, LLaDABlock)
        return block

    def rotary(self, positions: Int[Tensor, "batch length"]) -> Rotary:
        return Rotary.of(positions, self.shape.head_dim, self.config.rope_theta)

    def embed(self, ids: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch rows width"]:
        return self.wte(ids)

    def attention_norm(
        self, layer: int, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        return self.block(layer).attn_norm(hidden)

    def keys(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        return rotary.rotate(self._heads(project(normed, self.block(layer).k_proj.weight)))

    def values(
        self, layer: int, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        return self._heads(project(normed, self.block(layer).v_proj.weight))

    def queries(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        return rotary.rotate(self._heads(project(normed, self.block(layer).q_proj.weight)))

    def attention_out(
        self, layer: int, mixed: Float[Tensor, "batch rows heads_width"]
    ) -> Float[Tensor, "batch rows width"]:
        return project(mixed, self.block(layer).attn_out.weight)

    def feed_forward(self, layer: int, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows width"]:
        block = self.block(layer)
        normed = block.ff_norm(hidden)
        gated = F.silu(project(normed, block.ff_proj.weight)) * project(normed, block.up_proj.weight)
        return project(gated, block.ff_out.weight)

    def logits(self, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows vocab"]:
        head = self.wte.weight if self.config.head_tied else self.ff_out.weight
        return project(self.ln_f(hidden), head).float()

    def _heads(self, projected: Float[Tensor, "batch rows heads_width"]) -> Float[Tensor, "batch heads rows head_dim"]:
        return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
