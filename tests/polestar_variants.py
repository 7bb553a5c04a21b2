"""`Polestar` with other constants than the options that it has."""

from typing import Any

from tiered.core.features import Tier
from tiered.policies.polestar.policy import Polestar


def variant(
    tier: Tier | str = Tier.HOST,
    window: tuple[int, int] | None = None,
    cumulative: int | None = None,
    moves: bool = False,
    **options: Any,
) -> Polestar:
    """A policy with these options that keeps hidden states in `tier`, clusters `window` blocks, and updates after more
    than `cumulative` commits. `moves`: whether the moves of centroids count as drift."""
    constants = {
        "hidden_tier": Tier(tier), "window_blocks": window, "cumulative_threshold": cumulative, "measures_moves": moves,
    }  # fmt: skip
    return type("Variant", (Polestar,), {**constants, "__slots__": ()})(**options)
