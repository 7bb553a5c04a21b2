"""Spherical k-means: clusters of rows by direction."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from tiered.clustering.faiss_backend import BACKENDS, Backend, faiss_lloyd, import_faiss
from tiered.clustering.lloyd import fill_empty, lloyd
from tiered.clustering.seeding import axes, kmeans_start
from tiered.clustering.unit_rows import UnitRows, finite_norms, normalised

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class KMeansResult:
    """Clusters of each group.

    Attributes:
        directions: of unit norm.
        assignment: the cluster of each row, −1 at invalid rows.
        inertia: Σ(1 − cosine) over a group's valid rows; a zero row counts 1.
    """

    directions: Float32[Tensor, "groups clusters width"]
    assignment: Int64[Tensor, "groups n"]
    inertia: Float32[Tensor, " groups"]


@torch.no_grad()
def spherical_kmeans(
    rows: Float[Tensor, "groups n width"],
    clusters: int,
    *,
    valid: Bool[Tensor, "groups n"] | None = None,
    start: Float[Tensor, "groups clusters width"] | None = None,
    iterations: int = 10,
    seed: int = 0,
    backend: Backend = "torch",
) -> KMeansResult:
    """Cluster the directions of `rows`, each group on its own: the others have no part in a group's result.

    Every cluster has a member. Each row belongs to the direction nearest to it, but for rows that were moved at the end
    into clusters that nothing was nearest to: such a cluster points at the row that it got, one of the farthest from
    their directions. With fewer distinct directions among the rows than clusters, several clusters share a direction.
    A zero row belongs to some cluster and pulls none.

    Norms, cosines and sums are float32; memory beside the results is bounded (see `tiles`). The same arguments give the
    same result on the same device and versions. The host reads from the device once, for the checks; a cold start also
    copies its random numbers to the device. The faiss backend copies all rows to the CPU.

    Args:
        rows: float16, bfloat16, float32 or float64. Invalid rows may hold anything.
        clusters: for every group.
        valid: False at rows that are not there.
        start: centroids to start from, of any norm; greedy k-means++ without (`seed` is used for nothing else).
        iterations: with 0, rows are only assigned to `start`.
        seed: of the start.
        backend: "torch" on the device of `rows`, or "faiss" on the CPU.

    Raises:
        TypeError: rows of another dtype.
        ValueError: shapes that do not fit, a number out of range, a group with fewer valid rows than `clusters`, or a
            valid row or start that is not finite or whose norm float32 cannot hold.
        ImportError: backend "faiss" without faiss.
    """
    check_options(rows.dtype, iterations, backend)
    _check_shapes(rows, clusters, valid, start)
    units = UnitRows.of(rows, valid)
    facts = [units.finite.long(), (units.finite if start is None else finite_norms(start)).long()]
    if valid is not None:
        facts.append(valid.sum(1).min())
    # The one look at the device before work starts.
    finite, start_finite, *fewest = torch.stack(facts).tolist()
    refuse_values(finite, start_finite)
    if fewest and fewest[0] < clusters:
        raise ValueError(f"a group of {fewest[0]} valid rows cannot fill clusters = {clusters}")
    return kmeans(units, clusters, start=start, iterations=iterations, seed=seed, backend=backend)


def kmeans(
    units: UnitRows,
    clusters: int,
    *,
    start: Float[Tensor, "groups clusters width"] | None,
    iterations: int,
    seed: int,
    backend: Backend,
) -> KMeansResult:
    """`spherical_kmeans` of rows and arguments that it would not refuse. The host reads nothing, but for faiss."""
    groups, _, width = units.rows.shape
    if start is None:
        start = kmeans_start(units, clusters, seed)
    else:
        start = normalised(start.float(), axes(groups, clusters, width, units.rows.device))
    fit = (lloyd if backend == "torch" else faiss_lloyd)(units, start, iterations)
    assignment = fit.nearest if units.valid is None else fit.nearest.where(units.valid, -1)
    directions, assignment, cosine = fill_empty(units, fit.directions, assignment, fit.cosine)
    distance = (1 - cosine).clamp_min(0)
    inertia = (distance if units.valid is None else distance.where(units.valid, 0)).sum(1)
    return KMeansResult(directions, assignment, inertia)


def check_options(dtype: torch.dtype, iterations: int, backend: str) -> None:
    """Raise what `spherical_kmeans` raises for these."""
    if dtype not in DTYPES:
        raise TypeError(f"rows are {dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if iterations < 0:
        raise ValueError(f"iterations = {iterations} must be 0 or more")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; allowed: 'torch', 'faiss'")
    if backend == "faiss":
        import_faiss()


def refuse_values(finite: int, start_finite: int) -> None:
    """Raise what `spherical_kmeans` raises for rows and centroids that are not finite."""
    if not finite:
        raise ValueError("a valid row is not finite, or its norm is beyond float32")
    if not start_finite:
        raise ValueError("a centroid in start is not finite, or its norm is beyond float32")


def _check_shapes(rows: Tensor, clusters: int, valid: Tensor | None, start: Tensor | None) -> None:
    if rows.ndim != 3 or 0 in rows.shape:
        raise ValueError(f"rows have shape {list(rows.shape)}; allowed: [groups, n, width], none of them 0")
    if clusters < 1:
        raise ValueError(f"clusters = {clusters} must be 1 or more")
    groups, n, width = rows.shape
    if n < clusters:
        raise ValueError(f"{n} rows cannot fill clusters = {clusters}")
    if valid is not None and (valid.dtype != torch.bool or valid.shape != (groups, n)):
        raise ValueError(f"valid is {valid.dtype} {list(valid.shape)}; allowed: torch.bool {[groups, n]}")
    if start is not None and start.shape != (groups, clusters, width):
        raise ValueError(f"start has shape {list(start.shape)}; allowed: {[groups, clusters, width]}")
