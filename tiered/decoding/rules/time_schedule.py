"""Dream's time (arXiv 2508.15487): it falls from 1 in equal steps, and says how much of what is masked a step fixes."""

import torch
from jaxtyping import Float32
from torch import Tensor

from tiered.core.checks import check_number

# Beyond it, times of neighbouring steps come too close in float32.
MOST_STEPS = 10**6


def fixed_shares(steps: int, floor: float) -> list[float]:
    """1 − s/t for each step from time t to s, in float32 as the official code computes it; 1 for the last, which leaves
    nothing. `floor` is the time that the last step would end at."""
    times: Float32[Tensor, " times"] = torch.linspace(1, floor, steps + 1)
    return [*(1 - times[1:-1] / times[:-2]).tolist(), 1.0]


def check_schedule_floor(floor: object) -> None:
    """Raise `TypeError` where `floor` is no number, `ValueError` where it is not between 0 and 1, both exclusive."""
    check_number("schedule_floor", floor, least=0.0, most=1.0)
    if floor in (0, 1):
        raise ValueError(f"schedule_floor = {floor}; a number above 0 and below 1 is allowed")
