"""Which rows have moved most: against plain cosine in float64, and ties that noise must not break."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiered.policies.dllm_cache.program import distances, farthest_first, turns_of


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flat(rows: Tensor) -> Tensor:
    """[batch, rows, all heads together], float64."""
    return rows.transpose(1, 2).flatten(2).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_the_order_is_that_of_cosine(share: float, dtype: torch.dtype):
    cached = random(3, 2, 20, 8).to(dtype)
    new = (cached + share * random(3, 2, 20, 8, seed=1) * random(3, 1, 20, 1, seed=2)).to(dtype)
    cosine = F.cosine_similarity(flat(new), flat(cached), dim=-1)
    torch.testing.assert_close(distances(new, cached).double().square() / 2, 1 - cosine, atol=1e-6, rtol=1e-3)


def test_length_moves_no_direction():
    cached = random(1, 2, 5, 8)
    assert distances(3 * cached, cached).eq(0).all()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rounding_is_no_movement(scale: float):
    cached = scale * random(2, 2, 9, 16)
    noise = random(2, 2, 9, 16, seed=1)
    assert distances(cached + 1e-5 * scale * noise, cached).eq(0).all()
    assert distances(cached + 1e-2 * scale * noise, cached).gt(0).all()


def test_rows_of_zeros_are_still_until_they_move():
    nothing = torch.zeros(1, 2, 3, 4)
    assert distances(nothing, nothing).tolist() == [[0.0] * 3]
    assert distances(random(1, 2, 3, 4), nothing).gt(0).all()


def test_arguments_are_not_changed():
    new, cached = random(1, 2, 5, 8), random(1, 2, 5, 8, seed=1)
    before = new.clone(), cached.clone()
    distances(new, cached)
    assert torch.equal(new, before[0]) and torch.equal(cached, before[1])


@pytest.mark.parametrize(
    ("apart", "start", "order"),
    [
        ([0.1, 0.3, 0.2, 0.4], 0, [3, 1, 2, 0]),
        ([0.0, 0.0, 0.0, 0.0], 0, [1, 2, 3, 0]),
        ([0.0, 0.0, 0.0, 0.0], 1, [2, 1, 3, 0]),
        ([0.0, 0.5, 0.0, 0.5], 1, [1, 3, 2, 0]),
        ([0.2, 0.0, 0.1, 0.0], 1, [0, 2, 1, 3]),
    ],
)
def test_the_block_takes_turns_among_rows_that_have_moved_alike(apart: list[float], start: int, order: list[int]):
    other = [float(row) for row in range(4)]
    turns = turns_of(torch.tensor([start, 0]), 4, (1, 3))
    assert farthest_first(torch.tensor([apart, other]), turns).tolist() == [order, [3, 2, 1, 0]]
