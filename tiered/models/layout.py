"""Books: a family's keys of config.json and names of weights, and the reader of both.

In our models the weights of every family have LLaDA's names: `wte`, `blocks`, `ln_f` and `ff_out` (the head). The
weights of a block have those of `IN_BLOCK`; `ff_proj` is the gate of the MLP. A block has two matrices for all experts,
one expert behind the other. `experts_in` has, for each expert, the rows of the gate and then of the up projection;
`experts_out` has the down projections. A checkpoint has each expert's tensors alone, and each is a piece of a matrix.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered.models.config_fields import (
    checkpoint_dtype,
    end_tokens,
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
from tiered.models.rotation import Rotation, part_outside, rotation_of
from tiered.models.shape import MOST_LAYERS, ROUTER, ROUTER_BIAS, Experts, ModelShape

# The keys of transformers' Llama and Qwen2, and of most families.
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
# Of a family that norms heads and keys head by head.
HEAD_NORMS: Mapping[str, tuple[str, ...]] = {"q_norm.weight": ("head_dim",), "k_norm.weight": ("head_dim",)}
# They replace the last three of `IN_BLOCK` in a layer with a mixture.
MIXTURE: Mapping[str, tuple[str, ...]] = {
    ROUTER: ("experts", "width"),
    ROUTER_BIAS: ("experts",),
    "experts_in.weight": ("experts_in", "width"),
    "experts_out.weight": ("experts_out", "expert_width"),
    "shared_proj.weight": ("shared_width", "width"),
    "shared_up.weight": ("shared_width", "width"),
    "shared_out.weight": ("width", "shared_width"),
}
MLP = ("ff_proj", "up_proj", "ff_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of every forward.

    Attributes:
        head_tied: True if the language-model head is the embedding.
        parameter_names: our own name of each weight, by its official one. Pieces of a weight share its name.
        pieces: rows of our weight that a piece is, by its official name.
        more_ends: ids that end an answer beside `eos_token_id`.
    """

    shape: ModelShape
    rotation: Rotation
    norm_eps: float
    head_tied: bool
    parameter_names: Mapping[str, str]
    pieces: Mapping[str, slice]
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int
    more_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The config.json and the weights of a family.

    Attributes:
        family: name for messages.
        allowed: switches of config.json, with the values that the forward implements; others are refused (`require`).
        keys: key of config.json for each size or special token.
        names: our own name of a module → its official one, from the root, or from the block. One with "{layer}" is from
            the root too.
        in_block: matrices and norms of a block by our own names, in its sizes.
        reads: keys that the family's reader checks itself, whatever `require` allows.
        norm_eps: default, if config.json has none.
        heads_fill_width: True if heads times their elements are the width.
        tokens: defaults of mask, end and padding, if config.json has none.
    """

    family: str
    allowed: Mapping[str, tuple[object, ...]]
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    in_block: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: IN_BLOCK)
    reads: frozenset[str] = frozenset()
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
        beside: Mapping[str, tuple[str, ...]] | None = None,
        mlp_matrices: int = 2,
        experts: Experts | None = None,
        **facts: Any,
    ) -> dict[str, Any]:
        """The fields of `ModelConfig`.

        Args:
            defaults: sizes of absent keys. Without them every head has a key head of its own and an even share of the
                width.
            tokens: number of tokens, if the embedding has more rows; None if it has as many.
            biases: the projections of a block that have a bias.
            more: weights of a block beside the usual ones, in its sizes.
            beside: weights beside the blocks, in the sizes of blocks.
            mlp_matrices, experts, facts: fields of `ModelShape`. Layers of `global_heads` have no projection to values.

        Raises:
            ValueError: a size is absent or impossible, a number is out of range, or weights are in unreadable codes.
                The forward lacks a switch, or the family cannot use the rotation's scaling. A token is outside the
                vocabulary, or the mask is the end of an answer.
        """
        # The key of other families for a tied head.
        other_key = "weight_tying" if self.keys["head_tied"] == KEYS["head_tied"] else KEYS["head_tied"]
        left = {key: value for key, value in part_outside(config).items() if key not in self.reads}
        require(left, {other_key: (False,), **self.allowed}, self.family)
        require_readable(config)
        biases, size = frozenset(biases), self._sizes(config, defaults or {})
        rotation = rotation_of(config, head_dim=size["head_dim"], positions=size["max_context"])
        if rotation.kind == "yarn" and facts.get("sink_tokens"):
            raise ValueError(
                f"rope_scaling: 'yarn' scales attention through the rotation, but the learned keys of {self.family} are"
                " not rotated; 'linear' or 'ntk' is allowed"
            )
        size["max_context"] = max(size["max_context"], rotation.reach)
        head_tied = switch(config, self.keys["head_tied"])
        block = {**self._in_block(biases, mlp_matrices), **(more or {})}
        own = self._own(size, block, experts, head_tied, beside or {}, _global_layers(facts, size["layers"]))
        names, shapes, pieces = self._official_weights(own, experts)
        last = f"blocks.{max(set(range(size['layers'])) - set(experts.dense if experts else ()))}."
        matrices = {
            name.removeprefix(last).removesuffix(".weight"): (of[0], of[1])
            for name, of in own.items()
            if name.startswith(last if experts is None else f"{last}experts_")
            and name.endswith(".weight")
            and len(of) == 2
        }
        shape = ModelShape(
            family=self.family.lower(),
            **size,
            mlp_matrices=mlp_matrices,
            trained_context=rotation.trained,
            dtype=checkpoint_dtype(config),
            matrices=matrices,
            experts=experts,
            weight_shapes=shapes,
            own_shapes=own,
            tied=(self._official("wte.weight"), self._official("ff_out.weight")) if head_tied else None,
            **facts,
        )
        return {
            "shape": shape,
            "rotation": rotation,
            "norm_eps": number_in(config, "rms_norm_eps", self.norm_eps),
            "head_tied": head_tied,
            "parameter_names": names,
            "pieces": pieces,
            **special_tokens(config, tokens or shape.vocab_size, self.keys, self.tokens),
        }

    def read_in_blocks(self, config: Mapping[str, object], *, windowed: bool, **facts: Any) -> dict[str, Any]:
        """As `read`, for a block-causal family; also raises as `windows_of`. `windowed`: whether a window's width
        counts; `facts`: arguments of `read`."""
        windows, given = windows_of(config, used=windowed)
        # Without a padding token the end token is used: padded positions are never read.
        end = end_tokens(config, default=self.tokens[1])[0]
        given |= {"block_size": None, "pad_token_id": value_of(config, "pad_token_id", end)}
        return self.read(given, windows=windows, block_length=length_or_none(config, "block_size"), **facts)

    def _sizes(self, config: Mapping[str, object], given: Mapping[str, int]) -> dict[str, int]:
        keys = self.keys
        needed = ("width", "heads", "mlp_width", "vocab_size", "max_context")
        size = {name: positive(config, keys[name], given.get(name)) for name in needed}
        width, heads = size["width"], size["heads"]
        size["layers"] = positive(config, keys["layers"], most=MOST_LAYERS)
        size["kv_heads"] = positive(config, keys["kv_heads"], given.get("kv_heads", heads))
        # At least 1, so that a width below the number of heads reaches the check, which names both.
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

    def _in_block(self, biases: frozenset[str], mlp_matrices: int) -> dict[str, tuple[str, ...]]:
        block: dict[str, tuple[str, ...]] = {}
        for name, dims in self.in_block.items():
            if name != "ff_proj" or mlp_matrices == 2:
                block |= {f"{name}.weight": dims} | ({f"{name}.bias": dims[:1]} if name in biases else {})
        return block

    def _own(
        self,
        size: Mapping[str, int],
        block: Mapping[str, tuple[str, ...]],
        experts: Experts | None,
        head_tied: bool,
        beside: Mapping[str, tuple[str, ...]],
        global_layers: Mapping[int, tuple[int, int]],
    ) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by our own name. `global_layers`: `ModelShape.global_heads` of layers that have
        them."""
        size = {**size, "one": 1, **_widths(size["heads"], size["kv_heads"], size["head_dim"])}
        mixture: dict[str, tuple[str, ...]] = {}
        if experts is not None:
            size |= {
                "experts": experts.count,
                "expert_width": experts.width,
                "experts_in": experts.count * 2 * experts.width,
                "experts_out": experts.count * size["width"],
                "shared_width": experts.shared_width,
            }
            mixture = {name: dims for name, dims in block.items() if name.partition(".")[0] not in MLP}
            mixture |= {
                name: dims
                for name, dims in MIXTURE.items()
                if (experts.biased or name != ROUTER_BIAS) and (experts.shared_width or "shared_width" not in dims)
            }
        own = {"wte.weight": (size["vocab_size"], size["width"])}
        for layer in range(size["layers"]):
            in_layer = block if experts is None or layer in experts.dense else mixture
            sizes = size
            if (of_layer := global_layers.get(layer)) is not None:
                in_layer = {name: dims for name, dims in in_layer.items() if name != "v_proj.weight"}
                sizes = {**size, **_widths(size["heads"], *of_layer)}
            own |= {f"blocks.{layer}.{name}": tuple(sizes[dim] for dim in dims) for name, dims in in_layer.items()}
        roots = {"ln_f.weight": ("width",), **beside}
        roots |= {} if head_tied else {"ff_out.weight": ("vocab_size", "width")}
        return own | {name: tuple(size[dim] for dim in dims) for name, dims in roots.items()}

    def _official_weights(
        self, own: Mapping[str, tuple[int, ...]], experts: Experts | None
    ) -> tuple[dict[str, str], dict[str, tuple[int, ...]], dict[str, slice]]:
        """Our own name, and the shape, of every weight by its official name; and the rows of each piece."""
        names: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: dict[str, slice] = {}
        for name, shape in own.items():
            module = name.removesuffix(".weight").rpartition(".")[2]
            if experts is None or module not in ("experts_in", "experts_out"):
                official = self._official(name)
                names[official], shapes[official] = name, shape
                continue
            each = shape[0] // experts.count
            parts = ("gate_proj", "up_proj") if module == "experts_in" else ("down_proj",)
            stack = self._official(name.removesuffix(f"{module}.weight") + "experts")
            for number in range(experts.count):
                for place, part in enumerate(parts):
                    official, rows = f"{stack}.{number}.{part}.weight", each // len(parts)
                    first = number * each + place * rows
                    names[official], shapes[official] = name, (rows, shape[1])
                    pieces[official] = slice(first, first + rows)
        return names, shapes, pieces

    def _official(self, name: str) -> str:
        first, *rest = name.split(".")
        if first != "blocks":
            return ".".join([self.names[first], *rest])
        layer, module, *kind = rest
        official = self.names[f"blocks.{module}"]
        if "{layer}" in official:
            return ".".join([official.format(layer=layer), *kind])
        return ".".join([self.names["blocks"], layer, official, *kind])


def _widths(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    of_heads, of_keys = heads * head_dim, kv_heads * head_dim
    return {"head_dim": head_dim, "heads_width": of_heads, "kv_width": of_keys, "qkv_width": of_heads + 2 * of_keys}


def _global_layers(facts: Mapping[str, Any], layers: int) -> dict[int, tuple[int, int]]:
    """`global_heads` of the layers without a window, by layer; empty if all layers have the same heads."""
    heads, windows = facts.get("global_heads"), facts.get("windows") or [None] * layers
    return {layer: heads for layer in range(layers) if windows[layer] is None} if heads else {}
