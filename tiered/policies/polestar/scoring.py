"""How far the clusters of a layer have drifted since the last update, measured while an update passes."""

import torch
from jaxtyping import Bool
from torch import Tensor

from tiered.clustering.unit_rows import rounding
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.costs import part_rows
from tiered.forward.forward import Flow, Forward
from tiered.kernels.choice import for_device
from tiered.kernels.proxy_drift_ref import proxy_drift
from tiered.policies.polestar.by_sequence import chosen
from tiered.policies.polestar.layer_state import LayerState, Span


@spanned(Op.DRIFT)
def write_and_measure(
    forward: Forward, state: LayerState, flow: Flow, tracked: Span, last_active: int, updating: Bool[Tensor, " batch"]
) -> list[list[float]]:
    """Write keys and values of all rows of `flow`, and measure what that and the steps before it did to the attention
    of the centroids; from now on drift is measured from here, in the sequences that update.

    The one read by the host in a layer: which clusters are fetched is decided there.

    Args:
        forward, state, flow: of the layer. The rows of `flow` begin with the columns that `state` tracks.
        tracked: columns of the current block, the last of the active ones.
        last_active: number, in `flow`, of the row behind the active ones; rows from there on come from the layer below.
        updating: sequences that update.

    Returns:
        KL of every cluster, by sequence, 0 where it is no more than rounding: noise must not choose among clusters that
        stand still. Empty where a sequence does not update.
    """
    layer, known = state.layer, state.tracked[1] - state.tracked[0]
    others = flow.rows[known:]
    reference = state.reference
    if others.count:
        valid = updating[:, None].expand(-1, others.count)
        valid = valid if others.valid is None else valid & others.valid
        columns = others.positions(len(updating), updating.device)
        keys = others.take(forward.keys(layer))
        reference = reference.widened(state.queries, keys, columns, valid)
    for part in flow.rows.parts(part_rows(len(flow.hidden))):
        normed = forward.model.attention_norm(layer, flow.hidden[:, part])
        forward.write_keys_values(layer, flow.rows[part], normed)
    keys = flow.rows.take(forward.keys(layer))
    drift = for_device(proxy_drift, keys.device)(state.queries, keys, reference)
    drift = drift.where(drift > rounding(keys.dtype), 0)
    block = slice(last_active - (tracked[1] - tracked[0]), last_active)
    renewed = reference.refreshed(state.queries, keys).narrowed(block)
    # Where a block begins every sequence updates; else the columns are the same, and the others' references stay.
    state.reference = chosen(updating, renewed, state.reference)
    state.tracked = tracked
    counts = [len(members.sizes) for members in state.members]
    both = torch.cat([drift, updating[:, None].to(drift.dtype)], dim=1).tolist()
    return [row[:count] if row[-1] else [] for row, count in zip(both, counts, strict=True)]
