"""Books: the sizes of a model, for planning, caching and the check of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from tiered.core.buffers import ELEMENT_BYTES, dtype_name
from tiered.core.checks import unknown_name

# No model comes close, and counts of bytes fit an int64: two sizes, the layers and 4 bytes are 2^60.
MOST_SIZE, MOST_LAYERS = 2**24, 2**10
# Bytes of an element, by the names of dtypes in config.json and of safetensors users.
BYTES_PER_ELEMENT: Mapping[str, int] = {name: ELEMENT_BYTES[name] for name in ("float32", "bfloat16", "float16")}
# Logits of a step that exist at once, 16 MiB. More are made in tiles: of some tokens, or whole of some rows.
WHOLE_LOGITS = 2**22
# Logits of a tile of tokens, 8 MiB; and its least tokens, so that the product with the head reads it at full speed.
TILE_LOGITS, VOCABULARY_TILE = 2**21, 8192
Sight = Literal["canvas", "noise", "blocks", "context"]
CANVAS: frozenset[Sight] = frozenset({"canvas", "noise"})
BLOCK_CAUSAL: frozenset[Sight] = frozenset({"blocks", "context"})


# The router of a layer and its bias by our own names; they are float32 in every dtype of the model.
ROUTER, ROUTER_BIAS = "router", "router_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixtures of experts of a model.

    Attributes:
        count: experts of a layer.
        picked: experts that a row goes to.
        width: elements of an expert's inner layer.
        shared_width: elements of the inner layer of the shared expert, which every row goes to; 0 for none.
        biased: True if routers have a bias.
        dense: layers with one MLP in place of a mixture, ascending.
    """

    count: int
    picked: int
    width: int
    shared_width: int
    biased: bool
    dense: tuple[int, ...]

    def reached(self, rows: float) -> float:
        """Experts of a layer that `rows` rows go to, on average, if each row picks them at random. Rows of one text
        agree more often."""
        return self.count * (1 - (1 - self.picked / self.count) ** rows)


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached properties: plans ask thousands of times
class ModelShape:
    """Sizes of a diffusion LM, in elements and rows; the same words for every family.

    Attributes:
        family: name of the model family, as in `tiered.models.families`.
        layers: transformer layers.
        width: elements of a row's hidden state.
        heads, kv_heads, head_dim: query heads, key/value heads, elements of a head.
        mlp_width: elements of the inner layer of a dense MLP.
        mlp_matrices: matrices that read the MLP's input (2 with a gate, 1 without).
        vocab_size: rows of the embedding, which is also the width of the logits.
        max_context: positions that the model was made for, or that its rotation is stretched to.
        trained_context: positions of its training.
        dtype: dtype of the checkpoint, a key of `BYTES_PER_ELEMENT`.
        noise: noise process of its training, "mask", "uniform", or "random" if all noise is tokens, drawn anew in every
            step.
        sight: attention pattern. "canvas": a row attends to all rows. "noise": to all rows, but a final row only to
            final rows (GIDD). "blocks": to its block and all rows in front of it. "context": to itself and all rows in
            front of it, and to all of its block while it is not final. Blocks count from each sequence's first token.
        cuts_answers: with blocks, True if an answer has the length of the call and ends at an end token, False if it
            ends with a block.
        finishes_blocks: with blocks, True if a block with an end token is finished before the answer ends, unless a
            call says otherwise.
        block_length: rows of a block, if the checkpoint was made for one length; None if the call chooses it.
        windows: by layer, w if rows attend to at most the w - 1 columns in front of themselves, or of their block if
            they attend to all of it. None for a layer without a window. Empty if no layer has one.
        prediction_shift: 1 if row p predicts position p + 1 (Dream), else 0.
        soft_cap: c if attention scores s become c · tanh(s / c); None for no cap.
        global_heads: key/value heads and elements of a head in layers without a window, if they have other heads.
            Their keys are made of values (DiffusionGemma). None if they are as others.
        keys_of_values: True if keys are made of values, so that only values are kept. Of a model with `global_heads`
            False: only these layers are so.
        sink_tokens: learned keys and values of each layer that every row attends to beside the canvas.
        conditioned: True if tokens that are not final are embedded with what the step before predicted there.
        experts: the mixtures of experts; None for a dense model.
        matrices: [out, inner] of the matrices in a layer's record by our own names; they may be streamed. Of a model
            with mixtures: the experts', one behind the other; its other matrices stay on the device.
        weight_shapes: shape of every tensor of the checkpoint, by its official name.
        unread: how names of the checkpoint's other tensors begin, such as those of an image encoder.
        tied: official names of the embedding, and of a head that is the embedding; None if the head has weights.
        own_shapes: shape of every weight, by our own name.
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    mlp_matrices: int
    vocab_size: int
    max_context: int
    trained_context: int
    dtype: str
    noise: str = "mask"
    sight: Sight = "canvas"
    block_length: int | None = None
    cuts_answers: bool = True
    finishes_blocks: bool = False
    windows: tuple[int | None, ...] = ()
    prediction_shift: int = 0
    soft_cap: float | None = None
    global_heads: tuple[int, int] | None = None
    keys_of_values: bool = False
    sink_tokens: int = 0
    conditioned: bool = False
    experts: Experts | None
    matrices: Mapping[str, tuple[int, int]] = field(hash=False)
    weight_shapes: Mapping[str, tuple[int, ...]] = field(hash=False)
    own_shapes: Mapping[str, tuple[int, ...]] = field(hash=False)
    unread: tuple[str, ...] = ()
    tied: tuple[str, str] | None = None

    @property
    def experts_apart(self) -> int:
        """Records of a layer's matrices: one for each expert, or one."""
        return self.experts.count if self.experts else 1

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        """Layers whose matrices are in records, ascending."""
        dense = self.experts.dense if self.experts else ()
        return tuple(layer for layer in range(self.layers) if layer not in dense)

    def place_of(self, own: str) -> tuple[int, str] | None:
        """The layer and the matrix of the weight named `own`; None for a weight without a record."""
        root, _, rest = own.partition(".")
        layer, _, name = rest.removesuffix(".weight").partition(".")
        if root != "blocks" or name not in self.matrices or int(layer) not in self.recorded:
            return None
        return int(layer), name

    def is_matrix(self, own: str) -> bool:
        """Whether the weight named `own` is a matrix of a layer, streamed or not."""
        return own.startswith("blocks.") and own.endswith(".weight") and len(self.own_shapes[own]) == 2

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.weight_shapes.values())

    @property
    def heads_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def block_causal(self) -> bool:
        """True if keys and values of finished blocks never change again."""
        return self.sight in BLOCK_CAUSAL

    @property
    def final_apart(self) -> bool:
        """True if final rows attend to fewer rows than others."""
        return self.sight in ("noise", "context")

    def tiles_logits(self, rows: int) -> bool:
        """Whether the logits of a step's `rows` rows of all sequences are made in tiles: if they are many, and always
        under a rule that reads sums of them alone."""
        return bool(rows) and (self.noise == "random" or rows * self.vocab_size > WHOLE_LOGITS)

    def window(self, layer: int) -> int | None:
        """The window of `layer`; None if it has none."""
        return self.windows[layer] if self.windows else None

    def is_global(self, layer: int) -> bool:
        """Whether the layer has `global_heads`."""
        return self.global_heads is not None and self.window(layer) is None

    @cached_property
    def factors(self) -> frozenset[tuple[int, int]]:
        """[out, inner] of the matrices of layers that rows are multiplied by. Experts count one at a time."""
        each = 1 if self.experts is None else self.experts.count
        sizes = {name: (size[0], size[1]) for name, size in self.own_shapes.items() if self.is_matrix(name)}
        return frozenset((out // each if ".experts_" in name else out, inner) for name, (out, inner) in sizes.items())

    @cached_property
    def kinds(self) -> "tuple[Kind, ...]":
        """The layers by the sizes of their heads and their windows, in the order of their first ones."""
        layers: dict[tuple[bool, int | None], list[int]] = {}
        for layer in range(self.layers):
            layers.setdefault((self.is_global(layer), self.window(layer)), []).append(layer)
        return tuple(
            Kind(self._of_heads(self.global_heads if is_global else None), window, tuple(of))
            for (is_global, window), of in layers.items()
        )

    def streamable(self) -> "tuple[int, Kind] | None":
        """The kind of layers whose features may leave the device, those without a window, and its number; None if there
        are none."""
        return next(((number, kind) for number, kind in enumerate(self.kinds) if kind.window is None), None)

    def _of_heads(self, heads: tuple[int, int] | None) -> "ModelShape":
        if self.global_heads is None:
            return self
        kv_heads, head_dim = heads or (self.kv_heads, self.head_dim)
        made = heads is not None
        return replace(self, kv_heads=kv_heads, head_dim=head_dim, global_heads=None, keys_of_values=made)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Elements of a head, and of a global head if these differ."""
        return (self.head_dim,) if self.global_heads is None else (self.head_dim, self.global_heads[1])

    def kv_read(self, context: int) -> int:
        """Elements of the keys and values that a row attends to, at most `context` columns in each layer, summed over
        layers."""
        return sum(len(kind.layers) * kind.shape.kept_width * kind.columns(context) for kind in self.kinds)

    @property
    def kv_elements(self) -> int:
        """Elements of a row's keys and values in all layers."""
        return sum(len(kind.layers) * kind.shape.kept_width for kind in self.kinds)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kept_width(self) -> int:
        """Elements of a row's keys and values that a layer keeps."""
        return self.kv_width * (1 if self.keys_of_values else 2)


def named_dtype(dtype: object, auto: str) -> str:
    """The name of a dtype that models have: `auto` for "auto". Raises `ValueError` for another one."""
    name = auto if dtype == "auto" else dtype_name(dtype)
    if name not in BYTES_PER_ELEMENT:
        raise unknown_name("dtype", name, ["auto", *BYTES_PER_ELEMENT])
    return name


def tokens_at_once(rows: int) -> int:
    """Tokens of a tile of `rows` rows."""
    return max(VOCABULARY_TILE, TILE_LOGITS // rows)


def rows_at_once(row_elements: int) -> int:
    """Rows whose logits exist whole at once, if a row takes so many."""
    return max(1, WHOLE_LOGITS // row_elements)


class Kind(NamedTuple):
    """Layers with heads of the same sizes and the same window.

    Attributes:
        shape: sizes of the model, as if all layers had these heads.
        window: as `ModelShape.window`.
        layers: the layers, ascending.
    """

    shape: ModelShape
    window: int | None
    layers: tuple[int, ...]

    def columns(self, context: int) -> int:
        """Columns that a row attends to."""
        return min(context, self.window or context)

    def kept(self, context: int, most_rows: int) -> int:
        """Columns whose keys and values later rows may read, if passes go over at most `most_rows` columns, ascending:
        a window before the first one of a pass, and its own."""
        return context if self.window is None else min(context, self.window - 1 + most_rows)
