"""The forward in training of families whose rows see blocks: all blocks of an answer in one pass.

A block that is denoised sees the finished text in front of it, and itself under noise. So the text goes through the
layers as it is, and behind it a noised copy of the columns of all answers. A row of the copy sees the text of earlier
blocks, and the copy of its own block (as in arXiv 2503.09573).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.models.base import DiffusionModel
from training.model import Tap


def forward_in_blocks(
    model: DiffusionModel,
    text: Int[Tensor, "batch length"],
    noised: Int[Tensor, "batch length"],
    positions: Int[Tensor, "shared length"],
    *,
    first: int,
    tap_layer: int,
) -> tuple[Float[Tensor, "batch rows width"], Tap]:
    """Rows of the noised columns from `first` on behind the last layer, for `model.logits`, and the tap of layer
    `tap_layer`. The tap has the copy in place of the text in its columns."""
    block, length, last = model.shape.block_length, text.shape[1], model.shape.layers - 1
    assert block is not None and tap_layer < last, "blocks have a length, and the last layer no queries of the text"
    start = first // block * block
    columns = torch.cat([torch.arange(length), torch.arange(start, length)])
    sees, one_view = _sees(columns, length, block), torch.cat([torch.arange(start), torch.arange(length, len(columns))])
    rotary = model.rotary(positions[:, columns])
    hidden, tap = model.embed(torch.cat([text, noised[:, start:]], dim=1)), None
    for layer in range(model.shape.layers):
        normed = model.attention_norm(layer, hidden)
        keys, values = model.keys_values(layer, normed, rotary)
        rows = Rows.span(length + first - start if layer == last else 0, len(columns))
        queries = model.queries(layer, normed[:, rows.within.start :], rotary.at(rows))
        if layer == tap_layer:
            by_head = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
            tap = Tap(hidden[:, one_view], queries[:, :, one_view], by_head[:, :, one_view])
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=sees[rows.within.start :], enable_gqa=True
        )
        hidden = hidden[:, rows.within.start :] + model.attention_out(layer, mixed.transpose(1, 2).flatten(2))
        hidden = hidden + model.feed_forward(layer, hidden)
    assert tap is not None
    return hidden, tap


def _sees(columns: Int[Tensor, " rows"], length: int, block: int) -> Bool[Tensor, "rows rows"]:
    """True if a row sees another one. The first `length` rows are the text, the others its noised copy."""
    blocks, copied = columns // block, torch.arange(len(columns)) >= length
    own, before = blocks[:, None] == blocks, blocks[:, None] > blocks
    return (before & ~copied) | (own & (copied[:, None] == copied))
