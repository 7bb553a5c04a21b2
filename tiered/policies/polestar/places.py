"""Where the columns of a canvas are stored, and which of them an update has fetched; for who looks on."""

from itertools import takewhile

import numpy as np
from jaxtyping import Bool, Int8

from tiered.core.features import Place, Tier
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.layer_state import LayerState, Span
from tiered.policies.polestar.update_log import LayerUpdate


def hidden_places(cache: HiddenCache, forward: int, active: Span, length: int) -> Int8[np.ndarray, "batch length"]:
    """`Place.STORED` and `Place.FETCHED` of every column, after forward number `forward` of the call, with
    guidance on the canvases that see their prompts. Books alone: nothing is read from the device.

    Args:
        cache: as that forward left it.
        active: columns that it would have computed without an update.
        length: columns of the canvas.
    """
    sequences = next((state.batch for state in cache.states.values()), 0)
    places = np.zeros((sequences, length), dtype=np.int8)
    if cache.options.tier is not Tier.DEVICE:
        for state in cache.states.values():
            if state.records is not None:
                for row, members in zip(places, state.members, strict=True):
                    row[members.cluster_of >= 0] |= Place.STORED
        places[_fetched(cache, forward, active, places.shape)] |= Place.FETCHED
    return places[: sequences // cache.copies]


def _fetched(
    cache: HiddenCache, forward: int, active: Span, shape: tuple[int, int]
) -> Bool[np.ndarray, "sequences length"]:
    """Members whose stored rows an update has used. Rows that a layer hands up take the place of stored ones there."""
    fetched, handed = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    handed[:, slice(*active)] = True
    layers = list(takewhile(lambda update: update.forward == forward, reversed(cache.log)))
    for update in reversed(layers):
        state = cache.states[update.layer]
        renewed = _renewed(state, update, shape)
        if state.records is not None:
            fetched |= renewed & ~handed
        handed = renewed
        handed[:, slice(*active)] = True
    return fetched


def _renewed(state: LayerState, update: LayerUpdate, shape: tuple[int, int]) -> Bool[np.ndarray, "sequences length"]:
    """Members of the clusters that the update has chosen in this layer."""
    renewed = np.zeros(shape, dtype=bool)
    for row, members, clusters in zip(renewed, state.members, update.clusters, strict=True):
        for cluster in clusters:
            row[members.live(cluster)] = True
    return renewed
