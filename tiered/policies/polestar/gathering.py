"""The rows of clusters as they are now: those that the layer below has just made, and the stored ones of the rest."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.choice import for_device
from tiered.kernels.scatter_rows_ref import scatter_rows
from tiered.policies.polestar.fetching import Cluster, Fetching, Tickets
from tiered.policies.polestar.layer_state import LayerState


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

    Compute waits here for what `fetching` was `asked` for; rows that nobody fetched have to be in `flow`. Filler
    becomes 0.
    """
    batch, wider, width = out.shape
    before, columns = wider - rows.count, rows.index
    assert columns is not None, "members of clusters are scattered"
    if state.records is None:
        assert forward.ids is not None, "a pass reads ids"
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


def _places(state: LayerState, clusters: Sequence[Sequence[int]], wider: int, before: int) -> dict[Cluster, int]:
    """First row of each cluster where the sequences lie one after the other, each in `wider` rows."""
    places: dict[Cluster, int] = {}
    for sequence, chosen in enumerate(clusters):
        first = sequence * wider + before
        for cluster in chosen:
            places[sequence, cluster] = first
            first += state.members[sequence].sizes[cluster]
    return places
