"""Books: the sizes of a model, for planning, caching and the check of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from tiered.core.buffers import ELEMENT_BYTES

# No model comes near, and every count of bytes is an int64: two sizes, the layers and 4 bytes are 2^60.
MOST_SIZE, MOST_LAYERS = 2**24, 2**10
# Bytes an element takes, by the names that config.json and safetensors users write.
BYTES_PER_ELEMENT: Mapping[str, int] = {name: ELEMENT_BYTES[name] for name in ("float32", "bfloat16", "float16")}
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
        shared_width: elements of the inner layer of what every row goes to beside them; 0 for none.
        biased: True if routers have a bias.
        dense: layers with one MLP in place of a mixture, ascending.
    """

    count: int
    picked: int
    width: int
    shared_width: int = 0
    biased: bool = False
    dense: tuple[int, ...] = ()

    def reached(self, rows: float) -> float:
        """Experts of a layer that so many rows go to, on average, if each row picks them at random. Rows of one text
        agree more than that."""
        return self.count * (1 - (1 - self.picked / self.count) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a diffusion LM, in elements and rows; the same words for every family.

    Attributes:
        family: name of the model family, as in `tiered.models.families`.
        layers: transformer layers.
        width: elements of a row's hidden state.
        heads, kv_heads, head_dim: query heads, key/value heads, elements of a head.
        mlp_width: elements of the inner layer of an MLP that is no expert.
        mlp_matrices: matrices that read the MLP's input (2 with a gate, 1 without).
        vocab_size: rows of the embedding, which is also the width of the logits.
        max_context: positions that the model was made for, or that its rotation is stretched to.
        trained_context: positions of its training.
        dtype: dtype of the checkpoint, a key of `BYTES_PER_ELEMENT`.
        noise: noise process of its training, "mask" or "uniform".
        sight: the rows that a row attends to. "canvas": all rows; "noise": all rows, or the final rows alone if it is
            final (GIDD); "blocks": its block and all rows in front of it; "context": itself and all rows in front of
            it, and all of its block while it is not final. Blocks count from each sequence's first token.
        cuts_answers: with blocks, True if an answer has the length of the call and ends at an end token, False if it
            ends with a block.
        finishes_blocks: with blocks, True if a block with an end is finished before the answer is over, unless a call
            says else.
        block_length: rows of a block, if the checkpoint was made for one length; None if the call chooses it.
        windows: of each layer, w if rows attend to at most the w - 1 columns in front of themselves, or in front of
            their block if they attend to all of it; None for a layer without a window. Empty if no layer has one.
        prediction_shift: 1 if row p predicts position p + 1 (Dream), else 0.
        soft_cap: c if attention scores s become c · tanh(s / c); None for no cap.
        sink_tokens: learned keys and values of each layer that every row attends to beside the canvas.
        experts: the mixtures of experts; None for a dense model.
        matrices: [out, inner] of the matrices in a layer's record by our own names; they may be streamed. Of a model
            with mixtures: the experts', one behind the other; its other matrices stay on the device.
        weight_shapes: shape of every tensor of the checkpoint, by its official name.
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
    sink_tokens: int = 0
    experts: Experts | None = None
    matrices: Mapping[str, tuple[int, int]] = field(hash=False)
    weight_shapes: Mapping[str, tuple[int, ...]] = field(hash=False)
    own_shapes: Mapping[str, tuple[int, ...]] = field(hash=False)

    @property
    def experts_apart(self) -> int:
        """Records that the matrices of a layer are streamed in: one for each expert, or one."""
        return self.experts.count if self.experts else 1

    @property
    def recorded(self) -> tuple[int, ...]:
        """Layers whose matrices lie in a record, ascending."""
        dense = self.experts.dense if self.experts else ()
        return tuple(layer for layer in range(self.layers) if layer not in dense)

    def place_of(self, own: str) -> tuple[int, str] | None:
        """The layer whose record has the weight that we call `own`, and its matrix; None for a weight in no record."""
        root, _, rest = own.partition(".")
        layer, _, name = rest.removesuffix(".weight").partition(".")
        if root != "blocks" or name not in self.matrices or int(layer) not in self.recorded:
            return None
        return int(layer), name

    def is_matrix(self, own: str) -> bool:
        """Whether the weight that we call `own` is a matrix of a layer, streamed or not."""
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

    def window(self, layer: int) -> int | None:
        """The window of `layer`; None if it has none."""
        return self.windows[layer] if self.windows else None

    def columns_read(self, context: int) -> int:
        """The most columns, of `context`, that a row attends to in front of itself, over all layers."""
        return sum(min(context, self.window(layer) or context) for layer in range(self.layers))

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim
