"""A full pass that captures every layer's input rows: clusters, records, and where drift is measured from."""

from collections.abc import Sequence

from tiered.clustering.cluster_index import ClusterIndex
from tiered.forward.forward import Flow, Forward
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.members import Members


class Refresh:
    """Layer program of a refresh.

    The rows of a layer are encoded before it runs and copied while it and the next ones do; that costs the refresh the
    encoding alone.
    """

    def __init__(self, cache: HiddenCache, regions: tuple[Span, Span], tracked: Span, pads: Sequence[int]) -> None:
        """`regions`: columns before and behind `tracked`, the current block's; `pads`: padding in front of each
        sequence. Under a noise mask what is before it makes no clusters: it sees nothing that will change."""
        self._cache = cache
        self._regions = regions
        self._tracked = tracked
        self._pads = pads
        self._leaders: dict[int, tuple[list[ClusterIndex], list[Members]]] = {}

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        cache, last = self._cache, forward.model.shape.layers - 1
        if layer == 0:
            copies = len(flow.hidden) // len(self._pads)
            cache.begin(forward.tiers, copies)
            self._pads = [*self._pads] * copies
            if forward.model.shape.noise_masked:
                (_, end), behind = self._regions
                self._regions = (end, end), behind
        if layer == last:
            return forward.dense(layer, flow)
        shared = self._leaders.get(cache.leader(layer))
        indices = cache.cluster(layer, flow.hidden, self._regions, self._pads, shared and shared[0])
        if not any(index.clusters for index in indices):
            return forward.dense(layer, flow)
        members = shared[1] if shared else cache.members(indices, flow.hidden.shape[1])
        self._leaders[layer] = indices, members
        records = cache.store(layer, flow.hidden, indices) if layer else None
        flow = forward.dense(layer, flow)
        cache.states[layer] = LayerState.of(forward, layer, self._tracked, indices, list(members), records)
        return flow
