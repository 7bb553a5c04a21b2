"""The window of dKV-Cache-Greedy as its authors' code counts it (horseee/dKV-Cache, commit 49a76fcc)."""

import torch
from jaxtyping import Bool
from torch import Tensor

from tiered.policies.base import Step


def masks_around(step: Step, fresh: Bool[Tensor, "batch length"], window: int) -> Bool[Tensor, "batch length"]:
    """`window` rows around each token that is committed next: masks before the last commit that no other token has
    taken yet, in turn on the left and on the right, outwards. `fresh`: what that commit fixed.

    Walks over tokens on the host.
    """
    assert step.upcoming is not None, "the runtime refuses rules that decide on the logits"
    length = step.canvas.length
    taken = fresh.clone()
    taken[:, step.start : step.stop] |= step.upcoming
    masked = (step.canvas.pending(0, length) | fresh).tolist()
    chosen = taken.tolist()
    for masks, rows, upcoming in zip(masked, chosen, step.upcoming.tolist(), strict=True):
        for center in (step.start + column for column, is_next in enumerate(upcoming) if is_next):
            found, distance = 0, 1
            while found < window and distance < length:
                for column in (center - distance, center + distance):
                    if found < window and 0 <= column < length and masks[column] and not rows[column]:
                        rows[column] = True
                        found += 1
                distance += 1
    return torch.tensor(chosen, device=fresh.device)
