"""The hidden states of a layer as records: by cluster, cut into pieces, renewed, and with clusters that join."""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from tier_fuzz import round_trip
from torch import Tensor

from tiered.clustering.cluster_index import ClusterIndex
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.policies.polestar.hidden_records import HiddenRecords, most_rows
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers

WIDTH, LENGTH, SLOT = 96, 40, 4096
MEMBERS = [[0, 3, 7, 8], [1], [2, 4, 5, 6, *range(9, 25)]]  # of which the last takes two pieces as raw: 10 rows fit


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def tiers(ledger: Ledger) -> Iterator[TierManager]:
    with open_tiers(ledger, device="cpu", slot_bytes=SLOT) as tiers:
        yield tiers
        tiers.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def index_of(hidden: Tensor) -> ClusterIndex:
    sizes = [len(columns) for columns in MEMBERS]
    return ClusterIndex(
        rows=torch.tensor([*chain(*MEMBERS)]),
        sizes=tuple(sizes),
        counts=torch.tensor(sizes),
        shares=(len(sizes), 0),
        centroids=torch.stack([hidden[columns].mean(0) for columns in MEMBERS]),
        medoids=torch.tensor([columns[0] for columns in MEMBERS]),
    )


def stored(tiers: TierManager, hidden: Tensor, codec: Codec, tier: Tier = Tier.HOST) -> HiddenRecords:
    return HiddenRecords.store(tiers, hidden, index_of(hidden), layer=3, sequence=2, codec=codec, tier=tier)


def read(tiers: TierManager, records: HiddenRecords, clusters: list[int]) -> Tensor:
    return tiers.fetch(records.keys(clusters)).wait()


def encoded(rows: Tensor, centroid: Tensor, codec: Codec, most: int) -> Tensor:
    """What comes back of a cluster, piece by piece: each has scales of its own."""
    count = -(-len(rows) // most)
    base = centroid if codec.needs_base else None
    return torch.cat([round_trip(piece, codec, base) for piece in rows.tensor_split(count)])


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
@pytest.mark.parametrize("codec", Codec)
def test_clusters_come_back_in_the_order_asked_for(tiers: TierManager, codec: Codec, tier: Tier):
    hidden = random(LENGTH, WIDTH)
    records, most = stored(tiers, hidden, codec, tier), most_rows(SLOT, codec, hidden)
    centroids = index_of(hidden).centroids
    for clusters in ([2], [2, 0], [1, 2, 0]):
        expected = [encoded(hidden[MEMBERS[cluster]], centroids[cluster], codec, most) for cluster in clusters]
        assert torch.equal(read(tiers, records, clusters), torch.cat(expected))
    assert len(tiers) == len(records.pieces) == (4 if codec is Codec.RAW else 3)


@pytest.mark.parametrize("codec", Codec)
def test_renewed_clusters_are_new_and_the_others_as_they_were(tiers: TierManager, ledger: Ledger, codec: Codec):
    hidden, new, moved = random(LENGTH, WIDTH), 5 * random(24, WIDTH, seed=1), random(2, WIDTH, seed=2)
    records, most = stored(tiers, hidden, codec), most_rows(SLOT, codec, hidden)
    before, under_way = read(tiers, records, [1]), tiers.fetch(records.keys([2]))
    old = encoded(hidden[MEMBERS[2]], index_of(hidden).centroids[2], codec, most)
    records.renew(tiers, [2, 0], new, moved)
    assert torch.equal(under_way.wait(), old)  # a fetch gets what was stored when it was asked
    moved_in_place = moved.clone()
    moved.fill_(torch.nan)  # the caller's; deltas are against what it was
    expected = [encoded(new[:20], moved_in_place[0], codec, most), encoded(new[20:], moved_in_place[1], codec, most)]
    assert torch.equal(read(tiers, records, [2, 0]), torch.cat(expected))
    assert torch.equal(read(tiers, records, [1]), before)
    # Every cluster has centroids of its own, so none that nothing is decoded against stays.
    held = 3 * WIDTH * 4 if codec.needs_base else 0
    assert ledger.held(Tier.DEVICE, Account.CENTROIDS) == held
    records.renew(tiers, [1], new[:1], moved_in_place[:1])
    assert ledger.held(Tier.DEVICE, Account.CENTROIDS) == held


def test_rows_that_do_not_fit_the_clusters_are_refused(tiers: TierManager):
    records = stored(tiers, random(LENGTH, WIDTH), Codec.RAW)
    with pytest.raises(ValueError):
        records.renew(tiers, [0], random(3, WIDTH), random(1, WIDTH))


@pytest.mark.parametrize("codec", Codec)
def test_a_cluster_that_joins(tiers: TierManager, codec: Codec):
    hidden, rows, centroid = random(LENGTH, WIDTH), random(12, WIDTH, seed=3), random(1, WIDTH, seed=4)
    first, most = stored(tiers, hidden, codec), most_rows(SLOT, codec, hidden)
    records = first.appended(12)
    assert records.sizes == (4, 1, 20, 12)
    assert first.sizes == (4, 1, 20) and records.keys([0, 1, 2]) == first.keys([0, 1, 2])
    with pytest.raises(KeyError):
        tiers.fetch(records.keys([3]))
    records.renew(tiers, [3], rows, centroid)
    found = read(tiers, records, [3, 1])
    assert len(found) == 13 and torch.equal(found[:12], encoded(rows, centroid[0], codec, most))
    assert torch.equal(read(tiers, records, [2]), read(tiers, first, [2]))
    again = records.appended(2)
    again.renew(tiers, [4], rows[:2], centroid)
    assert len(set(again.keys(range(5)))) == len(tiers) == len(again.pieces)
    again.forget(tiers)
    assert len(tiers) == 0


def test_what_is_forgotten_is_gone_and_its_neighbours_stay(tiers: TierManager, ledger: Ledger):
    hidden = random(LENGTH, WIDTH)
    records = stored(tiers, hidden, Codec.NVFP4_DELTA)
    other = HiddenRecords.store(tiers, hidden, index_of(hidden), layer=3, sequence=1)
    expected, under_way = read(tiers, records, [2]), tiers.fetch(records.keys([2]))
    records.forget(tiers)
    with pytest.raises(KeyError, match="layer 3, sequence 2"):
        tiers.fetch(records.keys([0]))
    assert torch.equal(under_way.wait(), expected)  # it had set out
    assert torch.equal(read(tiers, other, [2]), expected)
    assert ledger.held(Tier.DEVICE, Account.CENTROIDS) == 3 * WIDTH * 4
    other.forget(tiers)
    assert ledger.held(Tier.DEVICE, Account.CENTROIDS) == 0 and len(tiers) == 0


def test_a_row_that_no_slot_holds():
    with pytest.raises(ValueError, match="a row takes 4800 bytes in raw; a staging slot has 4096"):
        most_rows(SLOT, Codec.RAW, torch.zeros(1, 1200))
