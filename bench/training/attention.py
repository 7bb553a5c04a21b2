"""Attention of the GIDD family that keeps its gradients: the arithmetic of `tiered.kernels.block_attention`.

The runtime's own attention works in place, a head at a time, and keeps no graph. Scores here are whole, because
contexts of training are short. The backward is written by hand, because tensors that autograd would keep and pass over
cost more than the rest of a layer.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def trained_attention(
    queries: Float[Tensor, "batch heads rows head_dim"],
    keys: Float[Tensor, "batch heads length head_dim"],
    values: Float[Tensor, "batch heads length head_dim"],
    *,
    soft_cap: float,
    sinks: tuple[Float[Tensor, "heads sinks head_dim"], Float[Tensor, "heads sinks head_dim"]],
    unseen: Bool[Tensor, "batch rows length"],
) -> Float[Tensor, "batch rows heads_width"]:
    """The mixed values of each query, heads concatenated, in float32.

    Args:
        queries, keys, values: rotated, with a key head for each query head.
        soft_cap: c of the scores c · tanh(q·k / √head_dim / c).
        sinks: keys and values that every row sees beside the others.
        unseen: True if a row may not see a key.
    """
    batch, count = len(queries), sinks[0].shape[1]
    keys, values = (
        torch.cat([sink.expand(batch, -1, -1, -1), of_rows], 2)
        for sink, of_rows in zip(sinks, (keys, values), strict=True)
    )
    unseen = torch.nn.functional.pad(unseen, (count, 0))[:, None]
    scale = queries.shape[-1] ** -0.5 / soft_cap
    mixed: Tensor = _Capped.apply(queries * scale, keys, values, soft_cap, unseen)  # type: ignore[assignment]
    return mixed.transpose(1, 2).flatten(2)


class _Capped(torch.autograd.Function):
    """softmax(c · tanh(queries · keysᵀ)) · values over the keys that a row sees."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, soft_cap: float, unseen: Tensor) -> Tensor:
        bounded = (queries @ keys.mT).tanh_()
        # No maximum is subtracted: exp(c) fits float32 by far for caps up to 80, and sinks keep every total above 0.
        powers = (bounded * soft_cap).exp_().masked_fill_(unseen, 0.0)
        total = powers.sum(-1, keepdim=True)
        mixed = (powers @ values).div_(total)
        ctx.save_for_backward(queries, keys, values, bounded, powers, total, mixed)
        ctx.soft_cap = soft_cap
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, bounded, powers, total, mixed = ctx.saved_tensors
        gradient = gradients[0] / total
        of_values = powers.mT @ gradient
        # The gradient of a softmax: p · (gradient by the key's value − its mean over the row); of tanh: 1 − tanh².
        of_scores = (gradient @ values.mT).sub_((gradient * mixed).sum(-1, keepdim=True)).mul_(powers)
        of_scores = of_scores.addcmul_(of_scores * bounded, bounded, value=-1).mul_(ctx.soft_cap)
        return of_scores @ keys, of_scores.mT @ queries, of_values, None, None
