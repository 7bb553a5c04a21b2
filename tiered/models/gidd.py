"""The GIDD family (arXiv 2503.04482; gidd-unif and gidd-mask, 3B and 10B): uniform, mask or mixed noise.

Differences from a plain dense layer: scores are soft-capped, and every row attends to a learned key and value. Final
tokens see only final tokens. q/k norms are over the full width. The MLP is squared ReLU without a gate. Projections,
branches and head are scaled. Absent keys of config.json take the defaults of the official `GiddConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tiered.core.checks import FLOAT32_MOST
from tiered.models.attention import Joined
from tiered.models.base import DiffusionModel, Hidden, Projected, Projection, RMSNorm, RouterProbe
from tiered.models.config_fields import number_in, switch
from tiered.models.layout import NAMES, Layout, ModelConfig
from tiered.models.noise import MOST_LOG_SNR, Noise

_LAYOUT = Layout(
    family="GIDD",
    allowed={
        "attention_bias": (False, True),
        "mlp_bias": (False, True),
        "use_qk_norm": (False, True),
    },
    names={
        **NAMES,
        "blocks.attn_norm": "attn_layernorm",
        "blocks.ff_norm": "mlp_layernorm",
        **{f"blocks.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm", "k_bias", "v_bias")},
    },
    tokens=(3, 1, 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiddConfig(ModelConfig):
    """Settings of the GIDD forward beside those of `ModelConfig`.

    Attributes:
        branch_scale: factor of each branch: `resid_scale` over the number of layers.
        weight_scale: factor of every projection: a number, or "fan_in" or "fan_out" to the power of −½.
        head_scale: factor of logits.
    """

    branch_scale: float
    weight_scale: float | str
    head_scale: float
    noise: Noise


def read_gidd_config(config: Mapping[str, object]) -> GiddConfig:
    """The GIDD settings of `config`. Raises as `Layout.read`, and for a number of GIDD's that is out of range."""
    qk_norm, sinks = switch(config, "use_qk_norm", True), switch(config, "attention_bias")
    shift = number_in(config, "noise_type", 0.0, least=-FLOAT32_MOST)
    fields = _LAYOUT.read(
        {**config, "num_key_value_heads": None},
        biases=("up_proj", "ff_out") if switch(config, "mlp_bias") else (),
        more=({"q_norm.weight": ("width",), "k_norm.weight": ("width",)} if qk_norm else {})
        | ({"k_bias": ("heads", "head_dim"), "v_bias": ("heads", "head_dim")} if sinks else {}),
        mlp_matrices=1,
        noise="uniform" if shift > 0 else "mask",
        sight="noise",
        soft_cap=number_in(config, "attn_soft_cap", 30.0),
        sink_tokens=int(sinks),
    )
    scale = config.get("weight_scaling", "fan_in")
    low, high = (
        number_in(config, key, default, least=-MOST_LOG_SNR, most=MOST_LOG_SNR)
        for key, default in (("min_log_snr", -9.0), ("max_log_snr", 9.0))
    )
    if not low < high:
        raise ValueError(f"config.json: min_log_snr = {low} must be below max_log_snr = {high}")
    shape, mask = fields["shape"], fields["mask_token_id"]
    noise = Noise(shift=shift, min_log_snr=low, max_log_snr=high, vocab_size=shape.vocab_size, mask_token_id=mask)
    return GiddConfig(
        **fields,
        branch_scale=number_in(config, "resid_scale", 4.0) / shape.layers,
        weight_scale=str(scale) if scale in ("fan_in", "fan_out") else number_in(config, "weight_scaling", 1.0),
        head_scale=number_in(config, "head_scaling", 1.0),
        noise=noise,
    )


class ZeroCentredNorm(RMSNorm):
    offset = 1.0


class Gidd(DiffusionModel):
    config: GiddConfig
    _norm = ZeroCentredNorm
    read_config = staticmethod(read_gidd_config)

    def __init__(self, config: GiddConfig) -> None:
        super().__init__(config)
        self.noise = config.noise

    def sinks(self, layer: int) -> tuple[Float[Tensor, "heads sinks head_dim"], Float[Tensor, "heads sinks head_dim"]]:
        """Unrotated keys and values that every row attends to beside those of the canvas."""
        block = self.blocks[layer]
        if self.shape.sink_tokens:
            return block.k_bias[:, None], block.v_bias[:, None]
        none = block.attn_norm.weight.new_empty(self.shape.heads, 0, self.shape.head_dim)
        return none, none

    def sink_keys(self, layer: int) -> Float[Tensor, "heads sinks head_dim"] | None:
        return self.sinks(layer)[0] if self.shape.sink_tokens else None

    def _softened(self, layer: int) -> dict[str, Any]:
        sink_keys, sink_values = self.sinks(layer)
        return {"soft_cap": self.shape.soft_cap, "sink_keys": sink_keys, "sink_values": sink_values}

    def attention_out(self, layer: int, mixed: Joined) -> Hidden:
        return super().attention_out(layer, mixed) * self.config.branch_scale

    def feed_forward(
        self, layer: int, hidden: Hidden, probe: RouterProbe | None = None, normed: Hidden | None = None
    ) -> Hidden:
        block, normed = self.blocks[layer], self.mlp_norm(layer, hidden) if normed is None else normed
        # In place, except where gradients need a copy: this is the largest tensor of a layer.
        inner = self._project(normed, block.up_proj).relu_().square()
        return self._project(inner, block.ff_out) * self.config.branch_scale

    def logits(self, hidden: Hidden, tokens: slice = slice(None)) -> Float[Tensor, "batch rows vocab"]:
        # In place: a step holds no larger tensor.
        return super().logits(hidden, tokens).mul_(self.config.head_scale)

    def _finished(self, product: Projected, *projections: nn.Linear | Projection) -> Projected:
        scale = self.config.weight_scale
        if scale == "fan_out":
            widths = [projection.weight.shape[0] for projection in projections]
            for part, width in zip(product.split(widths, dim=-1), widths, strict=True):
                part.mul_(width**-0.5)
        elif isinstance(scale, str):
            product.mul_(projections[0].weight.shape[1] ** -0.5)
        elif scale != 1.0:
            product.mul_(scale)
        return super()._finished(product, *projections)
