"""A check of any index of clusters."""

from tiered.clustering.cluster_index import ClusterIndex


def check_index(index: ClusterIndex) -> None:
    """Assert that the parts of `index` agree."""
    medoids = index.medoids.tolist()
    assert all(size > 0 for size in index.sizes) and index.counts.tolist() == list(index.sizes)
    assert sum(index.sizes) == len(index.rows) == len(set(index.columns)) and index.rows.tolist() == index.columns
    assert sum(index.shares) == index.clusters and all(share >= 0 for share in index.shares)
    assert index.centroids.shape[0] == len(medoids) == index.clusters and index.centroids.isfinite().all()
    for members, medoid in zip(index.rows.split(index.sizes), medoids, strict=True):
        assert members.tolist() == sorted(members.tolist()) and medoid in members
