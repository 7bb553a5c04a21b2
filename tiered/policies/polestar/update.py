"""A step that renews the clusters that drift most, group of layers by group, beside the rows of a plain step.

The rows of the clusters that are chosen where a group begins go up through all of it, and into the next. There they
patch stored rows and centroids, and take the place of stored rows if their clusters are chosen again; else they end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Bool

from tiered.core.ops import Op
from tiered.core.spans import span, spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.fetching import Cluster, Fetching, Tickets
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.patching import append, gather_rows, patch, write_and_measure
from tiered.policies.polestar.places import Places, by_column
from tiered.policies.polestar.update_log import GroupUpdate


@dataclass(slots=True)
class Renewal:
    """The clusters that a group of layers is about in an update, by sequence, and the fetches under way for them.

        chosen, for their drift ── all members come from below ───────────────────────┐
                                └─ else: fetched (`asked`) ── too late: given up       ├─> recomputed, handed up
                                                           └─ gathered ────────────────┘
        touched: with members from below ── but for some: these fetched (`mended`) ───────> stored anew

    `finished`: columns of the block that is becoming a cluster, if one is. `drift`: of every cluster; empty where a
    sequence does not update.
    """

    finished: Span
    drift: list[list[float]]
    chosen: list[list[int]]
    touched: list[list[int]]
    asked: Tickets
    mended: Tickets


class Update:
    """Layer program of an update. A layer that leads no group is as dense as in a plain step, over the rows that come
    from below. In one that does:

      copy stream                          | compute stream
    ---------------------------------------+---------------------------------------------------------------
                                           | begin   keys and values of all rows written, drift measured,
                                           |         clusters chosen: the one read by the host in a group
      chosen and touched clusters fetched, | block   the active rows attend
      guesses for the groups above behind  |
                                           | finish  wait; the chosen rows gathered, and attend; MLP of all,
                                           |         so that its weights are read once
      touched clusters stored ...          |         touched clusters encoded; the finished block appended
    """

    def __init__(
        self,
        cache: HiddenCache,
        taking_part: Sequence[bool],
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
            taking_part: sequences whose active rows count; the others wait.
            updating: sequences that update; the others take a plain step.
            active: columns that the step computes anyway: the current block, or, where a block begins without a
                refresh, the finished block and this one.
            current: columns of the current block.
            number: of the forward in the call.
            renewed_from: column; clusters with rows from there on are renewed however little they drift.
            kept: whether another update may read what this one would store; else it stores nothing.
        """
        self._cache, self._number = cache, number
        self.renewed_from, self._kept = renewed_from, kept
        self._taking_part, self._updating = [*taking_part] * cache.copies, [*updating] * cache.copies
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
        # What comes from the layer below: columns, −1 at rows that do not count; and by column.
        self._handed = np.where(np.asarray(self._taking_part)[:, None], np.arange(*self._active), -1)
        self._fresh = by_column(self._handed, self._length)

    def _lead(self, forward: Forward, state: LayerState, flow: Flow) -> Flow:
        """Write and choose; take the active rows through attention while the chosen ones are on their way; wait, take
        these through the layer as well, and leave what is stored as it is now."""
        renewal, count, tiers = self._begin_fetch(forward, state, flow), self._count, self._cache.open_tiers
        attended = flow.hidden[:, :count].clone()  # what goes in may have to be stored
        forward.attend(state.layer, self._rows, attended)
        late = self._fetching.late(renewal.asked)
        for sequence, cluster in late:
            renewal.chosen[sequence].remove(cluster)
        torn = [(sequence, cluster) for sequence, cluster in late if cluster in renewal.touched[sequence]]
        renewal.mended |= self._fetching.mend(torn, state.records or ())
        places = Places.of(state.members, renewal.chosen, [self._handed], self._handed[:, :count])
        hidden = attended.new_empty(*places.columns.shape, attended.shape[2])
        hidden[:, :count] = attended
        del attended
        rows = gather_rows(forward, state, [flow.hidden], places, self._fetching, renewal.asked, hidden)
        # What is known of the layer's input, which may have to be stored.
        known, columns = [flow.hidden], [self._handed]
        if any(renewal.touched):
            known.append(hidden[:, count:].clone())
            columns.append(places.columns[:, count:])
        forward.attend(state.layer, rows[count:], hidden[:, count:])
        forward.mlp(state.layer, hidden)
        moved = patch(forward, tiers, state, known, columns, renewal.touched, self._fetching, renewal.mended)
        del known
        if moved is not None:
            state.move(forward, *moved)
        if self._active != self._current and self._kept:
            append(forward, tiers, state, flow, renewal.finished)
        self._handed, self._fresh = places.columns, by_column(places.columns, self._length)
        self._write_down(state, renewal)
        return Flow(rows, hidden, flow.output)

    def _begin_fetch(self, forward: Forward, state: LayerState, flow: Flow) -> Renewal:
        """Write keys and values, choose clusters, and begin to fetch what is in the tiers alone."""
        # The row that predicts this block's first token was one of the finished block's too; it belongs to this one.
        finished = (state.current[0], min(state.current[1], self._current[0]))
        if self._active != self._current:  # the current block leaves the clusters that it was in
            state.retire(self._current)
        measured = write_and_measure(forward, state, flow, self._current, self._count, self._here)
        drift = [of if updates else [] for of, updates in zip(measured, self._updating, strict=True)]
        with span(Op.FETCH):
            pairs = [*zip(state.members, self._fresh, strict=True)]
            chosen = [self._chosen(of, *pair) for of, pair in zip(drift, pairs, strict=True)]
            touched = [members.touched(fresh) if self._kept else [] for members, fresh in pairs]
            asked = self._fetching.ask(state.layer, self._stored(state, chosen), state.records or ())
            here = {*chain(*asked)}
            torn = [one for one in self._stored(state, touched) if one not in here]
            mended = self._fetching.mend(torn, state.records or ())
            ranking = self._cache.ranking
            earlier = ranking.get(state.layer, drift)
            ranking[state.layer] = [now or before for now, before in zip(drift, earlier, strict=True)]
        places = Places.of(state.members, chosen, [self._handed], self._handed[:, : self._count])
        self._guess(state.layer, by_column(places.columns, self._length))
        return Renewal(finished, drift, chosen, touched, asked, mended)

    def _chosen(self, drift: Sequence[float], members: Members, fresh: Bool[np.ndarray, " length"]) -> list[int]:
        """The clusters to renew in a layer."""
        if self.renewed_from is None or not drift:
            return self._most_drifted(drift, members, fresh)
        always = members.touched(np.arange(self._length) >= self.renewed_from)
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

    @spanned(Op.FETCH)
    def _guess(self, layer: int, fresh: Bool[np.ndarray, "batch length"]) -> None:
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
                patched=[len(clusters) for clusters in renewal.touched],
                **self._fetching.counts(),
            )
        )
