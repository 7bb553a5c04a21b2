"""How far the attention of centroids has moved: in float64, by the definitions, from all that was stored and is now."""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor


def scores64(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> Float64[Tensor, "batch heads clusters all"]:
    """Scores of all columns, then of the sinks; −inf where masked."""
    keys = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries.double() @ keys.mT
    if sink_keys is not None:
        scores = torch.cat([scores, queries.double() @ sink_keys.double().mT], dim=-1)
    scores /= queries.shape[-1] ** 0.5
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if key_mask is not None:
        scores[..., : keys.shape[2]].masked_fill_(~key_mask[:, None, None], -torch.inf)
    return scores


def full_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    last_keys: Float[Tensor, "batch kv_heads length head_dim"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    *,
    last_queries: Float[Tensor, "batch heads clusters head_dim"] | None = None,
) -> Float64[Tensor, "batch clusters"]:
    """KL of the attention of `queries` over `keys` from that of `last_queries` (None for `queries`) over `last_keys`,
    mean over heads."""
    rest = key_mask, soft_cap, sink_keys
    new = scores64(queries, keys, *rest).log_softmax(-1)
    old = scores64(queries if last_queries is None else last_queries, last_keys, *rest).log_softmax(-1)
    return (new.exp() * (new - old)).where(new > -torch.inf, 0.0).sum(-1).mean(1)


def full_output_drift(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    then: tuple[Float[Tensor, "batch kv_heads length head_dim"], ...],
    now: tuple[Float[Tensor, "batch kv_heads length head_dim"], ...],
    written: Bool[Tensor, "batch length"],
    key_mask: Bool[Tensor, "batch length"] | None = None,
    soft_cap: float | None = None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
) -> tuple[Float64[Tensor, "batch clusters"], Float64[Tensor, "batch clusters"]]:
    """The move of the output that the `written` columns give `queries`, over all heads, and the length of that output
    now. `then` and `now`: keys and values."""
    given = []
    for keys, values in (then, now):
        shares = scores64(queries, keys, key_mask, soft_cap, sink_keys).softmax(-1)[..., : keys.shape[2]]
        values = values.double().repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
        given.append(shares * written[:, None, None] @ values)
    moved, size = (each.transpose(1, 2).flatten(2).norm(dim=-1) for each in (given[1] - given[0], given[1]))
    return moved, size
