"""How clusters are shared between prefix and suffix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.clustering.allocation import ROWS_PER_CLUSTER, allocate_clusters, auto_clusters

ROWS = st.integers(0, 5000)


@pytest.mark.parametrize(
    ("clusters", "prefix_rows", "suffix_rows", "expected"),
    [
        (8, 64, 32, (5, 3)),  # 5.33
        (8, 96, 0, (8, 0)),
        (8, 0, 96, (0, 8)),
        (8, 4000, 1, (7, 1)),  # the suffix has rows, so it has a cluster
        (8, 1, 4000, (1, 7)),
        (8, 2, 6, (2, 6)),  # as many clusters as rows
        (2, 5000, 5, (1, 1)),
        (3, 10, 10, (2, 1)),  # 1.5: half a cluster goes to the prefix
        (0, 0, 0, (0, 0)),
    ],
)
def test_shares(clusters: int, prefix_rows: int, suffix_rows: int, expected: tuple[int, int]):
    assert allocate_clusters(clusters, prefix_rows, suffix_rows) == expected


@given(ROWS, ROWS, st.data())
def test_every_share_is_within_its_bounds_and_nearest_to_proportion(prefix: int, suffix: int, data: st.DataObject):
    fewest, rows = (prefix > 0) + (suffix > 0), prefix + suffix
    clusters = data.draw(st.integers(fewest, rows))
    shares = allocate_clusters(clusters, prefix, suffix)
    assert sum(shares) == clusters

    def allowed(share: int) -> bool:
        other = clusters - share
        return (prefix > 0) <= share <= prefix and (suffix > 0) <= other <= suffix

    def distance(share: int) -> int:
        return abs(share * rows - clusters * prefix)

    assert allowed(shares[0])
    nearby = [share for share in (shares[0] - 1, shares[0] + 1) if allowed(share)]
    assert all(distance(shares[0]) <= distance(share) for share in nearby)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 5, 5), "clusters = 1 .* allowed: 2 to 10"),
        ((0, 5, 0), "allowed: 1 to 5"),
        ((11, 5, 5), "clusters = 11 .* allowed: 2 to 10"),
        ((1, 0, 0), "allowed: 0 to 0"),
    ],
)
def test_bad_numbers_of_clusters_are_refused(arguments: tuple[int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        allocate_clusters(*arguments)


@pytest.mark.parametrize(
    ("areas", "clusters"),
    [((0,), 0), ((1,), 1), ((95,), 1), ((96,), 2), ((4096,), 64), ((1, 1), 2), ((0, 5), 1), ((2048, 2048), 64)],
)
def test_auto_keeps_about_64_rows_a_cluster(areas: tuple[int, ...], clusters: int):
    assert auto_clusters(*areas) == clusters


@given(ROWS, ROWS)
def test_auto_can_always_be_shared(prefix: int, suffix: int):
    clusters = auto_clusters(prefix, suffix)
    assert sum(allocate_clusters(clusters, prefix, suffix)) == clusters
    if prefix + suffix >= 2 * ROWS_PER_CLUSTER:
        assert ROWS_PER_CLUSTER / 1.5 <= (prefix + suffix) / clusters <= ROWS_PER_CLUSTER * 1.5
