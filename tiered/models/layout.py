"""Books: the keys of config.json and the names of weights of a dense family, and the reader of both.

Inside a model the weights of every family have the same names, LLaDA's: `wte`, `blocks`, `ln_f`, `ff_out` (the head),
and in a block those of `IN_BLOCK`, where `ff_proj` is the gate of the MLP.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered.models.config_fields import (
    checkpoint_dtype,
    length_or_none,
    number_in,
    positive,
    require,
    special_tokens,
    switch,
    value_of,
    windows_of,
)
from tiered.models.quantised import require_readable
from tiered.models.rotation import Rotation, rotation_of
from tiered.models.shape import MOST_LAYERS, ModelShape

# What transformers' Llama and Qwen2 write, and with them most families.
KEYS: Mapping[str, str] = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_context": "max_position_embeddings",
    "head_tied": "tie_word_embeddings",
    "mask_token_id": "mask_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
NAMES: Mapping[str, str] = {
    "wte": "model.embed_tokens",
    "blocks": "model.layers",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
    "blocks.attn_norm": "input_layernorm",
    "blocks.q_proj": "self_attn.q_proj",
    "blocks.k_proj": "self_attn.k_proj",
    "blocks.v_proj": "self_attn.v_proj",
    "blocks.attn_out": "self_attn.o_proj",
    "blocks.ff_norm": "post_attention_layernorm",
    "blocks.ff_proj": "mlp.gate_proj",
    "blocks.up_proj": "mlp.up_proj",
    "blocks.ff_out": "mlp.down_proj",
}
# The weights of a block in its sizes, by our own names.
IN_BLOCK: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("width",),
    "q_proj": ("heads_width", "width"),
    "k_proj": ("kv_width", "width"),
    "v_proj": ("kv_width", "width"),
    "attn_out": ("width", "heads_width"),
    "ff_norm": ("width",),
    "ff_proj": ("mlp_width", "width"),
    "up_proj": ("mlp_width", "width"),
    "ff_out": ("width", "mlp_width"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every forward needs beside the sizes.

    Attributes:
        head_tied: True if the language-model head is the embedding.
        parameter_names: our own name of each weight, by its official one.
    """

    shape: ModelShape
    rotation: Rotation
    norm_eps: float
    head_tied: bool
    parameter_names: Mapping[str, str]
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The config.json and the weights of a family.

    Attributes:
        family: name for messages.
        allowed: switches of config.json, with the values that the forward implements; others are refused (`require`).
        keys: size, or special token → key of config.json.
        names: our own name of a module → its official one, from the root, or from the block.
        norm_eps: default, if config.json has none.
        heads_fill_width: True if heads times their elements are the width.
        tokens: defaults of mask, end and padding, if config.json does not name them.
    """

    family: str
    allowed: Mapping[str, tuple[object, ...]]
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    norm_eps: float = 1e-6
    heads_fill_width: bool = True
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)

    def read(
        self,
        config: Mapping[str, object],
        *,
        defaults: Mapping[str, int] | None = None,
        tokens: int | None = None,
        biases: Iterable[str] = (),
        more: Mapping[str, tuple[str, ...]] | None = None,
        mlp_matrices: int = 2,
        **facts: Any,
    ) -> dict[str, Any]:
        """The fields of `ModelConfig`.

        Args:
            defaults: sizes of absent keys. Without them all heads have a key head, and an even share of the width.
            tokens: number of tokens, if the embedding has more rows; None for as many as rows.
            biases: the projections of a block that have a bias.
            more: weights of a block beside the usual ones, in its sizes.
            mlp_matrices, facts: of `ModelShape`.

        Raises:
            ValueError: a size is absent or impossible, the forward lacks a switch, weights are in codes that cannot be
                read, a number is out of range, the family cannot use the rotation's scaling, a token is outside the
                vocabulary, or the mask is the end of an answer.
        """
        # The key of other families for a tied head.
        other_key = "weight_tying" if self.keys["head_tied"] == KEYS["head_tied"] else KEYS["head_tied"]
        require(config, {other_key: (False,), **self.allowed}, self.family)
        require_readable(config)
        biases, size = frozenset(biases), self._sizes(config, defaults or {})
        rotation = rotation_of(config, head_dim=size["head_dim"], positions=size["max_context"])
        if rotation.kind == "yarn" and facts.get("sink_tokens"):
            raise ValueError(
                f"rope_scaling: 'yarn' scales attention by way of the rotation, which the learned keys of {self.family}"
                " have no part in; 'linear' or 'ntk' is allowed"
            )
        size["max_context"] = max(size["max_context"], rotation.reach)
        head_tied = switch(config, self.keys["head_tied"])
        block = {**_in_block(biases, mlp_matrices), **(more or {})}
        names, shapes, matrices = self._weights(size, block, head_tied)
        shape = ModelShape(
            family=self.family.lower(),
            **size,
            mlp_matrices=mlp_matrices,
            trained_context=rotation.trained,
            dtype=checkpoint_dtype(config),
            matrices=matrices,
            weight_shapes=shapes,
            **facts,
        )
        return {
            "shape": shape,
            "rotation": rotation,
            "norm_eps": number_in(config, "rms_norm_eps", self.norm_eps),
            "head_tied": head_tied,
            "parameter_names": names,
            **special_tokens(config, tokens or shape.vocab_size, self.keys, self.tokens),
        }

    def read_in_blocks(self, config: Mapping[str, object], *, windowed: bool, **facts: Any) -> dict[str, Any]:
        """As `read`, for a family whose rows see blocks; raises as `windows_of` too. `windowed`: whether a window's
        width counts; `facts`: of `read`."""
        windows, given = windows_of(config, used=windowed)
        # Where no token is named for padding, the end is: what stands there is never looked at.
        end = value_of(config, "eos_token_id", self.tokens[1])
        given |= {"block_size": None, "pad_token_id": value_of(config, "pad_token_id", end)}
        return self.read(given, windows=windows, block_length=length_or_none(config, "block_size"), **facts)

    def _sizes(self, config: Mapping[str, object], given: Mapping[str, int]) -> dict[str, int]:
        keys = self.keys
        needed = ("width", "heads", "mlp_width", "vocab_size", "max_context")
        size = {name: positive(config, keys[name], given.get(name)) for name in needed}
        width, heads = size["width"], size["heads"]
        size["layers"] = positive(config, keys["layers"], most=MOST_LAYERS)
        size["kv_heads"] = positive(config, keys["kv_heads"], given.get("kv_heads", heads))
        # At least 1 so that a width below the number of heads reaches the check, which names both.
        size["head_dim"] = positive(config, "head_dim", max(width // heads, 1))
        if size["head_dim"] % 2 or (self.heads_fill_width and size["head_dim"] * heads != width):
            raise ValueError(
                f"config.json: {keys['width']} = {width} must be {keys['heads']} = {heads} times an even head_dim, "
                f"not {size['head_dim']}"
            )
        if heads % size["kv_heads"]:
            raise ValueError(
                f"config.json: {keys['heads']} = {heads} must be a multiple of {keys['kv_heads']} = {size['kv_heads']}"
            )
        return size

    def _weights(
        self, size: Mapping[str, int], block: Mapping[str, tuple[str, ...]], head_tied: bool
    ) -> tuple[dict[str, str], dict[str, tuple[int, ...]], dict[str, tuple[int, int]]]:
        """Our own name, and the shape, of every weight by its official name; and the matrices of a layer."""
        dims_of = {"wte.weight": ("vocab_size", "width")}
        dims_of |= {f"blocks.{layer}.{name}": dims for layer in range(size["layers"]) for name, dims in block.items()}
        dims_of |= {"ln_f.weight": ("width",)} | ({} if head_tied else {"ff_out.weight": ("vocab_size", "width")})
        of_heads = {"heads_width": size["heads"] * size["head_dim"], "kv_width": size["kv_heads"] * size["head_dim"]}
        size = {**size, **of_heads}
        own = {self._official(name): name for name in dims_of}
        matrices = {
            name.removesuffix(".weight"): (size[dims[0]], size[dims[1]])
            for name, dims in block.items()
            if name.endswith(".weight") and len(dims) == 2
        }
        shapes = {official: tuple(size[dim] for dim in dims_of[name]) for official, name in own.items()}
        return own, shapes, matrices

    def _official(self, name: str) -> str:
        first, *rest = name.split(".")
        if first != "blocks":
            return ".".join([self.names[first], *rest])
        layer, module, *kind = rest
        return ".".join([self.names["blocks"], layer, self.names[f"blocks.{module}"], *kind])


def _in_block(biases: frozenset[str], mlp_matrices: int) -> dict[str, tuple[str, ...]]:
    block: dict[str, tuple[str, ...]] = {}
    for name, dims in IN_BLOCK.items():
        if name != "ff_proj" or mlp_matrices == 2:
            block |= {f"{name}.weight": dims} | ({f"{name}.bias": dims[:1]} if name in biases else {})
    return block
