"""What an update writes in a layer: keys and values, with the drift that this makes, then stored rows and centroids.

The latter follow the rows that the layer below has made.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.clustering.summaries import add_by_cluster
from tiered.clustering.unit_rows import rounding
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.fetching import Fetching, Tickets
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.places import Columns, Places
from tiered.tiers.manager import TierManager


@spanned(Op.DRIFT)
def write_and_measure(
    forward: Forward, state: LayerState, flow: Flow, current: Span, last_active: int, updating: Bool[Tensor, " batch"]
) -> list[list[float]]:
    """Write keys and values of all rows of `flow`, and measure what that and the steps before it did to the attention
    of the centroids; from now on drift is measured from here, in the sequences that update.

    The one read by the host in a group of layers: which clusters are fetched is decided there.

    Args:
        forward, state, flow: of the layer. The rows of `flow` begin with the columns that `state` tracks.
        current: columns of the current block, the last of the active ones.
        last_active: number, in `flow`, of the row behind the active ones; rows from there on come from the layer below.
        updating: sequences that update.

    Returns:
        KL of every cluster, by sequence, 0 where it is no more than rounding: noise must not choose among clusters that
        stand still. Without a meaning where a sequence does not update.
    """
    layer, known = state.layer, state.current[1] - state.current[0]
    others, reference = flow.rows[known:], state.reference
    if others.count:
        reference = reference.widened(state.queries, forward.keys(layer), others, updating)
    forward.write(layer, flow.rows, flow.hidden)
    keys = forward.keys(layer)  # again: what is decoded is a copy
    block = slice(last_active - (current[1] - current[0]), last_active)
    # Where a block begins every sequence updates; else the columns are the same, and the others' references stay.
    drift, state.reference = reference.measured(state.queries, keys, flow.rows, block, updating)
    drift = torch.nn.functional.threshold(drift, rounding(keys.dtype), 0.0)
    state.current = current
    return [row[: len(members.sizes)] for row, members in zip(drift.tolist(), state.members, strict=True)]


@spanned(Op.GATHER)
def gather_rows(
    forward: Forward,
    state: LayerState,
    known: Sequence[Float[Tensor, "batch _ width"]],
    places: Places,
    fetching: Fetching,
    asked: Tickets,
    out: Float[Tensor, "batch rows width"],
) -> Rows:
    """Write the layer's input at the clusters of `places` to `out`, and return all of its rows.

    Compute waits here for what `fetching` was `asked` for; rows that were not fetched have to be `known`. Those that
    are neither, filler among them, become 0.
    """
    flat = out.view(-1, out.shape[2])
    columns, blank, *numbers = _on_device(out.device, places.columns, places.blank, *places.to, *places.source)
    gathered = Rows.at(columns)
    if (places.columns < 0).any():
        gathered = Rows.at(columns.clamp_min(0), columns >= 0)
    if state.records is None:
        assert forward.ids is not None, "a step reads ids"
        out[:, places.before :] = forward.model.embed(gathered[places.before :].columns(forward.ids))
        return gathered
    if len(blank):
        flat.index_fill_(0, blank, 0)
    fetching.take(asked, flat, places.rows)
    for rows, to, source in zip(known, numbers[: len(known)], numbers[len(known) :], strict=True):
        if len(to):
            flat.index_copy_(0, to, rows.flatten(0, 1).index_select(0, source))
    return gathered


@spanned(Op.PATCH)
def patch(
    forward: Forward,
    tiers: TierManager,
    state: LayerState,
    known: Sequence[Float[Tensor, "batch _ width"]],
    columns: Sequence[Columns],
    touched: Sequence[Sequence[int]],
    fetching: Fetching,
    mended: Tickets,
) -> tuple[Int[Tensor, "batch moved"], Bool[Tensor, "batch moved"], Float[Tensor, "batch moved width"]] | None:
    """Store the clusters `touched`, some of whose members are `known`, as they are now.

    A centroid moves by Σ(new − old) / count: to the mean of the rows as they are now, which needs no old ones.

    Args:
        known, columns: rows of the layer's input, and which they are; −1 at those that do not count.
        mended: fetches of those that are not wholly known.

    Returns:
        What `LayerState.move` takes of them; None: there are none.
    """
    most = max(map(len, touched))
    if not most or state.records is None:
        return None
    places = Places.of(state.members, touched, columns)
    batch, rows = places.columns.shape
    values = known[0].new_empty(batch, rows, known[0].shape[2])
    gather_rows(forward, state, known, places, fetching, mended, values)
    # Rows that do not count go to one more cluster.
    slot = np.where(places.slot < 0, most, places.slot)
    moved, counts = np.full((batch, most), -1), np.ones((batch, most), dtype=np.int64)
    for b, clusters in enumerate(touched):
        moved[b, : len(clusters)] = clusters
        counts[b, : len(clusters)] = np.bincount(slot[b], minlength=most)[: len(clusters)]
    of_row, clusters, members = _on_device(values.device, slot, moved, counts.clip(1))
    sums = torch.zeros(batch, most + 1, values.shape[2], device=values.device)
    for b in range(batch):  # float32 copies of one sequence at a time
        add_by_cluster(sums[b : b + 1], values[b : b + 1].float(), of_row[b : b + 1])
    centroids = (sums[:, :most] / members[..., None]).to(values.dtype)
    for b, chosen in enumerate(touched):
        if chosen:
            stored = sum(state.members[b].sizes[cluster] for cluster in chosen)
            state.records[b].renew(tiers, chosen, values[b, :stored], centroids[b, : len(chosen)])
    return clusters.clamp_min(0), clusters >= 0, centroids


@spanned(Op.PATCH)
def append(forward: Forward, tiers: TierManager, state: LayerState, flow: Flow, finished: Span) -> None:
    """Let the block `finished`, the first rows of `flow`, be a cluster of its own from now on."""
    hidden = flow.hidden[:, : finished[1] - finished[0]]
    centroids = state.append(forward, finished, hidden)
    if state.records is not None:
        for b, records in enumerate(state.records):
            records.renew(tiers, [len(records.sizes) - 1], hidden[b], centroids[b])


def _on_device(device: torch.device, *tables: Int[np.ndarray, "..."]) -> list[Tensor]:
    """`tables` in one copy."""
    flat = on_device(torch.from_numpy(np.concatenate([table.ravel() for table in tables])), device)
    parts = flat.split([table.size for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
