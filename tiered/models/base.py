"""A diffusion LM without its loop over layers: the pieces of a layer, each over any rows.

The forward owns the order of the pieces, the residual stream and the store; a family owns the arithmetic. The pieces
here are Llama's: norm → attention → norm → MLP with a gate. A family overrides pieces that differ.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows, Heads, KeyValue
from tiered.kernels.gate_mul_ref import Activation, gate_mul
from tiered.kernels.keys_of_values import Keys, KeysOfValues
from tiered.kernels.projection import joined_bias, project, project_joined
from tiered.kernels.rms_norm_ref import Hidden, rms_norm
from tiered.kernels.rotate_ref import HeadNorms
from tiered.kernels.store_table import StoreTable
from tiered.models.attention import Joined, Limits, PartOutput, attend, attend_apart, attend_part
from tiered.models.layout import ModelConfig
from tiered.models.noise import Noise
from tiered.models.rope import Rotary
from tiered.models.shape import ModelShape

_ALL = slice(None)
M = TypeVar("M", bound="DiffusionModel")
KeyHeads = Float[Tensor, "batch kv_heads rows head_dim"]
Projected = Float[Tensor, "batch rows out"]
# Called with a layer, the experts of its rows, on the host, and each of these experts once, ascending.
RouterProbe = Callable[[int, Int[Tensor, "rows picked"], list[int]], None]


class Projection(NamedTuple):
    """A projection whose weight is a part of another's, with the attributes of `nn.Linear`."""

    weight: Float[Tensor, "out inner"] | CodedRows
    bias: Float[Tensor, " out"] | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, rounded to the model's dtype, then scaled by the weight. Unless `offset` is
    None, it is scaled by offset + weight before rounding."""

    offset: ClassVar[float | None] = None

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1 - (self.offset or 0.0)))
        self.eps = eps

    def forward(self, hidden: Hidden, branch: Hidden | None = None) -> Hidden:
        """Of `hidden`, once `branch` is added to it in place."""
        norm = for_device(rms_norm, hidden.device)
        return norm(hidden, self.weight, self.eps, offset=self.offset, branch=branch)


class Block(nn.Module):
    """The weights of one layer."""

    def __init__(self, sizes: Mapping[str, tuple[int, ...]], norm: Callable[[int], RMSNorm]) -> None:
        """`sizes`: shape of each weight by our own name. `norm`: makes the norm of a width."""
        super().__init__()
        for name, size in sizes.items():
            module, _, kind = name.partition(".")
            if not kind:
                setattr(self, name, nn.Parameter(torch.zeros(size)))
            elif len(size) == 2:
                setattr(self, module, nn.Linear(size[1], size[0], bias=f"{module}.bias" in sizes))
            elif kind == "weight":
                setattr(self, module, norm(size[0]))
        _as_attributes(self)

    def join_biases(self) -> None:
        """Put the biases of queries, keys and values one behind the other, so that one addition takes them all."""
        projections: list[Any] = [getattr(self, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        biases = [projection.bias for projection in projections if getattr(projection, "bias", None) is not None]
        if len(biases) == len(projections):
            parts = torch.cat(biases).split([len(bias) for bias in biases])
            for projection, part in zip(projections, parts, strict=True):
                projection.bias = nn.Parameter(part, requires_grad=False)


class Blocks(nn.ModuleList):
    """The blocks of all layers. A ModuleList looks a number up as text, which takes eight calls."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(blocks)
        self._by_number = (*self._modules.values(),)

    def __getitem__(self, idx: int | slice) -> Any:
        return self._by_number[idx]


class DiffusionModel(nn.Module):
    """The weights and the arithmetic of a family. Parameters have no gradient. Constructed under
    `torch.device("meta")`, it takes no memory before the weights arrive.

    Attributes:
        read_config: reads config.json (official keys); raises ValueError for a setting that the forward lacks.
        noise: noise that answers begin with and that steps remove; None for masks alone.
        mask_token_id, eos_token_id, pad_token_id: ids of special tokens.
        ends: ids that end an answer, the end-of-sequence token first.
    """

    read_config: ClassVar[Callable[[Mapping[str, object]], ModelConfig]]
    _norm: ClassVar[type[RMSNorm]] = RMSNorm
    _activation: ClassVar[Activation] = "silu"
    blocks: Any  # `Blocks`
    ln_f: Any
    config: Any
    shape: ModelShape
    noise: Noise | None = None
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = config.shape
        self.mask_token_id = config.mask_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        # Not `nn.Embedding(...)`: it draws weights, and to do so on the meta device torch imports its compiler.
        self.wte = nn.Embedding.from_pretrained(torch.zeros(shape.vocab_size, shape.width))
        norm = partial(self._norm, eps=config.norm_eps)
        sizes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shape.layers)]
        for own, size in shape.own_shapes.items():
            if own.startswith("blocks."):
                _, layer, name = own.split(".", 2)
                sizes[int(layer)][name] = size
        self.blocks = Blocks(Block(of_layer, norm) for of_layer in sizes)
        self.ln_f = norm(shape.width)
        if not config.head_tied:
            self.ff_out = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self._has_biases = any(own.endswith(".bias") for own in shape.own_shapes)
        self.requires_grad_(False)
        _as_attributes(self)

    @property
    def ends(self) -> tuple[int, ...]:
        return self.eos_token_id, *self.config.more_ends

    @classmethod
    def from_config(cls: type[M], config: Mapping[str, Any]) -> M:
        return cls(cls.read_config(config))

    def rotary(self, positions: Int[Tensor, "batch length"], is_global: bool = False) -> Rotary:
        """The rotation at these positions, of heads or of global heads."""
        return Rotary.of(positions, self.shape.head_dim, self.config.rotation)

    def embed(self, ids: Int[Tensor, "batch rows"]) -> Hidden:
        weight: Any = self.wte.weight
        if isinstance(weight, CodedRows):
            return weight[ids].values()
        return self.wte(ids)

    def condition(self, hidden: Hidden, soft: Hidden | None) -> Hidden:
        """Embeddings of tokens that are not final, of a `ModelShape.conditioned` model. `soft`: `soft_tokens` of the
        step before; None in a block's first step."""
        return hidden

    def soft_tokens(self, chances: Float[Tensor, "batch rows tokens"], tokens: slice = _ALL) -> Hidden:
        """The sum of the embeddings of all tokens, or of these, by their `chances`; for `ModelShape.conditioned` models
        alone."""
        raise NotImplementedError

    def scale_layer(self, layer: int, hidden: Hidden, final: "bool | Bool[Tensor, 'batch rows 1']") -> None:
        """Scale what a layer of a `ModelShape.conditioned` model returns, in place. `final`: whether tokens are final,
        of all rows or of each."""

    def attention_norm(self, layer: int, hidden: Hidden, branch: Hidden | None = None) -> Hidden:
        """The rows that attention reads, once `branch` is added to `hidden` in place."""
        return self.blocks[layer].attn_norm(hidden, branch)

    def mlp_norm(self, layer: int, hidden: Hidden, branch: Hidden | None = None) -> Hidden:
        """The rows that the MLP reads, once `branch` is added to `hidden` in place."""
        return self.blocks[layer].ff_norm(hidden, branch)

    def keys(self, layer: int, normed: Hidden, rotary: Rotary) -> KeyHeads:
        """Rotated keys of the rows."""
        norm = getattr(self.blocks[layer], "k_norm", None)
        return rotary.rotate(self._normed_heads(self._of_attention(layer, "k_proj", normed), norm))

    def values(self, layer: int, normed: Hidden) -> KeyHeads:
        return self._heads(self._of_attention(layer, "v_proj", normed))

    def keys_values(self, layer: int, normed: Hidden, rotary: Rotary) -> tuple[KeyHeads, KeyHeads]:
        return self.keys(layer, normed, rotary), self.values(layer, normed)

    def queries_keys_values(
        self, layer: int, normed: Hidden, rotary: Rotary
    ) -> tuple[Heads, KeyHeads, KeyHeads] | None:
        """`queries` and `keys_values` of the same rows by one product (`project_joined`); None if it does not do."""
        block, shape = self.blocks[layer], self.shape
        product = self._joined(normed, *(self._projection(layer, name) for name in ("q_proj", "k_proj", "v_proj")))
        if product is None:
            return None
        rotated, values = product.split_with_sizes([shape.heads_width + shape.kv_width, shape.kv_width], dim=-1)
        norm, norms = getattr(block, "q_norm", None), None
        if norm is not None and (len(norm.weight) > shape.head_dim or rotary.elements < shape.head_dim):
            queries, keys = rotated.split_with_sizes([shape.heads_width, shape.kv_width], dim=-1)
            queries, keys = self._normed_heads(queries, norm), self._normed_heads(keys, block.k_norm)
            return rotary.rotate_queries(queries), rotary.rotate(keys), self._heads(values)
        if norm is not None:
            norms = HeadNorms(norm.weight, block.k_norm.weight, shape.heads, norm.eps, norm.offset)
        heads = rotary.rotate(self._heads(rotated), norms)
        queries, keys = heads.split_with_sizes([shape.heads, shape.kv_heads], dim=1)
        return rotary.grown(queries), keys, self._heads(values)

    def keys_of_values(self, layer: int, values: KeyValue, rotary: Rotary) -> KeysOfValues:
        """Keys of all columns, in layers with `ModelShape.global_heads`."""
        raise NotImplementedError

    def queries(self, layer: int, normed: Hidden, rotary: Rotary) -> Heads:
        """Rotated queries of the rows."""
        norm = getattr(self.blocks[layer], "q_norm", None)
        return rotary.rotate_queries(self._normed_heads(self._of_attention(layer, "q_proj", normed), norm))

    def attend(self, layer: int, queries: Heads, keys: Keys, values: KeyValue, limits: Limits) -> Joined:
        """Attention of the rows over the sinks and these keys of the layer, heads concatenated."""
        return attend(queries, keys, values, limits, **self._softened(layer))

    def attend_part(
        self, layer: int, queries: Heads, keys: Keys, values: KeyValue, limits: Limits, *, sinks: bool = False
    ) -> PartOutput:
        """Attention over one of several parts. Only one of them has `sinks`."""
        none = {} if sinks else {"sink_keys": None, "sink_values": None}
        return attend_part(queries, keys, values, limits, **self._softened(layer) | none)

    def attend_apart(self, layer: int, queries: Heads, table: StoreTable) -> Joined:
        """Attention of rows of several calls, each over its own stores."""
        return attend_apart(queries, table, layer, **self._softened(layer))

    def sink_keys(self, layer: int) -> Float[Tensor, "heads sinks head_dim"] | None:
        """Unrotated keys that every row of `layer` attends to beside the canvas; None if there are none."""
        return None

    def attention_out(self, layer: int, mixed: Joined) -> Hidden:
        """The attention branch, to be added to the residual stream (`ATTN_OUT`)."""
        return self._project(mixed, self.blocks[layer].attn_out)

    def feed_forward(
        self, layer: int, hidden: Hidden, probe: RouterProbe | None = None, normed: Hidden | None = None
    ) -> Hidden:
        """The MLP branch, to be added to the residual stream (`FFN_OUT`). `probe` is called with the picks of a router;
        None for no call. `normed`: `mlp_norm` of the rows; None to compute it here."""
        block, normed = self.blocks[layer], self.mlp_norm(layer, hidden) if normed is None else normed
        return self._gated(normed, block.ff_proj, block.up_proj, block.ff_out)

    def logits(self, hidden: Hidden, tokens: slice = _ALL) -> Float[Tensor, "batch rows vocab"]:
        """float32 logits of the last layer's output, of all tokens or of these."""
        weight: Any = (self.wte if self.config.head_tied else self.ff_out).weight
        return project(self.ln_f(hidden), weight if tokens == _ALL else weight[tokens]).float()

    def _project(self, rows: Float[Tensor, "batch rows inner"], projection: nn.Linear | Projection) -> Projected:
        return self._finished(project(rows, projection.weight), projection)

    def _joined(
        self, rows: Float[Tensor, "batch rows inner"], *projections: nn.Linear | Projection
    ) -> Projected | None:
        """The results of several projections side by side, by one product; None as `project_joined`."""
        product = project_joined(rows, [projection.weight for projection in projections])
        return None if product is None else self._finished(product, *projections)

    def _finished(self, product: Projected, *projections: nn.Linear | Projection) -> Projected:
        """Products with the weights of projections, side by side, plus their biases; all have one, or none."""
        if not self._has_biases:
            return product
        biases = [bias for projection in projections if (bias := projection.bias) is not None]
        if not biases:
            return product
        # In place: the product is as large as the result, and has no other reference.
        if (whole := biases[0] if len(biases) == 1 else joined_bias(biases)) is not None:
            return product.add_(whole)
        for part, bias in zip(product.split([len(bias) for bias in biases], dim=-1), biases, strict=True):
            part.add_(bias)
        return product

    def _projection(self, layer: int, name: str) -> nn.Linear | Projection:
        """The projection to queries, keys or values (`name`)."""
        return getattr(self.blocks[layer], name)

    def _of_attention(self, layer: int, name: str, normed: Hidden) -> Projected:
        return self._project(normed, self._projection(layer, name))

    def _gated(self, normed: Hidden, gate: nn.Linear, up: nn.Linear, out: nn.Linear) -> Hidden:
        multiply = for_device(gate_mul, normed.device)
        product = self._joined(normed, gate, up)
        # No name keeps a factor alive until the last projection.
        if product is None:
            gated = multiply(self._project(normed, gate), self._project(normed, up), self._activation)
        else:
            half = product.shape[-1] // 2
            gated = multiply(product[..., :half], product[..., half:], self._activation)
        del product
        return self._project(gated, out)

    def _softened(self, layer: int) -> dict[str, Any]:
        """Arguments of `attend` for a soft cap and sink tokens."""
        return {}

    def _normed_heads(self, projected: Joined, norm: nn.Module | None) -> Heads:
        """Heads of `projected`, normed over their full width or, by a norm of one head's width, head by head."""
        if norm is None:
            return self._heads(projected)
        weight: Any = norm.weight
        if len(weight) < projected.shape[-1]:
            # A part of a product has its rows apart. A product with rows innermost is copied.
            rows = projected if projected.stride(-1) == 1 else projected.contiguous()
            heads = norm(rows.unflatten(-1, (-1, len(weight))).flatten(0, 1))
            return self._heads(heads.view(projected.shape))
        return self._heads(norm(projected))

    def _heads(self, projected: Joined) -> Heads:
        return projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def _as_attributes(module: nn.Module) -> None:
    """Let the modules in `module` be plain attributes, too, until another is set: reading one is no call of Python."""
    module.__dict__ |= module._modules


def head(model: DiffusionModel, hidden: Hidden) -> Float[Tensor, "batch rows vocab"]:
    """float32 logits of the last layer's output; NaN at rows without a finite norm. Overwrites `hidden`."""
    return model.logits(without_norm_marked(hidden))


def without_norm_marked(hidden: Hidden) -> Hidden:
    """`hidden` with NaN in rows without a finite norm, in place."""
    # If the norm of a row overflows float32, the last norm would return zeros, and equal logits would look valid. So
    # such a row becomes NaN here; all others get 0 added.
    return hidden.add_(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32).mul_(0))
