"""Stored rows: a read gives the bits of the last store, in every codec, on the host and on the device."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from round_trip import round_trip
from simulation import SimulatedThreads
from stored_regions import CLUSTERS, LAYERS, RECORD_ROWS, ROWS, SIZES, SLOTS, WIDTH, Faults, Rows, needed, of_region

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import account_bytes
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.offload.errors import TransferError
from tiered.offload.lane import Lane
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers

every = pytest.mark.parametrize(("codec", "tier"), [*product(Codec, (Tier.HOST, Tier.DEVICE))])


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(MemoryBudget(device="1MiB", host="1MiB"))


@pytest.fixture
def tiers(ledger: Ledger, faults: Faults) -> Iterator[Tiers]:
    with Tiers(ledger, device=torch.device("cpu"), transport=SimulatedThreads(delay=faults)) as tiers:
        yield tiers
        tiers.check_integrity()
    tiers.close()
    assert all(ledger.held(tier) == 0 for tier in Tier)


@every
def test_clusters_come_back_in_any_order_from_every_layer_and_region(tiers: Tiers, codec: Codec, tier: Tier):
    rows = Rows(tiers, codec, tier)
    rows.fill()
    rows.check_all()
    first, second = of_region(0), of_region(1)
    for clusters in ([first[1]], [second[3], first[0], second[0]], [first[4], first[2]], [*second, *first]):
        for layer in LAYERS:
            rows.check(layer, clusters)
    assert rows.stored.tier is tier


@every
def test_renewed_clusters_are_new_and_the_others_as_they_were(tiers: Tiers, codec: Codec, tier: Tier):
    rows = Rows(tiers, codec, tier)
    rows.fill()
    clusters = of_region(1)
    for renewed in ([3, 0], [2], [1, 2, 4]):
        rows.store(3, [clusters[number] for number in renewed])
        rows.check_all()


@every
def test_a_cluster_that_joins(tiers: Tiers, codec: Codec, tier: Tier):
    rows, more = Rows(tiers, codec, tier), of_region(0, (*SIZES, 2))
    rows.fill()
    rows.store(1, more[-1:])
    rows.check(1, [more[-1], more[3]])
    rows.check_all()


@pytest.mark.parametrize("slots", [1, 2, 100])
@pytest.mark.parametrize("record_rows", [1, 5, ROWS])
def test_slots_and_records_of_any_size_are_enough(tiers: Tiers, slots: int, record_rows: int):
    rows = Rows(tiers, Codec.NVFP4_DELTA, slots=slots, record_rows=record_rows)
    rows.fill()
    rows.stored.send(1, of_region(0))
    rows.check(3, of_region(1))
    rows.check_all()
    rows.store(1, of_region(1)[1:3])
    rows.check_all()


# --- fetches


def fetched(rows: Rows, tiers: Tiers) -> int:
    """Bytes that were fetched."""
    tiers.synchronize()
    assert rows.stored.fetched_bytes == tiers.stats().ways[Lane.FETCH].nbytes
    return rows.stored.fetched_bytes


@pytest.mark.parametrize("codec", Codec)
def test_rows_that_are_read_are_fetched_once_and_no_others(tiers: Tiers, codec: Codec):
    rows, first, row_bytes = Rows(tiers, codec), of_region(0), needed(codec).row_bytes
    rows.fill()
    assert fetched(rows, tiers) == 0
    rows.check(1, [first[0]])
    assert fetched(rows, tiers) == 3 * row_bytes
    rows.check(1, [first[0]])  # still in its slot
    assert fetched(rows, tiers) == 3 * row_bytes
    rows.check(1, [first[2], first[0]])  # of another record
    assert fetched(rows, tiers) == 4 * row_bytes
    rows.store(1, [first[4]])
    rows.check(1, [first[4]])
    assert fetched(rows, tiers) == 4 * row_bytes  # rows that compute has just written
    assert tiers.stats().asked == {Tier.HOST: 4}


def test_rows_on_the_device_are_counted_and_never_copied(tiers: Tiers):
    rows = Rows(tiers, tier=Tier.DEVICE)
    rows.fill()
    rows.check(1, of_region(0)[:2])
    stats = tiers.ended()
    assert stats.asked == {Tier.DEVICE: 12} and stats.stored == {Tier.DEVICE: 4 * sum(SIZES)}
    assert not any(way.jobs for way in stats.ways.values())
    assert rows.stored.fetched_bytes == 12 * needed().row_bytes


def test_sent_rows_are_there_when_they_are_read(tiers: Tiers):
    rows, (first, second) = Rows(tiers), (of_region(0), of_region(1))
    rows.fill()
    rows.stored.send(1, [first[0], second[0]])
    rows.stored.send(1, [])
    assert fetched(rows, tiers) == 6 * needed().row_bytes
    rows.check(1, [second[0], first[0]])
    assert fetched(rows, tiers) == 6 * needed().row_bytes


def test_rows_without_a_slot_set_out_when_others_have_been_read(tiers: Tiers):
    rows, first, row_bytes = Rows(tiers, slots=1), of_region(0), needed().row_bytes
    rows.fill()
    rows.stored.send(1, [first[0], first[2]])
    assert fetched(rows, tiers) == 3 * row_bytes
    rows.check(1, [first[0]])
    assert fetched(rows, tiers) == 3 * row_bytes
    rows.stored.send(1, [first[2]])
    assert fetched(rows, tiers) == 4 * row_bytes


def test_recalled_rows_make_way(tiers: Tiers):
    rows, (first, second) = Rows(tiers), (of_region(0), of_region(1))
    rows.fill()
    rows.stored.send(1, first)
    rows.stored.recall()
    sent = fetched(rows, tiers)
    rows.check(1, [second[0]])
    rows.stored.send(3, [second[0]])
    assert fetched(rows, tiers) == sent + 6 * needed().row_bytes
    rows.check_all()


@pytest.mark.parametrize("codec", Codec)
def test_rows_stored_again_on_their_way_are_new(tiers: Tiers, codec: Codec):
    rows, first = Rows(tiers, codec), of_region(0)
    rows.fill()
    for renewed in ([0], [1, 0], [2]):
        rows.stored.send(1, first[:3])
        rows.store(1, [first[number] for number in renewed])
        rows.check(1, first[:3])


# --- memory


@every
def test_the_ledger_has_the_planned_bytes(tiers: Tiers, ledger: Ledger, codec: Codec, tier: Tier):
    plan, rows = needed(codec, tier), Rows(tiers, codec, tier)
    assert {account: nbytes for account, nbytes in ledger.accounts(Tier.DEVICE).items() if nbytes} == (
        {Account.STAGING: plan.staging} if tier is Tier.HOST else {}
    )
    rows.fill()
    rows.check_all()
    for of, planned in ((Tier.DEVICE, account_bytes(plan.buffers)), (Tier.HOST, plan.host)):
        held = {account: nbytes for account, nbytes in ledger.accounts(of).items() if nbytes}
        assert held == {account: nbytes for account, nbytes in planned.items() if nbytes}


@pytest.mark.parametrize(
    ("budget", "lacks", "hint"),
    [
        ({"device": SLOTS * RECORD_ROWS * WIDTH * 4 - 1}, Tier.DEVICE, "top_m"),
        ({"host": 4 * 4096, "device": "1MiB"}, Tier.HOST, r"MemoryBudget\(host="),
    ],
)
def test_a_tier_that_is_full_is_named_and_nothing_is_left(budget: dict[str, Any], lacks: Tier, hint: str):
    ledger = Ledger(MemoryBudget(**budget))
    with pytest.raises(TierCapacityError, match=hint) as caught, Tiers(ledger, device=torch.device("cpu")) as tiers:
        Rows(tiers).fill()
    assert caught.value.tier is lacks and caught.value.needed > caught.value.available
    assert all(ledger.held(tier) == 0 for tier in Tier)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.NVFP4_DELTA])
def test_a_device_that_is_full_is_named(codec: Codec):
    most = sum(buffer.nbytes for buffer in needed(codec, Tier.DEVICE).buffers)
    with Tiers(Ledger(MemoryBudget(device=most - 1)), device=torch.device("cpu")) as tiers:
        rows = Rows(tiers, codec, Tier.DEVICE)
        with pytest.raises(TierCapacityError, match=r"MemoryBudget\(device=") as caught:
            rows.fill()
        assert caught.value.tier is Tier.DEVICE
        rows.check(LAYERS[0], of_region(1))  # the first layer has its room
    assert all(tiers.ledger.held(tier) == 0 for tier in Tier)


# --- refusals and failures


@every
def test_rows_that_do_not_fit_are_refused_before_anything_happens(tiers: Tiers, codec: Codec, tier: Tier):
    rows, (first, *_) = Rows(tiers, codec, tier), of_region(0)
    rows.fill()
    for cluster, count in (
        (first, 2),
        (first, 4),
        (first._replace(cluster=CLUSTERS), 3),
        (first._replace(rows=slice(ROWS - 2, ROWS + 1)), 3),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            rows.stored.store(1, [cluster], torch.zeros(count, WIDTH), torch.zeros(1, WIDTH))
    rows.check_all()


def test_a_failed_fetch_is_an_error_and_can_be_repeated(tiers: Tiers, faults: Faults):
    rows = Rows(tiers)
    rows.fill()
    for sent in (False, True):
        faults.next[Lane.FETCH] = OSError("the bus is down")
        if sent:
            rows.stored.send(3, of_region(0)[:1])
            tiers.synchronize()
        with pytest.raises(TransferError, match="the bus is down"):
            rows.check(3, of_region(0))
        rows.stored.check_integrity()
        rows.check_all()
    assert tiers.ended().ways[Lane.FETCH].failed == 3  # one of them fails with the rows that were sent before it


def test_rows_of_a_store_that_failed_are_never_read(tiers: Tiers, faults: Faults, ledger: Ledger):
    rows = Rows(tiers)
    rows.fill()
    tiers.synchronize()
    faults.next[Lane.STORE] = OSError("the bus is down")
    rows.store(1, of_region(0)[:1])
    rows.store(1, of_region(0)[1:])
    rows.check(3, of_region(0))  # other regions are whole
    rows.check(1, of_region(1))
    for _ in range(2):
        with pytest.raises(TransferError, match="the bus is down"):
            rows.check(1, of_region(0))
    assert tiers.ended().ways[Lane.STORE].failed
    tiers.close()
    with Tiers(ledger, device=torch.device("cpu")) as others:  # the next call
        again = Rows(others)
        again.fill()
        again.check_all()


# --- a CUDA device


@pytest.mark.gpu
@every
def test_rows_come_back_as_the_codec_gives_them(codec: Codec, tier: Tier):
    width, sizes = 512, [24] * 40
    changes = {"rows": sum(sizes), "clusters": len(sizes), "record_rows": 100, "row_bytes": codec.row_bytes(width, 2)}
    plan = needed(codec, tier, **changes)
    clusters, generator = of_region(0, sizes), torch.Generator("cuda").manual_seed(0)
    with Tiers(Ledger(), device=torch.device("cuda", 0)) as tiers:
        stored = StoredRows(tiers, plan, 1)
        for turn in range(50):
            rows, centroids = (
                torch.randn(count, width, generator=generator, device="cuda").bfloat16() for count in (sum(sizes), 40)
            )
            order = torch.randperm(len(sizes)).tolist()
            torch.cuda._sleep(1_000_000)  # compute lags behind, so that every copy could run ahead of it
            stored.store(0, clusters, rows, centroids)
            out = torch.full_like(rows, torch.nan)
            stored.read(0, [clusters[number] for number in order], out, [clusters[number].rows for number in order])
            if turn % 10 == 0:
                parts = zip(rows.split(sizes), centroids, strict=True)
                assert torch.equal(out, torch.cat([round_trip(part, codec, centroid) for part, centroid in parts]))
        assert tiers.ended().pinned == (tier is Tier.HOST)
