"""A check of any index of clusters."""

from tiered.clustering.cluster_index import ClusterIndex


def shares(index: ClusterIndex, prefix: int) -> tuple[int, int]:
    """Numbers of clusters of columns before `prefix`, and of the others. The former have the first numbers."""
    before = [max(members) < prefix for members in (rows.tolist() for rows in index.rows.split(index.sizes))]
    assert before == sorted(before, reverse=True)
    return sum(before), len(before) - sum(before)


def check_index(index: ClusterIndex) -> None:
    """Assert that the parts of `index` agree."""
    medoids = index.medoids.tolist()
    assert all(size > 0 for size in index.sizes)
    assert sum(index.sizes) == len(index.rows) == len(set(index.columns)) and index.rows.tolist() == index.columns
    assert index.centroids.shape[0] == len(medoids) == index.clusters and index.centroids.isfinite().all()
    for members, medoid in zip(index.rows.split(index.sizes), medoids, strict=True):
        assert members.tolist() == sorted(members.tolist()) and medoid in members
