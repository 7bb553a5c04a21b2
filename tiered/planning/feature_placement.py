"""Books: which layers of which features leave the device where it has no room for all."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping

from tiered.core.features import Feature

# Keys and values are read in every step; the hidden states and branches, by updates alone.
COLDEST_FIRST: tuple[tuple[Feature, ...], ...] = (
    (Feature.HIDDEN,),
    (Feature.FFN_OUT,),
    (Feature.ATTN_OUT,),
    (Feature.VALUE, Feature.KEY),
)
WORKSPACES = 2  # of each feature: one is read while the other is filled

# Streamed layers by feature, and the workspaces of each.
Placement = tuple[Mapping[Feature, int], int]


def placed(
    kept: Collection[Feature],
    forced: Collection[Feature],
    layers: int,
    device: Callable[[Placement], bool],
    below: Callable[[Placement], bool],
) -> Placement | None:
    """The fewest layers to stream, coldest features first, with which the device has room and the tiers below as well.

    Args:
        kept: features that are kept for all layers.
        forced: of them, those that are streamed in any case.
        layers: of the model.
        device, below: whether a placement fits the device, and the tiers below it.

    Returns None where none fits.
    """
    start: Placement = (dict.fromkeys(forced, layers), WORKSPACES)
    if device(start):
        return start if below(start) else None
    for workspaces in range(WORKSPACES, 0, -1):
        counts = dict(start[0])
        for group in COLDEST_FIRST:
            here = [feature for feature in group if feature in kept and feature not in forced]
            if not here:
                continue

            def streamed(count: int, before: Mapping[Feature, int] = counts, here=here, among=workspaces) -> Placement:
                return {**before, **dict.fromkeys(here, count)}, among

            if not device(streamed(layers)):
                counts = dict(streamed(layers)[0])
                continue
            # So many as there are workspaces save nothing.
            count = bisect_left(range(layers), True, lo=min(workspaces + 1, layers), key=lambda n: device(streamed(n)))
            if below(streamed(count)):
                return streamed(count)
            break
    return None


def everything(kept: Collection[Feature], layers: int) -> Placement:
    """All that can be streamed through as little as possible."""
    return dict.fromkeys(kept, layers), 1
