"""A step that renews the clusters that drift most, group of layers by group, beside the rows of a plain step.

The rows of the clusters that a group chooses go up through all of its layers, and into the next group. There they patch
stored rows and centroids. If their clusters are chosen again, they replace stored rows; else they end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool

from tiered.core.ops import Op
from tiered.core.spans import span, spanned
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.fetching import Fetching
from tiered.policies.polestar.layer_state import LayerState, Span, append, gather_rows, patch, write_and_measure
from tiered.policies.polestar.members import Cluster, Members, RowLayout, by_column
from tiered.policies.polestar.update_log import GroupUpdate


@dataclass(slots=True)
class Renewal:
    """The clusters of an update in a group of layers, by sequence, and their fetches.

        chosen for their drift ─┬─ all members are from below ──┬─> recomputed, and sent up
                                └─ else: fetched (`fetched`) ───┘
        affected: with members from below ── partial ones: the other members are fetched (`refetched`) ──> stored anew

    If the moves of centroids count as drift, `affected` is empty: those clusters were stored before drift was measured.

    `finished`: columns of the block that becomes a cluster, if one does. `drift`: drift of every cluster; empty for a
    sequence that does not update. `patched`: number of clusters stored anew. `layout`: the active rows and the chosen
    clusters.
    """

    finished: Span
    drift: list[list[float]]
    chosen: list[list[int]]
    affected: list[list[int]]
    patched: list[int]
    fetched: list[Cluster]
    refetched: list[Cluster]
    layout: RowLayout


class Update:
    """Layer program of an update. A layer that leads no group is dense, as in a plain step, over the rows from below. A
    leader does this:

      copy stream                             | compute stream
    ------------------------------------------+------------------------------------------------------------
                                              | keys and values of all rows written, drift measured, clusters
                                              | chosen: the one host read of a group
      chosen and partial clusters fetched,    | the active rows attend
      then guesses for the group above        |
                                              | wait; the chosen rows gathered, and attend; the MLP of all rows
                                              | reads its weights once
      affected clusters stored ...            | affected clusters encoded; the finished block appended
    """

    def __init__(
        self,
        cache: HiddenCache,
        taking_part: Sequence[bool],
        updating: Sequence[bool],
        active: Span,
        current: Span,
        number: int,
        kept: bool = True,
    ) -> None:
        """
        Args:
            taking_part: sequences whose active rows count; the others wait.
            updating: sequences that update; the others take a plain step.
            active: columns that the step computes anyway: the current block, and the finished block if this one begins
                without a refresh.
            number: number of the forward in the call.
            kept: whether another update may read what this one stores; else it stores nothing.
        """
        self._cache, self._number, self._kept = cache, number, kept
        self._taking_part, self._updating = [*taking_part] * cache.copies, [*updating] * cache.copies
        self._active, self._current = active, current
        self._count = active[1] - active[0]

    def __call__(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        if layer == 0:
            self._begin(forward, pass_)
        if layer < forward.model.shape.layers - 1:
            if (state := self._cache.states.get(layer)) is not None:
                return self._lead(forward, state, pass_)
            self._guess(layer, self._recomputed)
        return forward.dense(layer, pass_)

    def _begin(self, forward: Forward, pass_: Pass) -> None:
        self._fetching = Fetching(self._cache.open)
        self._here = None if all(self._updating) else on_device(self._updating, pass_.hidden.device)
        self._rows = pass_.rows  # of the active columns: a span, in every layer
        self._length, self._layers = forward.length, forward.model.shape.layers
        # The rows from below: their columns, −1 at rows that do not count; and the same by column.
        self._from_below = np.where(np.asarray(self._taking_part)[:, None], np.arange(*self._active), -1)
        self._recomputed = by_column(self._from_below, self._length)
        self._cache.updated_in, self._cache.fetched = self._number, np.zeros_like(self._recomputed)

    def _lead(self, forward: Forward, state: LayerState, pass_: Pass) -> Pass:
        renewal, count, stored = self._begin_fetch(forward, state, pass_), self._count, self._cache.open
        layout, recomputed = renewal.layout, by_column(renewal.layout.columns, self._length)
        self._guess(state.layer, recomputed)
        hidden = pass_.hidden.new_empty(*layout.columns.shape, pass_.hidden.shape[2])
        hidden[:, :count] = pass_.hidden[:, :count]  # a copy: the layer's input may have to be stored
        forward.attend(state.layer, self._rows, hidden[:, :count])
        rows = gather_rows(forward, state, [pass_.hidden], layout, stored, renewal.fetched, hidden)
        known, columns = [pass_.hidden], [self._from_below]
        if any(renewal.affected):
            known.append(hidden[:, count:].clone())
            columns.append(layout.columns[:, count:])
        forward.attend(state.layer, rows[count:], hidden[:, count:])
        forward.mlp(state.layer, hidden)
        moved = patch(forward, stored, state, known, columns, renewal.affected, renewal.refetched)
        del known
        if moved is not None:
            state.recenter(forward, moved)
        if self._active != self._current and self._kept:
            append(forward, stored, state, pass_, renewal.finished)
        if state.regions is not None:
            self._cache.fetched |= recomputed & ~self._recomputed
        self._from_below, self._recomputed = layout.columns, recomputed
        self._write_down(state, renewal)
        return replace(pass_, rows=rows, hidden=hidden)

    def _begin_fetch(self, forward: Forward, state: LayerState, pass_: Pass) -> Renewal:
        """Write keys and values, choose clusters, and begin to fetch the rows that are in the tiers alone."""
        # The row that predicts this block's first token was one of the finished block's too; it belongs to this one.
        finished = (state.current[0], min(state.current[1], self._current[0]))
        if self._active != self._current:  # the current block leaves the clusters that it was in
            state.retire(self._current)
        pairs = [*zip(state.members, self._recomputed, strict=True)]
        stores = self._kept or self._cache.measures_moves
        affected = [members.affected(recomputed) if stores else [] for members, recomputed in pairs]
        moved, patched = None, [len(clusters) for clusters in affected]
        if self._cache.measures_moves and any(affected):
            refetched = self._fetching.refetch(state, _partial(state, affected, self._recomputed))
            known = [pass_.hidden], [self._from_below]
            moved = patch(forward, self._cache.open, state, *known, affected, refetched)
            affected = [[] for _ in affected]
        measured = write_and_measure(forward, state, pass_, self._current, self._count, self._here, moved)
        drift = [of if updates else [] for of, updates in zip(measured, self._updating, strict=True)]
        with span(Op.FETCH):
            chosen = [self._most_drifted(of, *pair) for of, pair in zip(drift, pairs, strict=True)]
            fetched = self._fetching.ask(state, _partial(state, chosen, self._recomputed))
            partial = _partial(state, affected, self._recomputed)
            refetched = self._fetching.refetch(state, [one for one in partial if one not in fetched])
            earlier = self._cache.ranking.get(state.layer, drift)
            self._cache.ranking[state.layer] = [now or before for now, before in zip(drift, earlier, strict=True)]
        layout = RowLayout.of(state.members, chosen, [self._from_below], self._from_below[:, : self._count])
        return Renewal(finished, drift, chosen, affected, patched, fetched, refetched, layout)

    def _most_drifted(
        self, drift: Sequence[float], members: Members, recomputed: Bool[np.ndarray, " length"]
    ) -> list[int]:
        """`top_m` clusters, the most drifted first. If the moves of centroids do not count as drift, clusters that the
        layer below has renewed by half or more come before the others: their inputs have moved."""
        below = () if self._cache.measures_moves else members.mostly(recomputed)
        ranked = sorted(range(len(drift)), key=lambda cluster: (cluster not in below, -drift[cluster]))
        return ranked[: self._cache.top_m]

    @spanned(Op.FETCH)
    def _guess(self, layer: int, recomputed: Bool[np.ndarray, "batch length"]) -> None:
        """Fetch ahead what the next layer will probably choose, by the drift of the last update, and not get from
        `layer` (`recomputed`)."""
        above, ranking = self._cache.states.get(layer + 1), self._cache.ranking.get(layer + 1)
        if above is None or above.regions is None or ranking is None or self._cache.measures_moves:
            return  # or its records change before it chooses
        likely = [
            self._most_drifted(drift, members, columns) if updates else []
            for drift, members, columns, updates in zip(ranking, above.members, recomputed, self._updating, strict=True)
        ]
        self._fetching.guess(above, _partial(above, likely, recomputed))

    def _write_down(self, state: LayerState, renewal: Renewal) -> None:
        self._cache.log.append(
            GroupUpdate(
                forward=self._number,
                layer=state.layer,
                layers=self._cache.layers_of(state.layer, self._layers),
                drift=renewal.drift,
                clusters=renewal.chosen,
                rows=[
                    sum(len(members.live(cluster)) for cluster in clusters)
                    for members, clusters in zip(state.members, renewal.chosen, strict=True)
                ],
                patched=renewal.patched,
                **self._fetching.counts(),
            )
        )


def _partial(
    state: LayerState, clusters: Sequence[Sequence[int]], recomputed: Bool[np.ndarray, "batch length"]
) -> list[Cluster]:
    """The clusters that have to be fetched: of some of their rows only the stored ones are known."""
    return [
        (sequence, cluster)
        for sequence, own in enumerate(clusters)
        for cluster in own
        if state.regions is not None and not state.members[sequence].covered(cluster, recomputed[sequence])
    ]
