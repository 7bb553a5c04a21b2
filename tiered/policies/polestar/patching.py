"""What an update writes in a layer: keys and values, with the drift that this makes, then stored rows and centroids.

The latter follow the rows that the layer below has made.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.clustering.summaries import add_by_cluster
from tiered.clustering.unit_rows import rounding
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.choice import for_device
from tiered.kernels.host_values import on_device
from tiered.kernels.scatter_rows_ref import scatter_rows
from tiered.policies.polestar.fetching import Cluster, Fetching, Tickets
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.tiers.manager import TierManager


@spanned(Op.DRIFT)
def write_and_measure(
    forward: Forward, state: LayerState, flow: Flow, current: Span, last_active: int, updating: Bool[Tensor, " batch"]
) -> list[list[float]]:
    """Write keys and values of all rows of `flow`, and measure what that and the steps before it did to the attention
    of the centroids; from now on drift is measured from here, in the sequences that update.

    The one read by the host in a layer: which clusters are fetched is decided there.

    Args:
        forward, state, flow: of the layer. The rows of `flow` begin with the columns that `state` tracks.
        current: columns of the current block, the last of the active ones.
        last_active: number, in `flow`, of the row behind the active ones; rows from there on come from the layer below.
        updating: sequences that update.

    Returns:
        KL of every cluster, by sequence, 0 where it is no more than rounding: noise must not choose among clusters that
        stand still. Empty where a sequence does not update.
    """
    layer, known = state.layer, state.current[1] - state.current[0]
    others, reference = flow.rows[known:], state.reference
    if others.count:
        reference = reference.widened(state.queries, forward.keys(layer), others, updating)
    forward.write(layer, flow.rows, flow.hidden)
    keys = forward.keys(layer)
    block = slice(last_active - (current[1] - current[0]), last_active)
    # Where a block begins every sequence updates; else the columns are the same, and the others' references stay.
    drift, state.reference = reference.measured(state.queries, keys, flow.rows, block, updating)
    drift = torch.nn.functional.threshold(drift, rounding(keys.dtype), 0.0)
    state.current = current
    counts = [len(members.sizes) for members in state.members]
    both = torch.cat([drift, updating[:, None].to(drift.dtype)], dim=1).tolist()
    return [row[:count] if row[-1] else [] for row, count in zip(both, counts, strict=True)]


@spanned(Op.GATHER)
def gather_rows(
    forward: Forward,
    state: LayerState,
    flow: Flow,
    rows: Rows,
    clusters: Sequence[Sequence[int]],
    fetching: Fetching,
    asked: Tickets,
    out: Float[Tensor, "batch wider width"],
) -> None:
    """Write the layer's input at `rows`, the members of `clusters` (`LayerState.rows_of`), to the last rows of `out`.

    Compute waits here for what `fetching` was `asked` for; rows that were not fetched have to be in `flow`. Filler
    becomes 0.
    """
    batch, wider, width = out.shape
    before, columns = wider - rows.count, rows.index
    assert columns is not None, "members of clusters are scattered"
    if state.records is None:
        assert forward.ids is not None, "a step reads ids"
        out[:, before:] = forward.model.embed(forward.ids.gather(1, columns))
        return
    out[:, before:] = 0
    fetching.take(asked, out.view(-1, width), _places(state, clusters, wider, before))
    length = forward.keys(state.layer).shape[2]
    # Where each column of the canvas stands in `out`; the last entry takes what does not count.
    counted = columns if rows.valid is None else columns.where(rows.valid, length)
    numbers = torch.arange(before, wider, device=out.device).expand(batch, -1)
    place = columns.new_full((batch, length + 1), -1).scatter_(1, counted, numbers)
    target = place.gather(1, flow.rows.positions(batch, out.device))
    wanted = target >= 0
    wanted = wanted if flow.rows.valid is None else wanted & flow.rows.valid
    put = for_device(scatter_rows, out.device)
    put(out[:, None], flow.hidden[:, None], target.clamp_min(0), wanted)


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


def _places(state: LayerState, clusters: Sequence[Sequence[int]], wider: int, before: int) -> dict[Cluster, int]:
    """First row of each cluster where the sequences lie one after the other, each in `wider` rows."""
    places: dict[Cluster, int] = {}
    for sequence, chosen in enumerate(clusters):
        first = sequence * wider + before
        for cluster in chosen:
            places[sequence, cluster] = first
            first += state.members[sequence].sizes[cluster]
    return places
