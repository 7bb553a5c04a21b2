"""Spherical k-means against a naive loop, its promises on awkward rows, and its two backends against each other."""

import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tiered.clustering import tiles
from tiered.clustering.faiss_backend import Backend, faiss_lloyd
from tiered.clustering.kmeans import kmeans, lloyd
from tiered.clustering.unit_rows import UnitRows
from tiered.policies.registry import make_policy

BACKENDS: list[Backend] = ["torch", "faiss"]
LLOYD = {"torch": lloyd, "faiss": faiss_lloyd}


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


def assigned(
    rows: Tensor,
    clusters: int,
    *,
    valid: Tensor | None = None,
    iterations: int = 10,
    seed: int = 0,
    backend: Backend = "torch",
) -> Tensor:
    return kmeans(UnitRows.of(rows, valid), clusters, iterations=iterations, seed=seed, backend=backend)


def inertia(rows: Tensor, assignment: Tensor) -> float:
    """Σ(1 − cosine) of one group's rows to the directions of their clusters."""
    near = units(rows)
    sums = torch.zeros(int(assignment.max()) + 1, rows.shape[1], dtype=torch.float64).index_add_(0, assignment, near)
    return float((1 - (near * units(sums)[assignment]).sum(1)).sum())


def check_promises(assignment: Tensor, rows: Tensor, clusters: int, valid: Tensor | None = None) -> None:
    valid = torch.ones(rows.shape[:2], dtype=torch.bool) if valid is None else valid
    assert assignment.dtype == torch.int64
    assert torch.equal(assignment >= 0, valid)
    for group in range(len(rows)):
        assert set(assignment[group, valid[group]].tolist()) == set(range(clusters))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize(("n", "width", "clusters"), [(60, 5, 3), (200, 16, 7), (90, 300, 4), (600, 6, 2)])
def test_it_is_lloyds_algorithm(backend: Backend, n: int, width: int, clusters: int, iterations: int):
    """600 rows in 2 clusters: more than faiss looks at by default."""
    rows = random(2, n, width) * torch.exp(2 * random(2, n, 1, seed=1))
    start, given = units(rows[:, :clusters]).float(), rows.clone()
    nearest, cosine = LLOYD[backend](UnitRows.of(rows), start, iterations)
    assert torch.equal(rows, given)
    for group in range(2):
        directions, assignment = naive_lloyd(rows[group], start[group], iterations)
        assert torch.equal(nearest[group], assignment)
        expected = (units(rows[group]) * directions[assignment]).sum(1)
        torch.testing.assert_close(cosine[group].double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_shares_no_rows_between_directions_that_are_alike(backend: Backend):
    """Rows of two directions in five clusters: three directions are found again, and keep one row each."""
    rows = random(2, 64).repeat_interleave(30, 0) + 1e-5 * random(60, 64, seed=1)
    found = assigned(rows[None], 5, iterations=5, backend=backend)[0]
    assert sorted(found.bincount().tolist()) == [1, 1, 1, 27, 30]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("n", "width", "clusters", "noise"), [(64, 8, 4, 0.1), (600, 64, 12, 0.4), (512, 400, 16, 0.3), (90, 3, 2, 0.05)]
)
def test_planted_clusters_are_found(n: int, width: int, clusters: int, noise: float, seed: int):
    rows, truth = planted(2, n, width, clusters, noise=noise, seed=seed)
    found = assigned(rows, clusters, seed=seed)
    check_promises(found, rows, clusters)
    assert all(same_partition(found[group], truth[group]) for group in range(2))


@pytest.mark.parametrize("width", [64, 400])
def test_the_start_alone_has_a_row_of_every_planted_cluster(width: int):
    """400 columns: the picks are made among projections of the rows."""
    rows, truth = planted(1, 512, width, 32, noise=0.3)
    assert same_partition(assigned(rows, 32, iterations=0)[0], truth[0])


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
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_rows_keep_every_promise(name: str, iterations: int, backend: Backend):
    check_promises(assigned(AWKWARD[name], 5, iterations=iterations, backend=backend), AWKWARD[name], 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_fewer_directions_than_clusters_nothing_is_lost(backend: Backend):
    found = assigned(AWKWARD["three directions"], 8, backend=backend)[0]
    for cluster in range(8):
        assert len(set((torch.arange(20) % 3)[found == cluster].tolist())) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_rows_pull_nothing(backend: Backend):
    rows = random(1, 40, 6)
    start, padded = units(rows[:, :3]).float(), torch.cat([torch.zeros(1, 7, 6), rows], dim=1)
    alone, both = (LLOYD[backend](UnitRows.of(given), start, 10) for given in (rows, padded))
    assert torch.equal(both[0][:, 7:], alone[0])
    torch.testing.assert_close(both[1][:, 7:], alone[1], atol=1e-6, rtol=0)
    assert not both[1][:, :7].any()


def test_as_many_rows_as_clusters_stay_alone():
    assert all(sorted(group.tolist()) == list(range(12)) for group in assigned(random(3, 12, 6), 12))


@pytest.mark.parametrize("missing", range(5))
def test_a_cluster_without_rows_moves_to_rows_without_a_cluster(missing: int):
    """One direction of the start has no row near it. Rows without a direction do not count as its own."""
    rows, truth = planted(1, 100, 8, 5, noise=0.02)
    start = units(torch.stack([rows[0, truth[0] == cluster][0] for cluster in range(5)])).float()
    start[missing] *= -1
    rows = torch.cat([torch.zeros(1, 3, 8), torch.full((1, 3, 8), torch.nan), rows], dim=1)
    valid = (torch.arange(106) < 3) | (torch.arange(106) >= 6)
    nearest, _ = lloyd(UnitRows.of(rows, valid[None]), start[None], 10)
    assert same_partition(nearest[0, 6:], truth[0])


def test_without_an_iteration_an_empty_cluster_gets_the_farthest_row(monkeypatch: pytest.MonkeyPatch):
    angles = torch.tensor([0.0, 0.1, 0.3, 0.2, 1.0, 0.25])
    rows = torch.stack([angles.cos(), angles.sin()], dim=-1)[None]
    start = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    monkeypatch.setattr("tiered.clustering.kmeans.kmeans_start", lambda units, clusters, seed: start)
    # Row 4 is all that cluster 2 has, and stays; of the other rows 2 and 5 are farthest from theirs.
    assert assigned(rows, 4, iterations=0).tolist() == [[0, 0, 1, 0, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_dtypes_are_read_as_float32(dtype: torch.dtype, backend: Backend):
    rows = (5 * random(2, 80, 20)).to(dtype)
    assert torch.equal(assigned(rows, 6, backend=backend), assigned(rows.float(), 6, backend=backend))


def test_norms_have_no_part():
    rows = random(1, 80, 20)
    powers = 2.0 ** torch.arange(80).remainder(40).sub(20)[:, None]
    assert torch.equal(assigned(rows, 6), assigned(rows * powers, 6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("elements", [None, 640, 40])
def test_groups_are_independent(backend: Backend, elements: int | None, monkeypatch: pytest.MonkeyPatch):
    """In tiles of many groups, of parts of one, of single rows."""
    if elements is not None:
        monkeypatch.setattr(tiles, "CPU_ELEMENTS", elements)
    rows = torch.cat([planted(2, 60, 10, 4, noise=0.05)[0], random(3, 60, 10)])
    together = assigned(rows, 4, iterations=20, backend=backend)
    alone = [assigned(group[None], 4, iterations=20, backend=backend) for group in rows]
    assert torch.equal(together, torch.cat(alone))


def test_tiles_are_the_whole(monkeypatch: pytest.MonkeyPatch):
    rows = random(3, 100, 200).bfloat16()
    whole = assigned(rows, 5)
    monkeypatch.setattr(tiles, "CPU_ELEMENTS", 7 * 200)
    assert torch.equal(assigned(rows, 5), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_invalid_rows_are_not_there(backend: Backend):
    rows = random(3, 50, 12)
    valid = torch.rand(3, 50, generator=torch.Generator().manual_seed(2)) < 0.6
    results = [
        assigned(rows.where(valid[..., None], filling), 4, valid=valid, backend=backend)
        for filling in (torch.nan, torch.inf, 0.0, 1e30)
    ]
    check_promises(results[0], rows, 4, valid)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    for group in range(3):
        alone = assigned(rows[group, valid[group]][None], 4, backend=backend)
        assert torch.equal(results[0][group, valid[group]], alone[0])


def test_a_few_valid_rows_fill_the_clusters():
    """The rows that empty clusters get are valid ones."""
    rows = torch.full((1, 30, 6), torch.nan)
    valid = torch.zeros(1, 30, dtype=torch.bool)
    valid[0, 20:25] = True
    rows[0, 20:25] = torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0])[:, None] * random(1, 6)
    for iterations in (0, 3):
        check_promises(assigned(rows, 5, valid=valid, iterations=iterations), rows, 5, valid)


@pytest.mark.parametrize("rows", [random(1, 300, 12), planted(1, 300, 12, 9, noise=0.8)[0]], ids=["random", "planted"])
def test_inertia_never_rises(rows: Tensor):
    found = [inertia(rows[0], assigned(rows, 9, iterations=i)[0]) for i in range(12)]
    assert all(after <= before + 1e-4 for before, after in pairwise(found))
    assert found[-1] < 0.98 * found[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides(backend: Backend):
    rows = random(2, 200, 16)
    first, again, other = (assigned(rows, 6, seed=seed, backend=backend) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


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
    start = units(rows[:, :8]).float()
    ours, theirs = (run(UnitRows.of(rows), start, iterations)[1] for run in LLOYD.values())
    assert float((1 - theirs).sum()) == pytest.approx(float((1 - ours).sum()), rel=0.01)
    assert capfd.readouterr() == ("", "")


def test_without_faiss_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match="faiss"):
        assigned(random(2, 6, 4), 2, backend="faiss")
    with pytest.raises(ImportError, match=r"faiss is not installed: pip install .*\[faiss\]"):
        make_policy("polestar", kmeans="faiss")
    assigned(random(2, 6, 4), 2)


@pytest.mark.gpu
def test_on_a_gpu_it_finds_the_same_and_repeats_itself():
    rows, _ = planted(3, 500, 300, 8, noise=0.5)
    first, again = (assigned(rows.cuda(), 8) for _ in range(2))
    assert torch.equal(first, again) and torch.equal(first.cpu(), assigned(rows, 8))
