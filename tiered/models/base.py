"""What the forward asks of a model family: the pieces of a layer, each over any rows.

The forward owns the order of the pieces, the residual stream and the store; a family owns the arithmetic. So one path
through `tiered.forward.forward` serves every policy and every family.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tiered.models.attention import attend
from tiered.models.noise import Noise
from tiered.models.rope import Rotary
from tiered.models.shape import ModelShape


class DiffusionModel(nn.Module, ABC):
    """A dense diffusion LM without its loop over layers. Parameters have no gradient.

    Attributes:
        shape: sizes and weight names.
        noise: what answers begin as and how it goes away, where that is not masks alone; None: masks.
        mask_token_id, eos_token_id, pad_token_id: special tokens of the vocabulary.
    """

    shape: ModelShape
    noise: Noise | None = None
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DiffusionModel":
        """The model that `config` (config.json, official keys) describes; raises `ValueError` for what it lacks."""

    @abstractmethod
    def parameter_name(self, official: str) -> str:
        """Our own name of the weight that the checkpoint calls `official`."""

    @abstractmethod
    def rotary(self, positions: Int[Tensor, "batch length"]) -> Rotary:
        """RoPE angles of `positions`."""

    @abstractmethod
    def embed(self, ids: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch rows width"]:
        """Input of the first layer."""

    @abstractmethod
    def attention_norm(
        self, layer: int, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch rows width"]:
        """What queries, keys and values of `layer` are projected from."""

    @abstractmethod
    def keys(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        """Keys (rotated) of the rows."""

    @abstractmethod
    def values(
        self, layer: int, normed: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        """Values of the rows."""

    def keys_values(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> tuple[Float[Tensor, "batch kv_heads rows head_dim"], Float[Tensor, "batch kv_heads rows head_dim"]]:
        """Keys (rotated) and values of the rows."""
        return self.keys(layer, normed, rotary), self.values(layer, normed)

    @abstractmethod
    def queries(
        self, layer: int, normed: Float[Tensor, "batch rows width"], rotary: Rotary
    ) -> Float[Tensor, "batch heads rows head_dim"]:
        """Queries (rotated) of the rows."""

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "batch heads rows head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        values: Float[Tensor, "batch kv_heads length head_dim"],
        key_mask: Bool[Tensor, "batch 1 1 length"] | None,
        visible: Int[Tensor, "batch rows"] | None = None,
    ) -> Float[Tensor, "batch rows heads_width"]:
        """Attention of the rows over the keys of the layer. Families with a soft cap, sink tokens or final tokens that
        see no others override it.

        Args:
            key_mask: False at keys that nobody may read.
            visible: keys, from the first on, that each row may read; None: all. Never given to a family whose shape
                does not say `noise_masked`.
        """
        assert visible is None, "every row of the family sees every key"
        return attend(queries, keys, values, key_mask)

    def sink_keys(self, layer: int) -> Float[Tensor, "heads sinks head_dim"] | None:
        """Keys, not rotated, that every row of `layer` attends to beside those of the canvas; None: there are none."""
        return None

    @abstractmethod
    def attention_out(
        self, layer: int, mixed: Float[Tensor, "batch rows heads_width"]
    ) -> Float[Tensor, "batch rows width"]:
        """The attention branch, as it is added to the residual stream (`ATTN_OUT`)."""

    @abstractmethod
    def feed_forward(self, layer: int, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows width"]:
        """The MLP branch with its norm, as it is added to the residual stream (`FFN_OUT`)."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "batch rows width"]) -> Float[Tensor, "batch rows vocab"]:
        """float32 logits of the last layer's output."""
