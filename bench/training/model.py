"""The embedded models as they learn: fresh weights, and a forward that keeps its gradients.

The layers are the families' own pieces, as in the runtime. The runtime's forward itself updates hidden states in place
and keeps no graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tiered.core.rows import Rows
from tiered.models.attention import Limits
from tiered.models.base import DiffusionModel
from tiered.models.families import family_of
from tiered.models.gidd import Gidd
from tiered.models.llada import LLaDA
from tiered.models.sdar import Sdar
from training.attention import trained_attention


@dataclass(frozen=True, slots=True)
class Tap:
    """Tensors of one layer for the auxiliary losses: its input rows, and its rotated queries and keys."""

    hidden: Float[Tensor, "batch length width"]
    queries: Float[Tensor, "batch heads length head_dim"]
    keys: Float[Tensor, "batch kv_heads length head_dim"]


def new_model(config: Mapping[str, Any], seed: int) -> DiffusionModel:
    """Fresh weights, with gradients; `config` as in config.json.

    Raises:
        ValueError: a family other than LLaDA, GIDD and SDAR, or an SDAR without a block length.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family_of(config).resolve_loader().from_config(config).requires_grad_(True)
        if not isinstance(model, LLaDA | Gidd | Sdar):
            raise ValueError(f"models of LLaDA, GIDD and SDAR are trained here, not {model.shape.family!r}")
        if model.shape.block_causal and model.shape.block_length is None:
            raise ValueError("config.json has no block_size: a model learns blocks of one length")
        nn.init.normal_(model.wte.weight, std=0.5)
        nn.init.normal_(model.ff_out.weight, std=0.02)
        for linear in [linear for block in model.blocks for linear in (block.attn_out, block.ff_out)]:
            # A residual branch that begins at zero leaves the embedding untouched until it has learned something.
            nn.init.zeros_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
    return model


@torch.no_grad()
def adopt(model: DiffusionModel, source: DiffusionModel, ids: Int[Tensor, "batch length"]) -> None:
    """Give `model` the weights of `source`; a smaller matrix fills a corner. Norms of queries and keys that `source`
    lacks get the root mean square of its queries and keys, over heads and the tokens `ids`."""
    known = dict(source.named_parameters())
    for name, own in model.named_parameters():
        if name in known:
            corner = tuple(slice(size) for size in known[name].shape)
            own[corner] = known[name]
    if not isinstance(model, Sdar) or isinstance(source, Sdar):
        return
    rotary, hidden = source.rotary(torch.arange(ids.shape[1])[None]), source.embed(ids)
    for layer, block in enumerate(model.blocks):
        normed = source.attention_norm(layer, hidden)
        queries, (keys, values) = source.queries(layer, normed, rotary), source.keys_values(layer, normed, rotary)
        for norm, heads in ((block.q_norm, queries), (block.k_norm, keys)):
            norm.weight.fill_(heads.square().mean().sqrt())
        hidden = hidden + source.attention_out(layer, source.attend(layer, queries, keys, values, Limits()))
        hidden = hidden + source.feed_forward(layer, hidden)


def forward(
    model: DiffusionModel,
    ids: Int[Tensor, "batch length"],
    positions: Int[Tensor, "shared length"],
    *,
    clean: Int[Tensor, " batch"],
    first: int,
    tap_layer: int,
) -> tuple[Float[Tensor, "batch rows width"], Tap]:
    """Rows from `first` on behind the last layer, for `model.logits`, and the tap of layer `tap_layer`.

    Args:
        clean: number of final tokens at the beginning of each row. In GIDD models they see each other alone.
    """
    rotary, length, last = model.rotary(positions), ids.shape[1], model.shape.layers - 1
    assert tap_layer < last, "the last layer has no queries before `first`"
    final = torch.arange(length) < clean[:, None]
    unseen = final[:, :, None] & ~final[:, None, :]
    hidden, tap = model.embed(ids), None
    for layer in range(model.shape.layers):
        normed = model.attention_norm(layer, hidden)
        keys, values = model.keys_values(layer, normed, rotary)
        rows = Rows.span(first if layer == last else 0, length)
        queries = model.queries(layer, normed[:, rows.within.start :], rotary.at(rows))
        if layer == tap_layer:
            tap = Tap(hidden, queries, keys)
        if isinstance(model, Gidd):
            cap, sinks = model.shape.soft_cap, model.sinks(layer)
            assert cap is not None
            seen = unseen[:, rows.within.start :]
            mixed = trained_attention(queries, keys, values, soft_cap=cap, sinks=sinks, unseen=seen)
        else:
            mixed = model.attend(layer, queries, keys, values, Limits())
        hidden = hidden[:, rows.within.start :] + model.attention_out(layer, mixed)
        hidden = hidden + model.feed_forward(layer, hidden)
    assert tap is not None
    return hidden, tap
