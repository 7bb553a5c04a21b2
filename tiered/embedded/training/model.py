"""The embedded model as it learns: fresh weights, and a forward that keeps its gradients.

The layers are `tiered.models.llada`'s own pieces, so what is trained is what the runtime runs. The runtime's forward
itself updates hidden states in place and keeps no graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tiered.models.llada import LLaDA
from tiered.rows import Rows


@dataclass(frozen=True, slots=True)
class Tap:
    """What the auxiliary losses read in one layer: its input rows, and its rotated queries and keys."""

    hidden: Float[Tensor, "batch length width"]
    queries: Float[Tensor, "batch heads length head_dim"]
    keys: Float[Tensor, "batch kv_heads length head_dim"]


def new_model(config: Mapping[str, Any], seed: int) -> LLaDA:
    """Fresh weights, with gradients; `config` as in config.json."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LLaDA.from_config(config).requires_grad_(True)
        nn.init.normal_(model.wte.weight, std=0.5)
        nn.init.normal_(model.ff_out.weight, std=0.02)
        for layer in range(model.shape.layers):
            # A residual branch that begins at zero leaves the embedding untouched until it has something to say.
            nn.init.zeros_(model.block(layer).attn_out.weight)
            nn.init.zeros_(model.block(layer).ff_out.weight)
    return model


def forward(
    model: LLaDA,
    ids: Int[Tensor, "batch length"],
    positions: Int[Tensor, "shared length"],
    *,
    first: int,
    tap_layer: int,
) -> tuple[Float[Tensor, "batch rows width"], Tap]:
    """Rows from `first` on behind the last layer, to be given to `model.logits`, and the tap of layer `tap_layer`."""
    rotary, length, last = model.rotary(positions), ids.shape[1], model.shape.layers - 1
    assert tap_layer < last, "the last layer has no queries before `first`"
    hidden, tap = model.embed(ids), None
    for layer in range(model.shape.layers):
        normed = model.attention_norm(layer, hidden)
        keys, values = model.keys_values(layer, normed, rotary)
        rows = Rows.span(first if layer == last else 0, length)
        queries = model.queries(layer, normed[:, rows.start :], rotary.at(rows))
        if layer == tap_layer:
            tap = Tap(hidden, queries, keys)
        mixed = model.attend(layer, queries, keys, values, None)
        hidden = hidden[:, rows.start :] + model.attention_out(layer, mixed)
        hidden = hidden + model.feed_forward(layer, hidden)
    assert tap is not None
    return hidden, tap
