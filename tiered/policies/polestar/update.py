"""A pass that renews the clusters that drift most, layer by layer, beside the rows of a plain step.

Rows that one layer recomputes go on to the next, where they patch keys, values, stored rows and centroids; there they
take the place of stored rows if their clusters are chosen again, and end otherwise.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span
from tiered.forward.costs import part_rows
from tiered.forward.forward import Flow, Forward, add_branch
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.fetching import Cluster, Fetching
from tiered.policies.polestar.gathering import gather_rows
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.patching import append, patch
from tiered.policies.polestar.scoring import write_and_measure
from tiered.policies.polestar.update_log import LayerUpdate


class Update:
    """Layer program of an update.

    In each layer the fetch of the chosen clusters begins before the attention of the active rows, and compute waits for
    it behind that. Rows of both go through the MLP together, so its weights are read once.
    """

    def __init__(
        self,
        cache: HiddenCache,
        updating: Sequence[bool],
        active: Span,
        tracked: Span,
        number: int,
        renewed_from: int | None = None,
    ) -> None:
        """
        Args:
            cache: as the last refresh or update left it.
            updating: sequences that update; the others take a plain step.
            active: columns that the pass computes anyway: the current block, or, where a block begins without a
                refresh, the finished block and this one.
            tracked: columns of the current block.
            number: of the forward in the call.
            renewed_from: column; clusters with rows from there on are renewed however little they drift.
        """
        self._cache, self._number = cache, number
        self._renewed_from = renewed_from
        self._updating = [*updating] * cache.copies
        self._active, self._tracked = active, tracked
        self._count = active[1] - active[0]

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        if layer == 0:
            self._begin(forward, flow)
        if layer == forward.model.shape.layers - 1:
            self._fetching.close()
            return forward.dense(layer, flow)
        return self._layer(forward, self._cache.states[layer], flow)

    def _begin(self, forward: Forward, flow: Flow) -> None:
        self._fetching = Fetching(self._cache.open_tiers, self._cache.options)
        self._here = on_device(self._updating, flow.hidden.device)
        self._rows = flow.rows  # of the active columns: a span, in every layer
        self._length = forward.length
        self._fresh = [self._marked((), None) for _ in self._updating]

    def _layer(self, forward: Forward, state: LayerState, flow: Flow) -> Flow:
        # A row that predicts this block's first token is tracked with both blocks, and belongs to this one.
        cache, finished = self._cache, (state.tracked[0], min(state.tracked[1], self._tracked[0]))
        if self._active != self._tracked:  # the current block leaves the clusters that it was in
            state.retire(self._tracked)
        drift = write_and_measure(forward, state, flow, self._tracked, self._count, self._here)
        with span(Op.FETCH):
            chosen = [self._chosen(*each) for each in zip(drift, state.members, self._fresh, strict=True)]
            touched = [members.touched(fresh) for members, fresh in zip(state.members, self._fresh, strict=True)]
            asked = self._fetching.ask(state.layer, self._stored(state, chosen), state.records or ())
            partly = self._stored(state, touched)
            mended = self._fetching.mend(partly, state.records or ())
            earlier = cache.ranking.get(state.layer, drift)
            cache.ranking[state.layer] = [now or before for now, before in zip(drift, earlier, strict=True)]
            fresh_above = [self._marked(clusters, state.members[b]) for b, clusters in enumerate(chosen)]
            self._guess(state.layer, fresh_above)
        attended = flow.hidden[:, : self._count].clone()  # what goes in may have to be stored
        self._attend(forward, state.layer, self._rows, attended)
        # Encoding what is all here keeps compute busy while the rest is on its way.
        torn = [[cluster for b, cluster in partly if b == number] for number in range(len(touched))]
        whole = [[one for one in clusters if one not in torn[b]] for b, clusters in enumerate(touched)]
        patch(forward, cache.open_tiers, state, flow, whole, self._fetching, {})
        for sequence, cluster in self._fetching.late(asked):
            chosen[sequence].remove(cluster)
        rows = state.rows_of(chosen)
        hidden = attended.new_empty(len(attended), self._count + rows.count, attended.shape[2])
        hidden[:, : self._count] = attended
        gather_rows(forward, state, flow, rows, chosen, self._fetching, asked, hidden)
        self._attend(forward, state.layer, rows, hidden[:, self._count :])
        for part in Rows.span(0, hidden.shape[1]).parts(part_rows(len(hidden))):
            add_branch(hidden, part, forward.model.feed_forward(state.layer, hidden[:, part]))
        patch(forward, cache.open_tiers, state, flow, torn, self._fetching, mended)
        if self._active != self._tracked:
            append(forward, cache.open_tiers, state, flow, finished)
        self._fresh = [self._marked(clusters, state.members[b]) for b, clusters in enumerate(chosen)]
        self._write_down(state, drift, chosen, touched)
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

    def _marked(self, clusters: Sequence[int], members: Members | None) -> Bool[np.ndarray, " length"]:
        """True at the active columns and at the members of `clusters`: what the next layer gets from this one."""
        fresh = np.zeros(self._length, dtype=bool)
        fresh[slice(*self._active)] = True
        for cluster in clusters:
            assert members is not None, "clusters have members"
            fresh[members.live(cluster)] = True
        return fresh

    def _guess(self, layer: int, fresh: Sequence[Bool[np.ndarray, " length"]]) -> None:
        """Fetch ahead what layers above will probably choose, by their drift at the last update, and not get from the
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

    def _attend(self, forward: Forward, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"]) -> None:
        """Add the attention branch of `rows` to `hidden`, in place."""
        for part in rows.parts(part_rows(len(hidden))):
            normed = forward.model.attention_norm(layer, hidden[:, part])
            add_branch(hidden, part, forward.attention(layer, rows[part], normed))

    def _joined(self, rows: Rows) -> Rows:
        """The active rows, and `rows` behind them."""
        assert rows.index is not None and rows.valid is not None, "members of clusters are scattered"
        active = self._rows.positions(len(rows.index), rows.index.device)
        valid = torch.ones_like(active, dtype=torch.bool) if self._rows.valid is None else self._rows.valid
        return Rows.at(torch.cat([active, rows.index], dim=1), torch.cat([valid, rows.valid], dim=1))

    def _write_down(
        self,
        state: LayerState,
        drift: Sequence[Sequence[float]],
        chosen: Sequence[Sequence[int]],
        touched: Sequence[Sequence[int]],
    ) -> None:
        counts = self._fetching.counts()
        self._cache.log.append(
            LayerUpdate(
                forward=self._number,
                layer=state.layer,
                drift=drift,
                clusters=chosen,
                rows=[
                    sum(len(members.live(cluster)) for cluster in clusters)
                    for members, clusters in zip(state.members, chosen, strict=True)
                ],
                patched=[len(clusters) for clusters in touched],
                ahead=counts.ahead,
                on_demand=counts.on_demand,
                in_vain=counts.in_vain,
                skipped=counts.skipped,
                repairs=counts.repairs,
                fetched_bytes=counts.nbytes,
            )
        )
