"""The pieces of a layer as named ranges, for a call that is recorded."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from tiered.core.ops import Op
from tiered.core.spans import active, spanned
from tiered.models.base import DiffusionModel

# Methods of `DiffusionModel` that compute for a step. Who calls `queries`, `keys_values`,
# `queries_keys_values` or `attend` opens a range.
PIECES: Mapping[str, Op] = MappingProxyType(
    {
        "embed": Op.EMBED,
        "condition": Op.EMBED,
        "attention_norm": Op.QKV,
        "keys": Op.QKV,
        "values": Op.QKV,
        "attention_out": Op.ATTENTION_OUT,
        "mlp_norm": Op.RESIDUAL,
        "feed_forward": Op.MLP,
        "scale_layer": Op.RESIDUAL,
        "logits": Op.HEAD,
        "soft_tokens": Op.PROPOSE,
    }
)


def traced(model: DiffusionModel) -> DiffusionModel:
    """`model`, or a wrapper whose pieces are ranges while a call is recorded."""
    return model if active() is None else cast(DiffusionModel, _TracedModel(model))


class _TracedModel:
    """A wrapper of `model` whose pieces are ranges, so families and policies need no code for recording."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        for name, op in PIECES.items():
            setattr(self, name, spanned(op)(getattr(model, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
