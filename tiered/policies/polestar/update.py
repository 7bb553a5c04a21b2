"""A step that recomputes the most drifted clusters, group of layers by group, beside the rows of a plain step.

The rows of the clusters that a group chooses go up through all of its layers, and into the next group. There they patch
stored rows and centroids. Rows go on up if their cluster is chosen again, and end there otherwise.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tiered.core.ops import Op
from tiered.core.spans import span, spanned
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.policies.base import Step
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.layer_state import LayerState
from tiered.policies.polestar.members import GatheredRows, by_column
from tiered.policies.polestar.update_log import GroupUpdate


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

        chosen for their drift ─┬─ all members are from below ──┬─> recomputed, and sent up
                                └─ else: fetched ───────────────┘
        affected: with members from below ── partial ones: the other members are refetched ──> stored anew

    If the moves of centroids count as drift, affected clusters are stored before drift is measured.
    """

    def __init__(
        self, cache: HiddenCache, step: Step, first: int, updating: Sequence[bool], number: int, kept: bool
    ) -> None:
        """
        Args:
            first: first active column. Active columns, computed by any step, are the current block, and the finished
                block if this one begins without a refresh.
            updating: True for sequences that update; the others take a plain step.
            number: number of the forward in the call.
            kept: whether a later update may read the rows that this one stores; it stores none otherwise.
        """
        self._cache, self._number, self._kept = cache, number, kept
        self._current, self._appends = (step.first_row, step.stop), first < step.first_row
        self._updating = [*updating] * cache.copies
        # Rows from below: their columns, −1 at invalid rows; and the same by column.
        taking_part = np.array([*step.active] * cache.copies)
        self._from_below = np.where(taking_part[:, None], np.arange(first, step.stop), -1)
        self._recomputed = np.zeros((len(taking_part), step.canvas.length), dtype=bool)
        self._recomputed[:, first : step.stop] = taking_part[:, None]

    def __call__(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        if layer == 0:
            self._cache.updated_in, self._cache.fetched = self._number, np.zeros_like(self._recomputed)
            self._here = None if all(self._updating) else on_device(self._updating, forward.ids.device)
            self._rows = pass_.rows  # rows of the active columns, a span, in every layer
        if layer < forward.model.shape.layers - 1:
            if (state := self._cache.states.get(layer)) is not None:
                return self._lead(forward, state, pass_)
            self._guess(layer)
        return forward.dense(layer, pass_)

    def _lead(self, forward: Forward, state: LayerState, pass_: Pass) -> Pass:
        cache, fetching, below, count = self._cache, self._cache.fetching, self._recomputed, self._rows.count
        if self._appends:  # the current block leaves its clusters
            state.retire(self._current)
        stores = self._kept or cache.measures_moves
        affected = [members.affected(own) if stores else [] for members, own in zip(state.members, below, strict=True)]
        patched = [len(clusters) for clusters in affected]
        known, columns = [pass_.hidden], [self._from_below]
        moved = last_queries = None
        if cache.measures_moves:
            moved = state.patch(forward, known, columns, affected, fetching.refetch(state, affected, below))
            if moved is not None:
                last_queries = state.queries
                state.recenter(forward, moved, counts=True)
            affected = [[] for _ in affected]
        measured = state.measure(forward, pass_, self._current, count, self._here, last_queries)
        drift = [of if updates else [] for of, updates in zip(measured, self._updating, strict=True)]
        del moved, last_queries  # not held while the rows attend
        with span(Op.FETCH):
            chosen = [cache.most_drifted(*each) for each in zip(drift, state.members, below, strict=True)]
            fetched = fetching.ask(state, chosen, below)
            refetched = fetching.refetch(state, affected, below, fetched)
            earlier = cache.ranking.get(state.layer, drift)
            cache.ranking[state.layer] = [now or before for now, before in zip(drift, earlier, strict=True)]
        layout = GatheredRows.of(state.members, chosen, columns, count)
        self._from_below, self._recomputed = layout.columns, by_column(layout.columns, below.shape[1])
        self._guess(state.layer)
        hidden = pass_.hidden.new_empty(*layout.columns.shape, pass_.hidden.shape[2])
        hidden[:, :count] = pass_.hidden[:, :count]  # a copy, because the layer's input may have to be stored
        forward.attend(state.layer, self._rows, hidden[:, :count])
        rows = state.gather_rows(forward, known, layout, fetched, hidden)
        if any(affected):
            known.append(hidden[:, count:].clone())
            columns.append(layout.columns[:, count:])
        forward.attend(state.layer, rows[count:], hidden[:, count:])
        forward.mlp(state.layer, hidden)
        moved = state.patch(forward, known, columns, affected, refetched)
        del known
        if moved is not None:
            state.recenter(forward, moved)
        if self._appends:
            state.append(forward, self._current, pass_.hidden)
        state.current = self._current
        if state.stored is not None:
            cache.fetched |= self._recomputed & ~below
        cache.log.append(
            GroupUpdate(
                forward=self._number, layer=state.layer, drift=drift, clusters=chosen, patched=patched,
                layers=cache.layers_of(state.layer, forward.model.shape.layers),
                rows=(layout.columns[:, count:] >= 0).sum(1).tolist(), **fetching.counts(),
            )
        )  # fmt: skip
        return replace(pass_, rows=rows, hidden=hidden)

    @spanned(Op.FETCH)
    def _guess(self, layer: int) -> None:
        """Fetch ahead the clusters that the next layer will probably choose, by the drift of the last update, except
        those that come from `layer`."""
        above, ranking = self._cache.states.get(layer + 1), self._cache.ranking.get(layer + 1)
        if above is None or ranking is None or self._cache.measures_moves:
            return  # no layer state, no drift yet, or its records change before it chooses
        drift = [of if updates else [] for of, updates in zip(ranking, self._updating, strict=True)]
        likely = [self._cache.most_drifted(*each) for each in zip(drift, above.members, self._recomputed, strict=True)]
        self._cache.fetching.guess(above, likely, self._recomputed)
