"""Passing over rows tile by tile, and adding them up by cluster."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tiered.clustering import summaries, tiles


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("groups", "n", "width", "columns"), [(5, 7, 4, 1), (2, 300, 4, 1), (9, 20, 3, 30), (2, 3, 99, 1)]
)
def test_tiles_are_bounded_and_cover_all(groups: int, n: int, width: int, columns: int, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_ELEMENTS", 200)
    rows, scale = random(groups, n, width), random(groups, n, seed=1)
    seen = torch.full_like(rows, torch.nan)
    for here, span, tile in tiles.tiles(rows, scale, gaps=False, columns=columns):
        assert tile.shape[0] * tile.shape[1] * max(width, columns) <= 200
        assert seen[here, span].isnan().all()
        seen[here, span] = tile
    assert torch.equal(seen, rows * scale[..., None])


@pytest.mark.parametrize("way", [summaries._by_index, summaries._by_product, summaries.add_by_cluster])
def test_both_ways_of_adding_up(way: Callable[[Tensor, Tensor, Tensor], None]):
    rows, before = random(3, 20, 5), random(3, 4, 5, seed=1)
    assignment = torch.randint(4, (3, 20), generator=torch.Generator().manual_seed(2))
    expected = before.clone()
    for group in range(3):
        for row, cluster in zip(rows[group], assignment[group], strict=True):
            expected[group, cluster] += row
    # A part of a larger tensor, as a tile's groups are.
    sums = torch.cat([before[:1], before])
    way(sums[1:], rows, assignment)
    torch.testing.assert_close(sums[1:], expected, atol=1e-5, rtol=0)
    assert torch.equal(sums[0], before[0])
