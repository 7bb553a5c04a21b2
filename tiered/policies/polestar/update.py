"""A step that renews the clusters that drift most, group of layers by group, beside the rows of a plain step.

The rows of the clusters that are chosen where a group begins go up through all of it, and into the next. There they
patch stored rows and centroids, and take the place of stored rows if their clusters are chosen again; else they end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span, spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.fetching import Cluster, Fetching, Tickets
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.patching import append, gather_rows, patch, write_and_measure
from tiered.policies.polestar.update_log import GroupUpdate


@dataclass(slots=True)
class Renewal:
    """The clusters that a group of layers is about in an update, by sequence, and the fetches under way for them.

        chosen, for their drift ── all members come from below ───────────────────────┐
                                └─ else: fetched (`asked`) ── too late: given up       ├─> recomputed, handed up
                                                           └─ gathered ────────────────┘
        with members from below ── all of them: `whole` ───────────────────────────────> stored anew, block attending
                                └─ some: `torn`, the others fetched (`mended`) ────────> stored anew, layer done

    `finished`: columns of the block that is becoming a cluster, if one is. `drift`: of every cluster; empty where a
    sequence does not update.
    """

    finished: Span
    drift: list[list[float]]
    chosen: list[list[int]]
    whole: list[list[int]]
    torn: list[list[int]]
    asked: Tickets
    mended: Tickets


class Update:
    """Layer program of an update. A layer that leads no group is as dense as in a plain step, over the rows that come
    from below. In one that does:

      copy stream                          | compute stream
    ---------------------------------------+---------------------------------------------------------------
                                           | begin   keys and values of all rows written, drift measured,
                                           |         clusters chosen: the one read by the host in a group
      chosen and torn clusters fetched,    | block   the active rows attend; whole clusters encoded
      guesses for the layers above behind  |
      whole clusters stored ...            | finish  wait; the chosen rows gathered, and attend; MLP of all,
                                           |         so that its weights are read once
      torn clusters stored ...             |         torn clusters encoded; the finished block appended
    """

    def __init__(
        self,
        cache: HiddenCache,
        updating: Sequence[bool],
        active: Span,
        current: Span,
        number: int,
        renewed_from: int | None = None,
        kept: bool = True,
    ) -> None:
        """
        Args:
            cache: as the last refresh or update left it.
            updating: sequences that update; the others take a plain step.
            active: columns that the step computes anyway: the current block, or, where a block begins without a
                refresh, the finished block and this one.
            current: columns of the current block.
            number: of the forward in the call.
            renewed_from: column; clusters with rows from there on are renewed however little they drift.
            kept: whether another update may read what this one would store; else it stores nothing.
        """
        self._cache, self._number = cache, number
        self._renewed_from, self._kept = renewed_from, kept
        self._updating = [*updating] * cache.copies
        self._active, self._current = active, current
        self._count = active[1] - active[0]

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        if layer == 0:
            self._begin(forward, flow)
        if layer == forward.model.shape.layers - 1:
            self._fetching.close()
        elif (state := self._cache.states.get(layer)) is not None:
            return self._lead(forward, state, flow)
        else:
            self._guess(layer, self._fresh)
        return forward.dense(layer, flow)

    def _begin(self, forward: Forward, flow: Flow) -> None:
        self._fetching = Fetching(self._cache.open_tiers, self._cache.options)
        self._here = on_device(self._updating, flow.hidden.device)
        self._rows = flow.rows  # of the active columns: a span, in every layer
        self._length, self._layers = forward.length, forward.model.shape.layers
        self._fresh = [self._active_columns() for _ in self._updating]

    def _lead(self, forward: Forward, state: LayerState, flow: Flow) -> Flow:
        renewal = self._begin_fetch(forward, state, flow)
        attended = self._attend_block(forward, state, flow, renewal)
        return self._finish_rows(forward, state, flow, renewal, attended)

    def _begin_fetch(self, forward: Forward, state: LayerState, flow: Flow) -> Renewal:
        """Write keys and values, choose clusters, and begin to fetch what is in the tiers alone."""
        # The row that predicts this block's first token was one of the finished block's too; it belongs to this one.
        finished = (state.current[0], min(state.current[1], self._current[0]))
        if self._active != self._current:  # the current block leaves the clusters that it was in
            state.retire(self._current)
        drift = write_and_measure(forward, state, flow, self._current, self._count, self._here)
        with span(Op.FETCH):
            chosen = [self._chosen(*each) for each in zip(drift, state.members, self._fresh, strict=True)]
            touched: list[list[int]] = [[] for _ in chosen]
            if self._kept:
                touched = [members.touched(fresh) for members, fresh in zip(state.members, self._fresh, strict=True)]
            stored = self._stored(state, touched)
            asked = self._fetching.ask(state.layer, self._stored(state, chosen), state.records or ())
            mended = self._fetching.mend(stored, state.records or ())
            ranking = self._cache.ranking
            earlier = ranking.get(state.layer, drift)
            ranking[state.layer] = [now or before for now, before in zip(drift, earlier, strict=True)]
        self._guess(state.layer, self._marked(state, chosen))
        torn = [[one for one in clusters if (b, one) in mended] for b, clusters in enumerate(touched)]
        whole = [[one for one in clusters if (b, one) not in mended] for b, clusters in enumerate(touched)]
        return Renewal(finished, drift, chosen, whole, torn, asked, mended)

    def _attend_block(
        self, forward: Forward, state: LayerState, flow: Flow, renewal: Renewal
    ) -> Float[Tensor, "batch active width"]:
        """The active rows after their attention. Encoding what is all here keeps compute busy while the rest is on its
        way."""
        attended = flow.hidden[:, : self._count].clone()  # what goes in may have to be stored
        forward.attend(state.layer, self._rows, attended)
        patch(forward, self._cache.open_tiers, state, flow, renewal.whole, self._fetching, {})
        return attended

    def _finish_rows(
        self,
        forward: Forward,
        state: LayerState,
        flow: Flow,
        renewal: Renewal,
        attended: Float[Tensor, "batch active width"],
    ) -> Flow:
        """Wait for the chosen clusters, take their rows through the layer with the active ones, and leave what is
        stored as it is now."""
        for sequence, cluster in self._fetching.late(renewal.asked):
            renewal.chosen[sequence].remove(cluster)
        rows, tiers = state.rows_of(renewal.chosen), self._cache.open_tiers
        hidden = attended.new_empty(len(attended), self._count + rows.count, attended.shape[2])
        hidden[:, : self._count] = attended
        gather_rows(forward, state, flow, rows, renewal.chosen, self._fetching, renewal.asked, hidden)
        forward.attend(state.layer, rows, hidden[:, self._count :])
        forward.mlp(state.layer, hidden)
        patch(forward, tiers, state, flow, renewal.torn, self._fetching, renewal.mended)
        if self._active != self._current and self._kept:
            append(forward, tiers, state, flow, renewal.finished)
        self._fresh = self._marked(state, renewal.chosen)
        self._write_down(state, renewal)
        return Flow(self._joined(rows), hidden, flow.output)

    def _chosen(self, drift: Sequence[float], members: Members, fresh: Bool[np.ndarray, " length"]) -> list[int]:
        """The clusters to renew in a layer."""
        if self._renewed_from is None or not drift:
            return self._most_drifted(drift, members, fresh)
        always = members.touched(np.arange(self._length) >= self._renewed_from)
        return always + self._most_drifted(drift, members, fresh, besides=always)

    def _most_drifted(
        self, drift: Sequence[float], members: Members, fresh: Bool[np.ndarray, " length"], besides: Sequence[int] = ()
    ) -> list[int]:
        """`top_m` clusters, without `besides`: first those that the layer below has renewed by half or more (`fresh`):
        their inputs have moved, which drift, measured at the old centroid, does not say. Of these and of the others,
        most drifted first, and of equal ones, the first."""
        below = members.mostly(fresh)
        others = [cluster for cluster in range(len(drift)) if cluster not in besides]
        return sorted(others, key=lambda cluster: (cluster not in below, -drift[cluster]))[: self._cache.options.top_m]

    def _stored(self, state: LayerState, clusters: Sequence[Sequence[int]]) -> list[Cluster]:
        """Those that are to be fetched: some of their rows are in the tiers alone."""
        return [
            (sequence, cluster)
            for sequence, of_sequence in enumerate(clusters)
            for cluster in of_sequence
            if state.records is not None and not state.members[sequence].covered(cluster, self._fresh[sequence])
        ]

    def _marked(self, state: LayerState, chosen: Sequence[Sequence[int]]) -> list[Bool[np.ndarray, " length"]]:
        """By sequence, True at the active columns and at the members of `chosen`: what the next layer gets from this
        one."""
        marked = [self._active_columns() for _ in chosen]
        for fresh, members, clusters in zip(marked, state.members, chosen, strict=True):
            for cluster in clusters:
                fresh[members.live(cluster)] = True
        return marked

    def _active_columns(self) -> Bool[np.ndarray, " length"]:
        columns = np.arange(self._length)
        return (columns >= self._active[0]) & (columns < self._active[1])

    @spanned(Op.FETCH)
    def _guess(self, layer: int, fresh: Sequence[Bool[np.ndarray, " length"]]) -> None:
        """Fetch ahead what groups above will probably choose, by their drift at the last update, and not get from the
        layer below (`fresh`)."""
        cache, ahead = self._cache, self._cache.options.prefetch_layers
        for above in range(layer + 1 if layer == 0 else layer + ahead, layer + ahead + 1):
            state = cache.states.get(above)
            if above == 0 or state is None or state.records is None or above not in cache.ranking or not ahead:
                continue
            likely = [
                (sequence, cluster)
                for sequence, drift in enumerate(cache.ranking[above])
                if self._updating[sequence]
                for cluster in self._most_drifted(drift, state.members[sequence], fresh[sequence])
                if not state.members[sequence].covered(cluster, fresh[sequence])
            ]
            self._fetching.guess(above, likely, state.records)

    def _joined(self, rows: Rows) -> Rows:
        """The active rows, and `rows` behind them."""
        assert rows.index is not None and rows.valid is not None, "members of clusters are scattered"
        active = self._rows.positions(len(rows.index), rows.index.device)
        valid = torch.ones_like(active, dtype=torch.bool) if self._rows.valid is None else self._rows.valid
        return Rows.at(torch.cat([active, rows.index], dim=1), torch.cat([valid, rows.valid], dim=1))

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
                patched=[len(whole) + len(torn) for whole, torn in zip(renewal.whole, renewal.torn, strict=True)],
                **self._fetching.counts(),
            )
        )
