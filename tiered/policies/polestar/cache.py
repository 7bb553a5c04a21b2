"""The hidden states of a call: rows that enter a group of layers, stored by a refresh."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from tiered.clustering.allocation import MOST_ROWS_PER_CLUSTER, chosen_clusters
from tiered.clustering.areas import cluster_areas, cut_clusters
from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.faiss_backend import Backend
from tiered.core.features import ColumnState, Tier
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.policies.base import Step
from tiered.policies.polestar.fetching import Fetching
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.update_log import GroupUpdate
from tiered.tiers.stored_rows import StoredRows

KMEANS_ITERATIONS = 5  # as in the authors' code; further iterations move few rows
KMEANS_SEED = 0


@dataclass(slots=True, kw_only=True)
class HiddenCache:
    """Clusters, stored rows and drift of the layers that lead a group (`leads`).

    An update chooses clusters in the leader, and their rows go up through the whole group. The other layers would
    choose the same clusters, because rows with new inputs come first, so they store no rows. The first layer's rows are
    embeddings, and in the last layer only the current block is read. So only the leaders between them store rows.

    Attributes:
        clusters, top_m, backend: options of `Polestar`; `backend` is `kmeans`.
        group: number of layers of a group.
        beside: whether clusters updated in the layer below come in addition to the M (`Polestar.from_below`).
        of_output: whether drift is that of the attention's output (`Polestar.drift`).
        measures_moves: whether the move of a centroid counts as drift (`Polestar.measures_moves`).
        states: states of layers by leader; empty before the first refresh, and if there are no rows outside the block.
        ranking: drift of every cluster at the last update, by leader and sequence.
        fetching: fetches of stored rows for updates; set by the first refresh.
        copies: canvases of each sequence; 2 with guidance.
        log: records of updates.
        updated_in, fetched: number of the last forward with an update, and True for columns of stored rows that it
            used.
    """

    clusters: int | Literal["auto", "rows"]
    top_m: int | Literal["auto"]
    group: int
    beside: bool
    backend: Backend
    of_output: bool
    measures_moves: bool
    states: dict[int, LayerState] = field(default_factory=dict)
    ranking: dict[int, list[list[float]]] = field(default_factory=dict)
    fetching: Fetching = field(init=False)
    copies: int = 1
    log: list[GroupUpdate] = field(default_factory=list)
    updated_in: int = -1
    fetched: Bool[np.ndarray, "sequences length"] = field(init=False)

    def begin(self, stored: StoredRows | None, copies: int) -> None:
        """Drop all states at the beginning of a refresh."""
        self.states.clear()
        self.ranking.clear()
        assert stored is not None, "the runtime opens tiers for a policy that keeps hidden states"
        self.fetching, self.copies = Fetching(stored), copies

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences of the canvas (ascending)."""
        for state in self.states.values():
            batch = len(state.members) // self.copies
            kept = [copy * batch + number for copy in range(self.copies) for number in sequences]
            state.keep(kept)
            if state.layer in self.ranking:
                self.ranking[state.layer] = [self.ranking[state.layer][number] for number in kept]

    def leads(self, layer: int) -> bool:
        """True if `layer` begins a group. The first layer is a group by itself, because embeddings have no context."""
        return layer == 0 or (layer - 1) % self.group == 0

    def layers_of(self, leader: int, layers: int) -> int:
        """Number of layers in the group of `leader`, in a model of `layers`. The model's last layer is in no group."""
        return min(self.group, layers - 1 - leader) if leader else 1

    def most_drifted(
        self, drift: Sequence[float], members: Members, recomputed: Bool[np.ndarray, " length"]
    ) -> list[int]:
        """`top_m` clusters of a sequence, the most drifted first.

        Clusters with half or more of their rows recomputed in the layer below come first, because their inputs have
        changed. They are among the `top_m` or in addition (`beside`). This does not apply if the moves of centroids
        count as drift. Clusters whose rows were all removed are never chosen.
        """
        below = [] if self.measures_moves else members.mostly(recomputed)
        below = [cluster for cluster in below if cluster < len(drift)]  # a cluster may be newer than the drift
        last = np.ones(len(drift), dtype=bool)
        last[below] = False
        ranked = np.lexsort((-np.asarray(drift), last))  # equal ones stay in order
        ranked = ranked[np.isin(ranked, members.cluster_of)]
        most = chosen_clusters(self.top_m, len(drift), single=self.clusters == "rows")
        return ranked[: most + len(below) * self.beside].tolist()

    @spanned(Op.CLUSTERING)
    def cluster(
        self, hidden: Float[Tensor, "batch length width"], areas: tuple[Span, Span], pads: Sequence[int]
    ) -> list[ClusterIndex]:
        """Clusters of the rows that enter a group. `pads`: padding columns before each sequence."""
        (first, end), (suffix, last) = areas
        wanted, valid = self.clusters, None
        if any(pads):
            columns = torch.arange(hidden.shape[1], device=hidden.device)
            valid = columns >= on_device(pads, hidden.device)[:, None]
        # A sequence with fewer rows than clusters gets a cluster for each row.
        groups: dict[int | Literal["auto"], list[int]] = defaultdict(list)
        for number, pad in enumerate(pads):
            prefix, behind = max(0, end - max(first, pad)), last - suffix
            rows, fewest = prefix + behind, (prefix > 0) + (behind > 0)
            fitting = wanted if wanted == "auto" else rows if wanted == "rows" else min(max(wanted, fewest), rows)
            groups[fitting].append(number)
        found: dict[int, ClusterIndex] = {}
        for count, numbers in groups.items():
            part = slice(None) if len(numbers) == len(pads) else numbers
            indices = cluster_areas(
                hidden[part],
                areas,
                count,
                valid=None if valid is None else valid[part],
                iterations=KMEANS_ITERATIONS,
                seed=KMEANS_SEED,
                backend=self.backend if hidden.is_cpu else "torch",
            )
            if count == "auto":
                indices = cut_clusters(hidden[part], indices, MOST_ROWS_PER_CLUSTER)
            found.update(zip(numbers, indices, strict=True))
        return [found[number] for number in range(len(pads))]

    def column_states(self, forward: int, length: int) -> Int8[np.ndarray, "batch length"]:
        """`ColumnState` flags `STORED` and `FETCHED` of columns after `forward`, for the conditional canvases. Reads
        nothing from the device."""
        sequences = next((len(state.members) for state in self.states.values()), 0)
        places = np.zeros((sequences, length), dtype=np.int8)
        for state in self.states.values():
            if state.stored is not None and state.stored.tier is not Tier.DEVICE:
                for row, members in zip(places, state.members, strict=True):
                    row[members.cluster_of >= 0] |= ColumnState.STORED
                if forward == self.updated_in:
                    places[self.fetched] |= ColumnState.FETCHED
        return places[: sequences // self.copies]


class Refresh:
    """Layer program of a refresh, which stores the rows that enter every group of layers as clusters, and starts their
    drift. Rows are encoded before the layer runs, and copied while it and the next layers run."""

    def __init__(self, cache: HiddenCache, step: Step, window: tuple[int, int] | None) -> None:
        """`window`: numbers of blocks before and behind the current one that are clustered; None for all."""
        first, stop, length = step.first_row, step.stop, step.canvas.length
        before, behind = (length, length) if window is None else (blocks * (stop - step.start) for blocks in window)
        self._areas = (max(0, first - before), first), (stop, min(length, stop + behind))
        self._cache, self._current, self._pads = cache, (first, stop), [*step.canvas.pad_counts]

    def __call__(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        cache = self._cache
        if layer == 0:
            copies = len(pass_.hidden) // len(self._pads)
            cache.begin(forward.stored, copies)
            self._pads = [*self._pads] * copies
            if forward.model.shape.sight == "noise":  # columns before the block do not go stale
                (_, end), behind = self._areas
                self._areas = (end, end), behind
        leads = layer < forward.model.shape.layers - 1 and cache.leads(layer)
        indices = cache.cluster(pass_.hidden, self._areas, self._pads) if leads else []
        if not any(index.clusters for index in indices):
            return forward.dense(layer, pass_)
        members = [Members.of(index.columns, index.sizes, forward.length) for index in indices]
        stored = forward.stored if layer else None
        if stored is not None:
            for region, (rows, index, own) in enumerate(zip(pass_.hidden, indices, members, strict=True)):
                if index.clusters:
                    everything = [own.stored(region, cluster) for cluster in range(index.clusters)]
                    stored.store(layer, everything, rows[index.rows], index.centroids)
        pass_ = forward.dense(layer, pass_)
        cache.states[layer] = LayerState.of(forward, layer, self._current, indices, members, stored, cache.of_output)
        return pass_
