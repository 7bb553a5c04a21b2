"""The hidden states that a call keeps: those that enter a group of layers, filled by a refresh."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from tiered.clustering.allocation import MOST_ROWS_PER_CLUSTER
from tiered.clustering.areas import cluster_areas, cut_clusters
from tiered.clustering.cluster_index import ClusterIndex
from tiered.core.features import ColumnState, Tier
from tiered.core.ops import Op
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.options import PolestarOptions
from tiered.policies.polestar.update_log import GroupUpdate
from tiered.tiers.manager import TierManager

KMEANS_ITERATIONS = 5  # as in the authors' code; more moves few rows


@dataclass(slots=True)
class HiddenCache:
    """Clusters, records and drift of the layers that lead a group (`leader`).

    An update chooses clusters where a group begins, and their rows go up through all of it: the layers that follow
    would choose the same, for rows whose inputs have moved come first. They read nothing that is stored, so nothing
    of theirs is. The first layer's rows are embeddings of tokens that stand still, and are looked up where they are
    needed; what comes out of the last layer is read of the current block alone, so no other row goes through it.
    Records are therefore of the leaders between.

    Attributes:
        options: what is kept, and how.
        states: by leader; empty before the first refresh, and where there is nothing outside the block.
        ranking: drift of every cluster at the last update, by leader and sequence: what the next will probably renew.
        copies: canvases of each sequence: two with guidance.
        tiers: where records are; of the call.
        log: what updates did.
    """

    options: PolestarOptions
    states: dict[int, LayerState] = field(default_factory=dict)
    ranking: dict[int, list[list[float]]] = field(default_factory=dict)
    copies: int = 1
    tiers: TierManager | None = None
    log: list[GroupUpdate] = field(default_factory=list)

    def begin(self, tiers: TierManager | None, copies: int) -> None:
        """A refresh begins: forget everything."""
        for state in self.states.values():
            self._forget(state, range(state.batch))
        self.states.clear()
        self.ranking.clear()
        self.tiers, self.copies = tiers, copies

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences of the canvas alone (ascending)."""
        for state in self.states.values():
            batch = state.batch // self.copies
            kept = [copy * batch + number for copy in range(self.copies) for number in sequences]
            self._forget(state, set(range(state.batch)).difference(kept))
            state.keep(kept)
            if state.layer in self.ranking:
                self.ranking[state.layer] = [self.ranking[state.layer][number] for number in kept]

    def leads(self, layer: int) -> bool:
        """Whether `layer` begins a group of `cluster_layers`. Embeddings say nothing of context: the first layer is a
        group of its own."""
        return layer == 0 or (layer - 1) % self.options.cluster_layers == 0

    def layers_of(self, leader: int, layers: int) -> int:
        """How many layers the group of `leader` has in a model of `layers`, whose last is in none."""
        return min(self.options.cluster_layers, layers - 1 - leader) if leader else 1

    @spanned(Op.CLUSTERING)
    def cluster(
        self,
        hidden: Float[Tensor, "batch length width"],
        areas: tuple[Span, Span],
        pads: Sequence[int],
    ) -> list[ClusterIndex]:
        """Clusters of `hidden`, what goes into a group of layers. `pads`: columns of padding in front of each
        sequence."""
        length = hidden.shape[1]
        (_, end), (suffix, last) = areas
        padding = on_device(pads, hidden.device)[:, None]
        valid = torch.arange(length, device=hidden.device)[None] >= padding if any(pads) else None
        # Sequences that are too short for all clusters get as many as they have rows.
        groups: dict[int | str, list[int]] = defaultdict(list)
        for number, pad in enumerate(pads):
            prefix, behind = max(0, end - max(areas[0][0], pad)), last - suffix
            wanted = self.options.clusters
            fitting = wanted if wanted == "auto" else min(max(wanted, (prefix > 0) + (behind > 0)), prefix + behind)
            groups[fitting].append(number)
        found: dict[int, ClusterIndex] = {}
        for count, numbers in groups.items():
            part = slice(None) if len(numbers) == len(pads) else numbers
            indices = cluster_areas(
                hidden[part],
                areas,
                count,  # pyright: ignore[reportArgumentType]
                valid=None if valid is None else valid[part],
                iterations=KMEANS_ITERATIONS,
                seed=self.options.seed,
                backend=self.options.kmeans if hidden.is_cpu else "torch",
            )
            if count == "auto":
                indices = cut_clusters(hidden[part], indices, MOST_ROWS_PER_CLUSTER)
            found.update(zip(numbers, indices, strict=True))
        return [found[number] for number in range(len(pads))]

    @spanned(Op.STORE)
    def store(
        self, layer: int, hidden: Float[Tensor, "batch length width"], indices: Sequence[ClusterIndex]
    ) -> list[HiddenRecords]:
        """Hand the members of every cluster to the tiers; the copies run while the layer does."""
        return [
            HiddenRecords.store(
                self.open_tiers,
                hidden[sequence],
                index,
                layer=layer,
                sequence=sequence,
                codec=self.options.codec,
                tier=Tier(self.options.hidden_tier),
            )
            for sequence, index in enumerate(indices)
        ]

    @spanned(Op.CLUSTERING)
    def members(self, indices: Sequence[ClusterIndex], length: int) -> list[Members]:
        """The same clusters for the host. Reads from the device once a sequence."""
        return [Members.of(index.rows.tolist(), index.sizes, length) for index in indices]

    @property
    def open_tiers(self) -> TierManager:
        """Where records are."""
        assert self.tiers is not None, "the runtime opens tiers for a policy that keeps hidden states"
        return self.tiers

    def column_states(self, forward: int, active: Span, length: int) -> Int8[np.ndarray, "batch length"]:
        """`ColumnState.STORED` and `FETCHED` of every column, after forward number `forward` of the call, with guidance
        on the canvases that see their prompts; for what looks on. Nothing is read from the device.

        Args:
            forward: the last one; the cache is as it left it.
            active: columns that it would have computed without an update.
            length: columns of the canvas.
        """
        sequences = next((state.batch for state in self.states.values()), 0)
        places = np.zeros((sequences, length), dtype=np.int8)
        if self.options.hidden_tier != Tier.DEVICE:
            for state in self.states.values():
                if state.records is not None:
                    for row, members in zip(places, state.members, strict=True):
                        row[members.cluster_of >= 0] |= ColumnState.STORED
            places[self._fetched(forward, active, places.shape)] |= ColumnState.FETCHED
        return places[: sequences // self.copies]

    def _fetched(self, forward: int, active: Span, shape: tuple[int, int]) -> Bool[np.ndarray, "sequences length"]:
        """Members whose stored rows an update has used. Rows that a layer hands up take the place of stored ones."""
        fetched, handed = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        handed[:, slice(*active)] = True
        for update in reversed([*takewhile(lambda update: update.forward == forward, reversed(self.log))]):
            state, renewed = self.states[update.layer], np.zeros(shape, dtype=bool)
            for row, members, clusters in zip(renewed, state.members, update.clusters, strict=True):
                for cluster in clusters:
                    row[members.live(cluster)] = True
            if state.records is not None:
                fetched |= renewed & ~handed
            handed = renewed
            handed[:, slice(*active)] = True
        return fetched

    def _forget(self, state: LayerState, sequences: Iterable[int]) -> None:
        if state.records is not None:
            for number in sequences:
                state.records[number].forget(self.open_tiers)


class Refresh:
    """Layer program of a refresh: captures the rows that go into every group of layers as clusters and records, and
    begins their drift.

    They are encoded before the layer runs and copied while it and the next ones do; that costs the refresh the encoding
    alone.
    """

    def __init__(self, cache: HiddenCache, areas: tuple[Span, Span], current: Span, pads: Sequence[int]) -> None:
        """`areas`: columns before and behind `current`, the current block's; `pads`: padding in front of each
        sequence. Under a noise mask what is before it makes no clusters: it sees nothing that will change."""
        self._cache = cache
        self._areas = areas
        self._current = current
        self._pads = pads

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        cache, last = self._cache, forward.model.shape.layers - 1
        if layer == 0:
            copies = len(flow.hidden) // len(self._pads)
            cache.begin(forward.tiers, copies)
            self._pads = [*self._pads] * copies
            if forward.model.shape.noise_masked:
                (_, end), behind = self._areas
                self._areas = (end, end), behind
        if layer == last or not cache.leads(layer):
            return forward.dense(layer, flow)
        indices = cache.cluster(flow.hidden, self._areas, self._pads)
        if not any(index.clusters for index in indices):
            return forward.dense(layer, flow)
        members = cache.members(indices, flow.hidden.shape[1])
        records = cache.store(layer, flow.hidden, indices) if layer else None
        flow = forward.dense(layer, flow)
        cache.states[layer] = LayerState.of(forward, layer, self._current, indices, members, records)
        return flow
