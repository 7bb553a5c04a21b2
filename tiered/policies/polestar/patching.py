"""What an update leaves in a layer: stored rows and centroids follow the rows that the layer below has made."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiered.clustering.cluster_sums import add_by_cluster
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.fetching import Fetching, Tickets
from tiered.policies.polestar.gathering import gather_rows
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.tiers.manager import TierManager


@spanned(Op.PATCH)
def patch(
    forward: Forward,
    tiers: TierManager,
    state: LayerState,
    flow: Flow,
    touched: Sequence[Sequence[int]],
    fetching: Fetching,
    mended: Tickets,
) -> None:
    """Store the clusters `touched`, some or all of whose members are in `flow`, as they are now, and move their
    centroids. `mended`: fetches of those that are not wholly in `flow`.

    A centroid moves by Σ(new − old) / count: to the mean of the rows as they are now, which needs no old ones.
    """
    most = max(map(len, touched))
    if not most or state.records is None:
        return
    rows = state.rows_of(touched)
    values = flow.hidden.new_empty(len(touched), rows.count, flow.hidden.shape[2])
    gather_rows(forward, state, flow, rows, touched, fetching, mended, values)
    batch, device = len(touched), values.device
    sizes = [[state.members[b].sizes[cluster] for cluster in clusters] for b, clusters in enumerate(touched)]
    clusters = _table(touched, most, device)
    valid = _table([[1] * len(chosen) for chosen in touched], most, device).bool()
    # The cluster of every row, by its place in `touched`; rows that do not count go to one more.
    ends = _table(sizes, most, device).cumsum(1)
    of_row = torch.searchsorted(
        ends, torch.arange(rows.count, device=device).expand(batch, -1).contiguous(), right=True
    )
    of_row = of_row.where(rows.valid, most) if rows.valid is not None else of_row
    counts = torch.zeros(batch, most + 1, device=device).scatter_add_(
        1, of_row, torch.ones(of_row.shape, device=device)
    )
    sums = torch.zeros(batch, most + 1, values.shape[2], device=device)
    for b in range(batch):  # float32 copies of one sequence at a time
        add_by_cluster(sums[b : b + 1], values[b : b + 1].float(), of_row[b : b + 1])
    centroids = (sums / counts.clamp_min(1)[..., None])[:, :most].to(values.dtype)
    for b, chosen in enumerate(touched):
        if chosen:
            state.records[b].renew(tiers, chosen, values[b, : sum(sizes[b])], centroids[b, : len(chosen)])
    state.move(forward, clusters, valid, centroids)


@spanned(Op.PATCH)
def append(forward: Forward, tiers: TierManager, state: LayerState, flow: Flow, finished: Span) -> None:
    """Let the block `finished`, the first rows of `flow`, be a cluster of its own from now on."""
    hidden = flow.hidden[:, : finished[1] - finished[0]]
    centroids = state.append(forward, finished, hidden)
    if state.records is not None:
        for b, records in enumerate(state.records):
            records.renew(tiers, [len(records.sizes) - 1], hidden[b], centroids[b])


def _table(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """`rows` with zeros behind them."""
    return on_device([[*row, *[0] * (width - len(row))] for row in rows], device)
