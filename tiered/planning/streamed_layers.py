"""Books: the layers of each feature that leave the device if it has no room for all."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from tiered.core.features import Feature

# Every step reads keys and values; only updates read hidden states and branches.
COLDEST_FIRST: tuple[tuple[Feature, ...], ...] = (
    (Feature.HIDDEN,),
    (Feature.FFN_OUT,),
    (Feature.ATTN_OUT,),
    (Feature.VALUE, Feature.KEY),
)
SLOTS = 2  # of each feature: one is read while the other is filled


class StreamedLayers(NamedTuple):
    """Streamed layers and slots of each feature."""

    counts: Mapping[Feature, int]
    slots: int = SLOTS


def fewest_streamed(
    kept: Collection[Feature],
    forced: Collection[Feature],
    layers: int,
    device: Callable[[StreamedLayers], bool],
    below: Callable[[StreamedLayers], bool],
) -> StreamedLayers | None:
    """The fewest layers to stream, coldest features first, with which the device has room and the tiers below as well.

    Args:
        kept: features that are kept for all layers.
        forced: features of these that must be streamed.
        layers: number of the model's layers.
        device, below: whether the device, and the tiers below it, have room with these layers streamed.

    Returns None if no number of layers fits.
    """
    start = StreamedLayers(dict.fromkeys(forced, layers))
    if device(start):
        return start if below(start) else None
    for slots in range(SLOTS, 0, -1):
        counts = dict(start.counts)
        for group in COLDEST_FIRST:
            here = [feature for feature in group if feature in kept and feature not in forced]
            if not here:
                continue

            def streamed(count: int, before=counts, here=here, among=slots) -> StreamedLayers:
                return StreamedLayers({**before, **dict.fromkeys(here, count)}, among)

            if not device(streamed(layers)):
                counts = dict(streamed(layers).counts)
                continue
            # Streaming no more layers than there are slots saves nothing.
            count = bisect_left(range(layers), True, lo=min(slots + 1, layers), key=lambda n: device(streamed(n)))
            if below(streamed(count)):
                return streamed(count)
            break
    return None
