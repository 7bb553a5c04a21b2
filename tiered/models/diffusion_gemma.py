"""The DiffusionGemma family (google/diffusiongemma-26B-A4B-it): Gemma 4's layers in an encoder and a decoder that share
all weights except one number in each layer.

Final tokens are encoded: each attends to itself and the tokens in front of it. The tokens of the open canvas are
decoded: each attends to the encoded ones and to all of the canvas. Their embeddings carry what the step before
predicted there, its *self-conditioning*. Most layers have a window. The others have larger heads: their keys are their
values times a weight, with a part of the pairs turned, so only values are kept. An MLP and experts read the same rows
side by side. Images are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows, Heads, KeyValue
from tiered.kernels.expert_outputs_ref import Picks
from tiered.kernels.keys_of_values import KeysOfValues
from tiered.kernels.rms_norm_ref import rms_norm
from tiered.kernels.row_code import chunks
from tiered.models.attention import Joined
from tiered.models.base import Hidden, KeyHeads, RMSNorm, RouterProbe
from tiered.models.config_fields import FULL, SLIDING, end_tokens, number_in, positive, value_of
from tiered.models.layout import HEAD_NORMS, IN_BLOCK, NAMES, Layout
from tiered.models.mixture import MixtureConfig, MixtureModel
from tiered.models.rope import Rotary, turning_pairs
from tiered.models.rotation import Rotation
from tiered.models.router import Router, experts_of
from tiered.models.shape import ROUTER

_LAYOUT = Layout(
    family="DiffusionGemma",
    allowed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": ("vision",),  # of rows of images, which are not read
    },
    names={
        **NAMES,
        "wte": "model.decoder.embed_tokens",
        "blocks": "model.decoder.layers",
        "ln_f": "model.decoder.norm",
        "soft_norm": "model.decoder.self_conditioning.pre_norm",
        "soft_proj": "model.decoder.self_conditioning.gate_proj",
        "soft_up": "model.decoder.self_conditioning.up_proj",
        "soft_out": "model.decoder.self_conditioning.down_proj",
        "blocks.q_norm": "self_attn.q_norm",
        "blocks.k_norm": "self_attn.k_norm",
        "blocks.attn_post_norm": "post_attention_layernorm",
        "blocks.ff_norm": "pre_feedforward_layernorm",
        "blocks.shared_proj": "mlp.gate_proj",
        "blocks.shared_up": "mlp.up_proj",
        "blocks.shared_out": "mlp.down_proj",
        "blocks.shared_post_norm": "post_feedforward_layernorm_1",
        "blocks.experts_norm": "pre_feedforward_layernorm_2",
        "blocks.experts": "experts",
        "blocks.experts_post_norm": "post_feedforward_layernorm_2",
        "blocks.ff_post_norm": "post_feedforward_layernorm",
        f"blocks.{ROUTER}": "router.proj.weight",
        "blocks.router_scale": "router.scale",
        "blocks.expert_scale": "router.per_expert_scale",
        "blocks.decoder_scale": "layer_scalar",
        "blocks.encoder_scale": "model.encoder.language_model.layers.{layer}.layer_scalar",
    },
    in_block=IN_BLOCK,
    reads=frozenset({"num_experts", "final_logit_softcapping"}),
    heads_fill_width=False,
)
_NORMS = ("attn_post_norm", "shared_post_norm", "experts_norm", "experts_post_norm", "ff_post_norm")
_IN_BLOCK: Mapping[str, tuple[str, ...]] = {
    **{f"{name}.weight": ("width",) for name in _NORMS},
    **HEAD_NORMS,
    "router_scale": ("width",),
    "expert_scale": ("experts",),
    "decoder_scale": ("one",),
    "encoder_scale": ("one",),
}
_SOFT: Mapping[str, tuple[str, ...]] = {
    "soft_norm.weight": ("width",),
    "soft_proj.weight": ("mlp_width", "width"),
    "soft_up.weight": ("mlp_width", "width"),
    "soft_out.weight": ("width", "mlp_width"),
}
_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(MixtureConfig):
    """Settings beside those of `MixtureConfig`.

    Attributes:
        global_rotation: rotation of layers without a window.
        logit_cap: c if logits x become c · tanh(x / c).
    """

    global_rotation: Rotation
    logit_cap: float


def read_gemma_config(config: Mapping[str, object]) -> GemmaConfig:
    """The settings of `config` and of its `text_config`. Raises as `Layout.read`, for layers whose heads are not those
    of their kind, and for another rotation."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config = {text!r}; the sizes of the language model are needed")
    if stretched := [key for key in ("rope_theta", "rope_scaling") if config.get(key) is not None]:
        raise ValueError(f"{stretched[0]} = {config[stretched[0]]!r}; the rotation of DiffusionGemma is not stretched")
    layers = positive(text, "num_hidden_layers")
    kinds = value_of(text, "layer_types", [FULL if layer % 6 == 5 else SLIDING for layer in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or FULL not in kinds:
        raise ValueError(f"config.json: layer_types = {kinds!r}; one for each of {layers} layers is allowed")
    kinds = [*kinds[:-1], FULL]  # as transformers reads them
    rotations = _rotations(text)
    flat: dict[str, object] = {
        **text,
        "layer_types": kinds,
        "max_window_layers": 0,
        "per_layer_config": None,
        "rope_parameters": None,
        "rope_theta": rotations[SLIDING].theta,
        "num_experts_per_tok": text.get("top_k_experts"),
        "block_size": value_of(config, "canvas_length", 256),
        "dtype": next(
            (each[key] for each in (config, text) for key in ("dtype", "torch_dtype") if each.get(key)), None
        ),
        "tie_word_embeddings": value_of(text, "tie_word_embeddings", True),
        "quantization_config": config.get("quantization_config"),
        "pad_token_id": value_of(text, "pad_token_id", 0),
        "eos_token_id": end_tokens(text, config, default=1),
        # Noise is tokens, and no row is ever a mask.
        "mask_token_id": value_of(text, "pad_token_id", 0),
    }
    experts = experts_of(flat, shared_width=positive(text, "intermediate_size"))
    fields = _LAYOUT.read_in_blocks(
        flat,
        windowed=True,
        more=_IN_BLOCK,
        beside=_SOFT,
        noise="random",
        sight="context",
        cuts_answers=False,
        finishes_blocks=True,
        conditioned=True,
        global_heads=_global_heads(text, kinds),
        experts=experts,
        unread=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
    )
    return GemmaConfig(
        **fields,
        router=Router(score="softmax", picked=experts.picked, normalised=True).check(experts.count),
        global_rotation=rotations[FULL],
        logit_cap=number_in(text, "final_logit_softcapping", 30.0),
    )


def _rotations(text: Mapping[str, Any]) -> dict[str, Rotation]:
    found = {}
    for kind, default in _ROPE.items():
        given = (text.get("rope_parameters") or {}).get(kind, default)
        if given.keys() - default.keys() or given.get("rope_type", default["rope_type"]) != default["rope_type"]:
            raise ValueError(f"config.json: rope_parameters[{kind!r}] = {given!r}; {dict(default)} is allowed")
        theta = number_in(given, "rope_theta", default["rope_theta"])
        part = number_in(given, "partial_rotary_factor", 1.0, most=1.0)
        found[kind] = Rotation(theta=theta, kind=default["rope_type"], part=part)
    return found


def _global_heads(text: Mapping[str, Any], kinds: list[str]) -> tuple[int, int]:
    """Key heads, and elements of a head, of the layers without a window."""
    own = {"num_key_value_heads": text.get("num_global_key_value_heads"), "head_dim": text.get("global_head_dim", 512)}
    by_layer: Any = text.get("per_layer_config")
    if by_layer is None:
        by_layer = {layer: own for layer, kind in enumerate(kinds) if kind == FULL}
    # transformers pads the numbers of layers with zeros: "05" and "11".
    numbers = {int(key): key for key in by_layer if str(key).isdecimal() and int(key) < len(kinds)}
    if len(numbers) < len(by_layer):
        raise ValueError(
            f"config.json: per_layer_config has the keys {[*by_layer]}; numbers from 0 to {len(kinds) - 1}, each once, "
            "are allowed"
        )
    given = [by_layer.get(numbers.get(layer), {}) for layer in range(len(kinds))]
    of_kind = given[kinds.index(FULL)]
    if any(each != (of_kind if kind == FULL else {}) for each, kind in zip(given, kinds, strict=True)):
        raise ValueError(f"config.json: per_layer_config = {by_layer!r}; one for all layers of {FULL!r} is allowed")
    if of_kind.keys() - own.keys():
        raise ValueError(f"config.json: per_layer_config has {sorted(of_kind)}; {sorted(own)} are allowed")
    heads = positive(text, "num_attention_heads")
    usual = positive(text, "num_key_value_heads"), positive(text, "head_dim")
    found = positive(of_kind, "num_key_value_heads", usual[0]), positive(of_kind, "head_dim", usual[1])
    if heads % found[0] or found[1] % 2:
        raise ValueError(
            f"config.json: layers of {FULL!r} have {found[0]} key heads of {found[1]} elements; a divisor of "
            f"{heads} heads, and an even number, are allowed"
        )
    return found


class GemmaNorm(RMSNorm):
    offset = 0.0


class DiffusionGemma(MixtureModel):
    config: GemmaConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    _norm = GemmaNorm
    _activation = "gelu"
    read_config = staticmethod(read_gemma_config)

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        shape = self.shape
        self.soft_norm = GemmaNorm(shape.width, config.norm_eps)
        self.soft_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.soft_up = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.soft_out = nn.Linear(shape.mlp_width, shape.width, bias=False)
        self.requires_grad_(False)

    def rotary(self, positions: Tensor, is_global: bool = False) -> Rotary:
        rotation = self.config.global_rotation if is_global else self.config.rotation
        return Rotary.of(positions, self.shape.head_dims[is_global], rotation)

    def embed(self, ids: Tensor) -> Hidden:
        found = super().embed(ids)
        return found.mul_(self._embedding_scale(found.dtype))

    def condition(self, hidden: Hidden, soft: Hidden | None) -> Hidden:
        if soft is not None:
            hidden = hidden + self._gated(self.soft_norm(soft), self.soft_proj, self.soft_up, self.soft_out)
        return self._normed(hidden)

    def soft_tokens(self, chances: Float[Tensor, "batch rows tokens"], tokens: slice = slice(None)) -> Hidden:
        weight: Any = self.wte.weight[tokens]
        chances = chances.to(weight.dtype)
        if isinstance(weight, CodedRows):
            parts = chunks(*weight.shape)
            soft = sum((chances[..., rows] @ weight[rows].values() for rows in parts), chances.new_zeros(()))
        else:
            soft = chances @ weight
        return soft.mul_(self._embedding_scale(weight.dtype))

    def scale_layer(self, layer: int, hidden: Hidden, final: "bool | Bool[Tensor, 'batch rows 1']") -> None:
        block = self.blocks[layer]
        if isinstance(final, Tensor):
            hidden.mul_(block.encoder_scale.where(final, block.decoder_scale))
        else:
            hidden.mul_(block.encoder_scale if final else block.decoder_scale)

    def keys(self, layer: int, normed: Hidden, rotary: Rotary) -> KeyHeads:
        return rotary.rotate(self._heads_normed(layer, "k_proj", normed, "k_norm"))

    def values(self, layer: int, normed: Hidden) -> KeyHeads:
        # A layer without a window has no projection of its own: its values are its keys before their norm's weight.
        return self._heads_normed(layer, "k_proj" if self.shape.is_global(layer) else "v_proj", normed)

    def keys_of_values(self, layer: int, values: KeyValue, rotary: Rotary) -> KeysOfValues:
        pairs = turning_pairs(self.config.global_rotation, values.shape[-1])
        return KeysOfValues(values, self.blocks[layer].k_norm.weight, rotary.cos[..., :pairs], rotary.sin[..., :pairs])

    def queries(self, layer: int, normed: Hidden, rotary: Rotary) -> Heads:
        return rotary.rotate_queries(self._heads_normed(layer, "q_proj", normed, "q_norm"))

    def queries_keys_values(self, layer: int, normed: Hidden, rotary: Rotary) -> None:
        return None  # values are normed, and some layers have no projection to them

    def attention_out(self, layer: int, mixed: Joined) -> Hidden:
        return self.blocks[layer].attn_post_norm(super().attention_out(layer, mixed))

    def feed_forward(
        self, layer: int, hidden: Hidden, probe: RouterProbe | None = None, normed: Hidden | None = None
    ) -> Hidden:
        block, normed = self.blocks[layer], self.mlp_norm(layer, hidden) if normed is None else normed
        dense = self._gated(normed, block.shared_proj, block.shared_up, block.shared_out)
        del normed
        dense = block.shared_post_norm(dense)
        routed = self.routed(layer, hidden, block.experts_norm(hidden), self.ranked(layer, hidden), probe)
        return block.ff_post_norm(dense.add_(block.experts_post_norm(routed)))

    def ranked(self, layer: int, hidden: Hidden) -> Hidden:
        normed = for_device(rms_norm, hidden.device)(
            hidden, self.blocks[layer].router_scale, self.config.norm_eps, offset=0.0
        )
        return normed.mul_(self.shape.width**-0.5)

    def picks(self, layer: int, rows: Float[Tensor, "rows width"]) -> Picks:
        experts, weights = super().picks(layer, rows)
        return Picks(experts, weights * self.blocks[layer].expert_scale.float()[experts])

    def logits(self, hidden: Hidden, tokens: slice = slice(None)) -> Float[Tensor, "batch rows vocab"]:
        cap = self.config.logit_cap
        return super().logits(hidden, tokens).div_(cap).tanh_().mul_(cap)

    def _softened(self, layer: int) -> dict[str, Any]:
        return {"scale": 1.0}

    def _heads_normed(self, layer: int, name: str, normed: Hidden, norm: str | None = None) -> Heads:
        """Heads of a projection, each normed: by the weight of `norm`, or without one."""
        projected = self._of_attention(layer, name, normed)
        heads = projected.unflatten(-1, (-1, len(self.blocks[layer].k_norm.weight)))
        by_head = heads.flatten(1, 2)
        by_head = self._normed(by_head) if norm is None else getattr(self.blocks[layer], norm)(by_head)
        return by_head.view(heads.shape).transpose(1, 2)

    def _normed(self, hidden: Hidden) -> Hidden:
        return for_device(rms_norm, hidden.device)(hidden, None, self.config.norm_eps)

    def _embedding_scale(self, dtype: torch.dtype) -> float:
        """√width, rounded to the dtype of the embedding, as in the official code."""
        return torch.tensor(self.shape.width**0.5, dtype=dtype).item()
