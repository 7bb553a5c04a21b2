"""The window of dKV-Cache-Greedy as its authors' code counts it (horseee/dKV-Cache, commit 49a76fcc)."""

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.kernels.host_values import on_device
from tiered.policies.base import Step


def masks_around(
    step: Step, upcoming: Int[Tensor, "batch block"], fresh: Bool[Tensor, "batch length"], window: int
) -> Bool[Tensor, "batch length"]:
    """What is committed next (`upcoming`, as in `Step`), what the last commit fixed (`fresh`), and `window` rows around
    each of the former in turn: masks before that commit that no other token has taken yet, in turn on the left and on
    the right, outwards.

    Walks over tokens on the host.
    """
    length = step.canvas.length
    taken = fresh.clone()
    taken[:, step.start : step.stop] |= upcoming > 0
    masked = (step.canvas.pending(0, length) | fresh).tolist()
    chosen = taken.tolist()
    for masks, rows, turns in zip(masked, chosen, upcoming.tolist(), strict=True):
        in_turn = sorted((turn, step.start + column) for column, turn in enumerate(turns) if turn)
        for _, center in in_turn:
            found, distance = 0, 1
            while found < window and distance < length:
                for column in (center - distance, center + distance):
                    if found < window and 0 <= column < length and masks[column] and not rows[column]:
                        rows[column] = True
                        found += 1
                distance += 1
    return on_device(chosen, fresh.device)
