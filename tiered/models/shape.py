"""Books: a model's sizes, as planning, caching and weight checking need them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Literal

# What no model comes near, and what keeps every count of bytes an int64: two sizes, the layers and 4 bytes are 2^60.
MOST_SIZE, MOST_LAYERS = 2**24, 2**10
# Bytes an element takes, by the names that config.json and safetensors users write.
BYTES_PER_ELEMENT: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
Sight = Literal["canvas", "blocks", "context"]
CANVAS: frozenset[Sight] = frozenset({"canvas"})
BLOCK_CAUSAL: frozenset[Sight] = frozenset({"blocks", "context"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense diffusion LM, in elements and rows; the same words for every family.

    Attributes:
        family: name of the model family, as in `tiered.models.families`.
        layers: transformer layers.
        width: hidden size (the length of a row's hidden state).
        heads, kv_heads, head_dim: query heads, key/value heads, elements of a head.
        mlp_width: elements of the MLP's inner layer.
        mlp_matrices: matrices that read the MLP's input (2 with a gate, 1 without).
        vocab_size: rows of the embedding, which is also the width of the logits.
        max_context: positions that the model was made for, or its rotation is stretched to.
        trained_context: positions that it was trained on.
        dtype: dtype of the checkpoint, a key of `BYTES_PER_ELEMENT`.
        noise: noise process the model was trained on, "mask" or "uniform".
        sight: what a row sees. "canvas": every row; "blocks": its block and all in front of it; "context": itself and
            all in front of it, and where it is not final yet all of its block. Blocks count from each sequence's first
            token.
        cuts_answers: where rows see blocks: whether an answer has the length that was asked for, and is over with an
            end token; else it is over with a block.
        block_length: of blocks, where the checkpoint was made for one length; None: a call says it.
        windows: of each layer, w where rows see no further than the w - 1 columns in front of themselves; rows that see
            all of their block, in front of that. None: a layer without. Empty: no layer has a window.
        noise_masked: whether final tokens attend to final tokens alone (GIDD), where `sight` is the canvas.
        prediction_shift: 1 where row p predicts position p + 1 (Dream), else 0.
        soft_cap: c where attention scores s become c · tanh(s / c); None where they stay as they are.
        sink_tokens: learned keys and values of each layer that every row attends to beside those of the canvas.
        matrices: of a layer, by our own names, as [out, inner]: what may be kept in codes, and be streamed.
        weight_shapes: every tensor of the checkpoint, by its official name, with its shape.
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
    windows: tuple[int | None, ...] = ()
    noise_masked: bool = False
    prediction_shift: int = 0
    soft_cap: float | None = None
    sink_tokens: int = 0
    matrices: Mapping[str, tuple[int, int]] = field(hash=False)
    weight_shapes: Mapping[str, tuple[int, ...]] = field(hash=False)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(prod(shape) for shape in self.weight_shapes.values())

    @property
    def heads_width(self) -> int:
        """Elements of one row's queries in one layer."""
        return self.heads * self.head_dim

    @property
    def block_causal(self) -> bool:
        """Whether keys and values of finished blocks never change again."""
        return self.sight in BLOCK_CAUSAL

    def window(self, layer: int) -> int | None:
        """That of `layer`; None: it has none."""
        return self.windows[layer] if self.windows else None

    def columns_read(self, context: int) -> int:
        """Of `context` columns those that a row sees in front of itself at most, over all layers."""
        return sum(min(context, self.window(layer) or context) for layer in range(self.layers))

    @property
    def kv_width(self) -> int:
        """Elements of one row's key, or value, in one layer."""
        return self.kv_heads * self.head_dim
