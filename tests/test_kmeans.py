"""Spherical k-means against a naive loop, its promises on awkward rows, and its two backends against each other."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tiered.clustering import tiles
from tiered.clustering.faiss_backend import Backend
from tiered.clustering.spherical import KMeansResult, spherical_kmeans

BACKENDS: list[Backend] = ["torch", "faiss"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planted(groups: int, n: int, width: int, clusters: int, *, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows around `clusters` centres, of many norms, and the centre of each; every centre has rows."""
    generator = torch.Generator().manual_seed(seed)
    truth = (torch.arange(n) % clusters)[torch.randperm(n, generator=generator)].expand(groups, n)
    centres = torch.randn(groups, clusters, width, generator=generator)
    rows = centres.gather(1, truth[..., None].expand(-1, -1, width))
    rows = rows + noise * torch.randn(rows.shape, generator=generator)
    return rows * torch.exp(torch.randn(groups, n, 1, generator=generator)), truth


def units(rows: Tensor) -> Tensor:
    """Unit rows in float64; zero rows stay zero."""
    norms = rows.double().norm(dim=-1, keepdim=True)
    return rows.double() / norms.where(norms > 0, 1)


def naive_lloyd(rows: Tensor, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Directions and assignment of one group in float64, row by row; clusters must not run empty."""
    rows, directions = units(rows), units(start)
    for _ in range(iterations):
        sums = torch.zeros_like(directions)
        for row in rows:
            sums[(directions @ row).argmax()] += row
        directions = units(sums)
    return directions, (rows @ directions.T).argmax(1)


def same_partition(found: Tensor, truth: Tensor) -> bool:
    """Whether two assignments of one group differ by the numbers of the clusters alone."""
    pairs = {(int(a), int(b)) for a, b in zip(found, truth, strict=True)}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def check_promises(result: KMeansResult, rows: Tensor, clusters: int, valid: Tensor | None = None) -> None:
    """What holds for every result."""
    groups, n, width = rows.shape
    valid = torch.ones(groups, n, dtype=torch.bool) if valid is None else valid
    assert result.directions.dtype == result.inertia.dtype == torch.float32
    assert result.assignment.dtype == torch.int64
    assert result.directions.shape == (groups, clusters, width)
    torch.testing.assert_close(result.directions.norm(dim=-1), torch.ones(groups, clusters), atol=1e-6, rtol=0)
    assert torch.equal(result.assignment >= 0, valid)
    for group in range(groups):
        assert set(result.assignment[group, valid[group]].tolist()) == set(range(clusters))
        cosine = units(rows[group, valid[group]]) @ result.directions[group].double().T
        own = cosine.gather(1, result.assignment[group, valid[group]][:, None])[:, 0]
        assert result.inertia[group].item() == pytest.approx((1 - own).sum().item(), abs=1e-5 * n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize(("n", "width", "clusters"), [(60, 5, 3), (200, 16, 7), (90, 300, 4), (600, 6, 2)])
def test_it_is_lloyds_algorithm(backend: Backend, n: int, width: int, clusters: int, iterations: int):
    """600 rows in 2 clusters: more than faiss looks at unless it is told to."""
    rows = random(2, n, width) * torch.exp(2 * random(2, n, 1, seed=1))
    start = rows[:, :clusters]
    given = rows.clone()
    result = spherical_kmeans(rows, clusters, start=start, iterations=iterations, backend=backend)
    assert torch.equal(rows, given)
    check_promises(result, rows, clusters)
    for group in range(2):
        directions, assignment = naive_lloyd(rows[group], start[group], iterations)
        torch.testing.assert_close(result.directions[group].double(), directions, atol=2e-6, rtol=0)
        assert torch.equal(result.assignment[group], assignment)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("n", "width", "clusters", "noise"), [(64, 8, 4, 0.1), (600, 64, 12, 0.4), (512, 400, 16, 0.3), (90, 3, 2, 0.05)]
)
def test_planted_clusters_are_found(n: int, width: int, clusters: int, noise: float, seed: int):
    rows, truth = planted(2, n, width, clusters, noise=noise, seed=seed)
    result = spherical_kmeans(rows, clusters, seed=seed)
    check_promises(result, rows, clusters)
    assert all(same_partition(result.assignment[group], truth[group]) for group in range(2))


@pytest.mark.parametrize("width", [64, 400])
def test_the_start_alone_has_a_row_of_every_planted_cluster(width: int):
    """400 columns: the picks are made among projections of the rows."""
    rows, truth = planted(1, 512, width, 32, noise=0.3)
    result = spherical_kmeans(rows, 32, iterations=0)
    assert same_partition(result.assignment[0], truth[0])
    cosine = units(rows[0]) @ result.directions[0].double().T
    torch.testing.assert_close(cosine.amax(0), torch.ones(32).double(), atol=1e-6, rtol=0)  # picks are rows


AWKWARD: dict[str, Tensor] = {
    "all rows alike": torch.ones(1, 9, 6),
    "three directions": random(1, 3, 6)[:, torch.arange(20) % 3] * (1 + torch.arange(20.0))[:, None],
    "all zero": torch.zeros(1, 9, 6),
    "mostly zero": torch.cat([torch.zeros(1, 20, 6), random(1, 3, 6)], dim=1),
    "some zero": torch.cat([random(1, 20, 6), torch.zeros(1, 9, 6)], dim=1),
    "opposite": torch.cat([random(1, 6, 6), -random(1, 6, 6)], dim=1),
    "width 1": random(1, 12, 1),
    "rows as clusters": random(1, 5, 6),
    "tiny": 1e-30 * random(1, 12, 6),
    "tiny and huge": torch.logspace(-17, 17, 12)[:, None] * random(1, 12, 6),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 1, 10])
@pytest.mark.parametrize("start", ["rows", "alike", "zeros", None])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_rows_keep_every_promise(name: str, start: str | None, iterations: int, backend: Backend):
    rows, clusters = AWKWARD[name], 5
    starts = {"rows": rows[:, :clusters], "alike": torch.ones(1, clusters, rows.shape[2])}
    starts["zeros"] = torch.zeros_like(starts["alike"])
    result = spherical_kmeans(rows, clusters, start=starts.get(start or ""), iterations=iterations, backend=backend)
    # What is below float32's squares counts as zero, in the test's own cosines too.
    check_promises(result, rows.where(rows.norm(dim=-1, keepdim=True) > 1e-18, 0), clusters)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_fewer_directions_than_clusters_nothing_is_lost(backend: Backend):
    rows = AWKWARD["three directions"]
    result = spherical_kmeans(rows, 8, backend=backend)
    assert result.inertia.item() < 1e-5
    for cluster in range(8):
        assert len(set((torch.arange(20) % 3)[result.assignment[0] == cluster].tolist())) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_pull_nothing(backend: Backend):
    rows = random(1, 40, 6)
    zeros = torch.zeros(1, 7, 6)
    alone = spherical_kmeans(rows, 3, start=rows[:, :3], backend=backend)
    both = spherical_kmeans(torch.cat([zeros, rows], dim=1), 3, start=rows[:, :3], backend=backend)
    torch.testing.assert_close(both.directions, alone.directions, atol=1e-6, rtol=0)
    assert torch.equal(both.assignment[:, 7:], alone.assignment)
    assert both.inertia.item() == pytest.approx(alone.inertia.item() + 7, rel=1e-6)


def test_one_cluster_points_at_the_mean_direction():
    rows = random(1, 50, 6) + 1
    result = spherical_kmeans(rows, 1)
    mean = units(units(rows).sum(1, keepdim=True))
    torch.testing.assert_close(result.directions.double(), mean, atol=1e-6, rtol=0)


def test_as_many_rows_as_clusters_stay_alone():
    result = spherical_kmeans(random(3, 12, 6), 12)
    assert result.inertia.max() < 1e-5
    assert all(sorted(group.tolist()) == list(range(12)) for group in result.assignment)


@pytest.mark.parametrize("missing", range(5))
def test_a_cluster_that_lost_its_rows_goes_where_it_is_needed(missing: int):
    """From a start in which one centroid is where no row is; rows that have no direction do not count as its own."""
    rows, truth = planted(1, 100, 8, 5, noise=0.02)
    start = torch.stack([rows[0, truth[0] == cluster][0] for cluster in range(5)])
    start[missing] *= -1
    rows = torch.cat([torch.zeros(1, 3, 8), torch.full((1, 3, 8), torch.nan), rows], dim=1)
    valid = (torch.arange(106) < 3) | (torch.arange(106) >= 6)
    result = spherical_kmeans(rows, 5, valid=valid[None], start=start[None])
    assert same_partition(result.assignment[0, 6:], truth[0])


def test_without_an_iteration_an_empty_cluster_gets_the_farthest_row():
    angles = torch.tensor([0.0, 0.1, 0.3, 0.2, 1.0, 0.25])
    rows = torch.stack([angles.cos(), angles.sin()], dim=-1)[None]
    start = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    result = spherical_kmeans(rows, 4, start=start, iterations=0)
    # Row 4 is all that cluster 2 has, and stays; of the other rows 2 and 5 are farthest from theirs.
    assert result.assignment.tolist() == [[0, 1, 1, 0, 2, 3]] or result.assignment.tolist() == [[0, 0, 1, 0, 2, 3]]
    torch.testing.assert_close(result.directions[0, [1, 3]], rows[0, [2, 5]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_dtypes_are_read_as_float32(dtype: torch.dtype, backend: Backend):
    rows = (5 * random(2, 80, 20)).to(dtype)
    result = spherical_kmeans(rows, 6, backend=backend)
    expected = spherical_kmeans(rows.float(), 6, backend=backend)
    torch.testing.assert_close(result.directions, expected.directions, atol=1e-6, rtol=0)
    assert torch.equal(result.assignment, expected.assignment)


def test_norms_have_no_part():
    rows = random(1, 80, 20)
    powers = 2.0 ** torch.arange(80).remainder(40).sub(20)[:, None]
    result, scaled = spherical_kmeans(rows, 6), spherical_kmeans(rows * powers, 6)
    assert torch.equal(result.directions, scaled.directions)
    assert torch.equal(result.assignment, scaled.assignment)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("elements", [None, 640, 40])
def test_groups_do_not_know_of_each_other(backend: Backend, elements: int | None, monkeypatch):
    """In tiles of many groups, of parts of one, of single rows."""
    if elements is not None:
        monkeypatch.setattr(tiles, "CPU_ELEMENTS", elements)
    rows = torch.cat([planted(2, 60, 10, 4, noise=0.05)[0], random(3, 60, 10)])
    together = spherical_kmeans(rows, 4, iterations=20, backend=backend)
    alone = [spherical_kmeans(group[None], 4, iterations=20, backend=backend) for group in rows]
    for group, result in enumerate(alone):
        torch.testing.assert_close(together.directions[group], result.directions[0], atol=1e-6, rtol=0)
        assert torch.equal(together.assignment[group], result.assignment[0])


def test_tiles_are_the_whole(monkeypatch: pytest.MonkeyPatch):
    rows = random(3, 100, 200).bfloat16()
    whole = spherical_kmeans(rows, 5)
    monkeypatch.setattr(tiles, "CPU_ELEMENTS", 7 * 200)
    cut = spherical_kmeans(rows, 5)
    torch.testing.assert_close(cut.directions, whole.directions, atol=1e-6, rtol=0)
    assert torch.equal(cut.assignment, whole.assignment)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", [False, True])
def test_invalid_rows_are_not_there(backend: Backend, warm: bool):
    rows = random(3, 50, 12)
    start = random(3, 4, 12, seed=5) if warm else None
    valid = torch.rand(3, 50, generator=torch.Generator().manual_seed(2)) < 0.6
    fillings = [torch.nan, torch.inf, 0.0, 1e30]
    results = [
        spherical_kmeans(rows.where(valid[..., None], filling), 4, valid=valid, start=start, backend=backend)
        for filling in fillings
    ]
    check_promises(results[0], rows, 4, valid)
    for result in results[1:]:
        assert torch.equal(result.directions, results[0].directions)
        assert torch.equal(result.assignment, results[0].assignment)
        assert torch.equal(result.inertia, results[0].inertia)
    for group in range(3):
        there = valid[group]
        alone = spherical_kmeans(
            rows[group, there][None], 4, start=None if start is None else start[group][None], backend=backend
        )
        torch.testing.assert_close(results[0].directions[group], alone.directions[0], atol=1e-6, rtol=0)
        assert torch.equal(results[0].assignment[group, there], alone.assignment[0])
        assert results[0].inertia[group].item() == pytest.approx(alone.inertia.item(), rel=1e-5)


def test_a_few_valid_rows_fill_the_clusters():
    """The rows that empty clusters get are valid ones."""
    rows = torch.full((1, 30, 6), torch.nan)
    valid = torch.zeros(1, 30, dtype=torch.bool)
    valid[0, 20:25] = True
    rows[0, 20:25] = torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0])[:, None] * random(1, 6)
    for iterations in (0, 3):
        result = spherical_kmeans(rows, 5, valid=valid, iterations=iterations)
        check_promises(result, rows, 5, valid)


@pytest.mark.parametrize("rows", [random(1, 300, 12), planted(1, 300, 12, 9, noise=0.8)[0]], ids=["random", "planted"])
@pytest.mark.parametrize("start", ["cold", "alike"])
def test_inertia_never_rises(rows: Tensor, start: str):
    given = torch.ones(1, 9, 12) if start == "alike" else None
    inertia = [spherical_kmeans(rows, 9, start=given, iterations=i).inertia.item() for i in range(12)]
    # The first entries of "alike" come from rows that were moved by hand, not from a step of the algorithm.
    steps = inertia if given is None else inertia[1:]
    assert all(after <= before + 1e-4 for before, after in pairwise(steps))
    assert inertia[-1] < 0.98 * inertia[0]


def test_a_warm_start_goes_on():
    rows = random(2, 200, 16)
    start = rows[:, :6]
    ten = spherical_kmeans(rows, 6, start=start, iterations=10)
    four = spherical_kmeans(rows, 6, start=start, iterations=4)
    rest = spherical_kmeans(rows, 6, start=(7 * four.directions).bfloat16().double(), iterations=0)
    assert torch.equal(
        rest.assignment, spherical_kmeans(rows, 6, start=four.directions.bfloat16(), iterations=0).assignment
    )
    rest = spherical_kmeans(rows, 6, start=four.directions, iterations=6)
    torch.testing.assert_close(rest.directions, ten.directions, atol=1e-6, rtol=0)
    assert torch.equal(rest.assignment, ten.assignment)
    assert ten.inertia.max() < four.inertia.max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides(backend: Backend):
    rows = random(2, 200, 16)
    first, again, other = (spherical_kmeans(rows, 6, seed=seed, backend=backend) for seed in (3, 3, 4))
    assert torch.equal(first.directions, again.directions) and torch.equal(first.assignment, again.assignment)
    assert not torch.equal(first.directions, other.directions)


def kinds() -> dict[str, Tensor]:
    low_rank = random(1, 600, 8, seed=3) @ random(1, 8, 300, seed=4)
    massive = random(1, 500, 64)
    massive[..., :3] *= 40
    return {
        "random": random(1, 500, 24),
        "random, 375 a cluster": random(1, 3000, 24),
        "planted": planted(1, 800, 64, 8, noise=0.5)[0],
        "more planted than asked": planted(1, 800, 300, 30, noise=0.5)[0],
        "low rank": low_rank + 0.1 * random(*low_rank.shape, seed=5),
        "massive channels": massive,
        "few": random(1, 12, 40),
    }


@pytest.mark.parametrize("iterations", [1, 3, 25])
@pytest.mark.parametrize("name", kinds())
def test_backends_reach_the_same_inertia(name: str, iterations: int, capfd: pytest.CaptureFixture[str]):
    rows = kinds()[name]
    ours, theirs = (
        spherical_kmeans(rows, 8, start=rows[:, :8], iterations=iterations, backend=backend) for backend in BACKENDS
    )
    assert theirs.inertia.item() == pytest.approx(ours.inertia.item(), rel=0.01)
    assert capfd.readouterr() == ("", "")


def test_gradients_do_not_matter():
    rows = random(1, 20, 4).requires_grad_()
    assert not spherical_kmeans(rows, 3).directions.requires_grad


@pytest.mark.gpu
def test_on_a_gpu_it_finds_the_same_and_repeats_itself():
    rows, _ = planted(3, 500, 300, 8, noise=0.5)
    expected = spherical_kmeans(rows, 8)
    first, again = (spherical_kmeans(rows.cuda(), 8) for _ in range(2))
    assert torch.equal(first.directions, again.directions) and torch.equal(first.assignment, again.assignment)
    assert torch.equal(first.assignment.cpu(), expected.assignment)
    torch.testing.assert_close(first.directions.cpu(), expected.directions, atol=1e-5, rtol=0)
