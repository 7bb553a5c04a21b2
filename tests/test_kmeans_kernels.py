"""Kernels of k-means against their references: picks of its start, rows for empty clusters, and turned directions."""

import math

import pytest
import torch
from torch import Tensor

from tiered.kernels import far_rows_ref, greedy_picks_ref, turn_directions_ref

pytest.importorskip("triton")

from tiered.kernels import far_rows, greedy_picks, turn_directions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APART = 2**-17
# Lanes without a row are compared with infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def units(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-18)


def few_directions(groups: int, n: int, width: int) -> Tensor:
    """Rows of two directions and zero rows in turn."""
    rows = units(random(groups, 3, width))[:, torch.arange(n) % 3]
    return rows * (torch.arange(n) % 3 > 0)[:, None]


# Sketches and their number of clusters: rows of one tile, of some tiles, and of more tiles than are looked at together.
SKETCHES: dict[str, tuple[Tensor, int]] = {
    "one tile": (units(random(2, 40, 16)), 5),
    "a row": (units(random(1, 1, 3)), 1),
    "tiles": (units(random(1, 200, 40)), 6),
    "many draws": (units(random(1, 70, 128)), 700),
    "few directions": (few_directions(2, 100, 24), 5),
    "no direction": (torch.zeros(1, 70, 8), 3),
}


def picks_of(module: object, name: str) -> Tensor:
    sketch, clusters = SKETCHES[name]
    shape = min(clusters, 7), 4 + int(2 * math.log(clusters))
    draws = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws[:, -1] = 1 - 2**-53  # the last row of all that are left
    given = sketch, (sketch != 0).any(-1), draws
    return module.greedy_picks(*(tensor.to(DEVICE) for tensor in given), APART).cpu()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SKETCHES)
def test_picks_are_the_references(name: str):
    """Rows are so far apart that rounding chooses none."""
    found = picks_of(greedy_picks, name)
    assert torch.equal(found, picks_of(greedy_picks_ref, name))
    assert found.dtype == torch.int64


def test_picks_from_more_tiles_than_are_looked_at_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(greedy_picks, "ROWS", 2)
    assert torch.equal(picks_of(greedy_picks, "one tile"), picks_of(greedy_picks_ref, "one tile"))


RANKS: dict[str, Tensor] = {
    "random": 2 * torch.rand(3, 1500, generator=torch.Generator().manual_seed(0)),
    "alike": torch.full((2, 60), 0.25),
    "few": torch.tensor([[0.5, 1.0, 0.99, -2.0, 0.5, -1.0, 1.0]]),
    "whole steps": (torch.arange(130).remainder(65) / 64)[None],
    "near": 1e-6 * random(1, 50).abs(),
    "barred": torch.full((1, 9), -2.0),
}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", RANKS)
def test_rows_for_empty_clusters_are_the_references(name: str, share: float):
    rank = RANKS[name].to(DEVICE)
    empty = torch.rand(len(rank), min(rank.shape[1], 40), generator=torch.Generator().manual_seed(1)) < share
    empty = empty.to(DEVICE)
    found, expected = (of.far_rows(rank, empty, APART) for of in (far_rows, far_rows_ref))
    assert torch.equal(found[empty], expected[empty])
    assert ((found >= 0) & (found < rank.shape[1])).all()


def test_more_empty_clusters_than_are_looked_at_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(far_rows, "TILE", 16)
    test_rows_for_empty_clusters_are_the_references("random", 0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 24, 3584])
def test_turned_directions_are_the_references(width: int, dtype: torch.dtype):
    """Of views of rows; where a sum has no direction, and where a row has none."""
    rows = random(3, 12, width).to(dtype)
    rows[:, 4] = 0
    inverse = 1 / rows.float().norm(dim=-1)
    inverse[:, 4] = 0
    sums = random(2, 5, width, seed=1)
    sums[0, 0], sums[0, 1] = 0, torch.nan
    empty = torch.tensor([[False, False, False, True, False], [True, False, True, True, False]])
    picks = torch.tensor([[0, 0, 0, 4, 0], [1, 0, 4, 2, 0]])
    given = units(random(2, 5, width, seed=2)), sums, empty, picks, rows[::2, 1:], inverse[::2, 1:]
    found, expected = (
        of.turn_directions(*(tensor.to(DEVICE) for tensor in given)) for of in (turn_directions, turn_directions_ref)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(found[0, :2].cpu(), given[0][0, :2])
