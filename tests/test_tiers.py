"""The tier manager: what is stored comes back, from whichever tier, within the budget."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from simulation import Link, LinkSpeed, Point, SimulatedThreads
from tier_fuzz import round_trip
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Feature, Tier
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk
from tiered.offload.codec_bytes import Codec
from tiered.offload.errors import TransferError
from tiered.offload.lane import Lane
from tiered.tiers import manager
from tiered.tiers import tiers as tiers_module
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey

WIDTH, ROWS, SLOT = 96, 10, 16384  # a record takes 4096 bytes at most: four in a staging slot


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(MemoryBudget(device="1MiB", host=8 * SLOT))


@pytest.fixture
def tiers(ledger: Ledger) -> Iterator[TierManager]:
    with open_tiers(ledger, device="cpu", slot_bytes=SLOT) as tiers:
        yield tiers
        tiers.check_integrity()
    ledger.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)


def keys(*parts: int) -> list[RecordKey]:
    return [RecordKey(Feature.HIDDEN, 0, 0, part) for part in parts]


def rows_of(*parts: int) -> Tensor:
    return torch.cat([torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(part)) for part in parts])


def store(tiers: TierManager, *parts: int, codec: Codec | str = "raw", **options) -> None:
    tiers.store(keys(*parts), rows_of(*parts), [ROWS] * len(parts), codec=codec, **options)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("codec", Codec)
def test_the_way_makes_no_difference_to_a_bit(tiers: TierManager, codec: Codec, tier: Tier):
    bank = tiers.bank(rows_of(7)[:3].clone()) if codec.needs_base else None
    clusters = [2, 0] if bank else None
    store(tiers, 1, 2, codec=codec, bank=bank, clusters=clusters, tier=tier)
    centroids = [bank.centroids[cluster] for cluster in clusters] if bank and clusters else [None, None]
    expected = [round_trip(rows_of(part), codec, centroids[number]) for number, part in enumerate((1, 2))]
    if bank:
        bank.release()
    assert torch.equal(tiers.fetch(keys(2, 1)).wait(), torch.cat(expected[::-1]))


class Earlier:
    """A kernel of those who had some memory before: it still writes there a moment after others have obtained it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.over = memory, threading.Event()
        threading.Timer(0.05, self.run).start()

    def run(self) -> None:
        self.memory.fill_(255)
        self.over.set()

    def done(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        assert self.over.wait(20)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_device_memory_is_used_once_its_earlier_owners_are_done(
    ledger: Ledger, tier: Tier, monkeypatch: pytest.MonkeyPatch
):
    kernels: list[Earlier] = []

    def allocate(nbytes: int) -> Chunk:
        kernels.append(Earlier(torch.zeros(nbytes, dtype=torch.uint8)))
        return Chunk(kernels[-1].memory, pinned=False, actual_bytes=nbytes, earlier=kernels[-1])

    for module in (tiers_module, manager):
        monkeypatch.setattr(module, "device_chunks", lambda device: allocate)
    with open_tiers(ledger, device="cpu", slot_bytes=SLOT) as tiers:
        store(tiers, 1, 2, tier=tier)
        ticket = tiers.fetch(keys(2, 1))
        for kernel in kernels:
            kernel.synchronize()
        assert torch.equal(ticket.wait(), rows_of(2, 1))


def test_raw_records_are_the_rows(tiers: TierManager):
    store(tiers, *range(20))
    assert torch.equal(tiers.fetch(keys(*range(20))).wait(), rows_of(*range(20)))


def test_rows_may_go_into_the_consumers_tensor(tiers: TierManager):
    store(tiers, 1, 2, 3)
    out, places = torch.zeros(50, WIDTH), torch.randperm(50)[: 3 * ROWS]
    assert tiers.fetch(keys(3, 1, 2)).wait(out, places) is out
    assert torch.equal(out[places], rows_of(3, 1, 2))
    assert out.count_nonzero() == 3 * ROWS * WIDTH


def test_a_fetch_gets_what_was_stored_when_it_asked(tiers: TierManager):
    store(tiers, *range(8))
    old = tiers.fetch(keys(*range(4)))
    tiers.store(keys(*range(8)), rows_of(*range(10, 18)), [ROWS] * 8, codec="raw")
    gone = tiers.fetch(keys(3))
    tiers.forget(keys(3))
    assert torch.equal(tiers.fetch(keys(5)).wait(), rows_of(15))
    assert torch.equal(old.wait(), rows_of(*range(4)))
    assert torch.equal(gone.wait(), rows_of(13))
    with pytest.raises(KeyError, match="nothing is stored as hidden of layer 0, sequence 0, part 3"):
        tiers.fetch(keys(3))


def test_a_delta_is_decoded_against_the_centroids_it_was_made_with(tiers: TierManager, ledger: Ledger):
    first = tiers.bank(rows_of(7)[:2].clone(), version=1)
    store(tiers, 1, 2, codec="nvfp4_delta", bank=first, clusters=[0, 1])
    second = tiers.bank(first.centroids + 1, version=2)
    store(tiers, 2, codec="nvfp4_delta", bank=second, clusters=[1])
    expected = torch.cat(
        [
            round_trip(rows_of(1), Codec.NVFP4_DELTA, first.centroids[0]),
            round_trip(rows_of(2), Codec.NVFP4_DELTA, second.centroids[1]),
        ]
    )
    size = first.centroids.nbytes
    first.release()
    second.release()
    assert ledger.held(Tier.DEVICE, Account.CENTROIDS) == 2 * size  # records still need both
    assert torch.equal(tiers.fetch(keys(1, 2)).wait(), expected)
    store(tiers, 1)
    assert ledger.held(Tier.DEVICE, Account.CENTROIDS) == size
    with pytest.raises(ValueError, match="given back"):
        store(tiers, 3, codec="nvfp4_delta", bank=first, clusters=[0])


def test_full_tiers_say_so_and_nothing_is_lost():
    with open_tiers(Ledger(MemoryBudget(host=2 * SLOT)), device="cpu", slot_bytes=SLOT) as tiers:
        store(tiers, *range(6))
        with pytest.raises(TierCapacityError, match=r"MemoryBudget\(host=") as caught:
            store(tiers, 6, 7, 8)
        assert (caught.value.tier, caught.value.total) == (Tier.HOST, 3 * SLOT)  # one slab more
        tiers.check_integrity()
        assert len(tiers) == 6 and keys(6)[0] not in tiers
        store(tiers, 6, 7)
        assert torch.equal(tiers.fetch(keys(*range(8))).wait(), rows_of(*range(8)))


def test_rings_that_do_not_fit_are_told_at_the_door():
    ledger = Ledger(MemoryBudget(device=5 * SLOT - 1))
    with pytest.raises(TierCapacityError, match="slot_bytes") as caught:
        open_tiers(ledger, device="cpu", slot_bytes=SLOT)
    assert caught.value.tier is Tier.DEVICE
    assert all(ledger.held(tier) == 0 for tier in Tier)


def test_the_ledger_has_rings_arenas_and_records(tiers: TierManager, ledger: Ledger):
    assert ledger.held(Tier.DEVICE) == ledger.held(Tier.DEVICE, Account.STAGING) == 5 * SLOT
    assert ledger.held(Tier.HOST) == 0
    store(tiers, 1, 2)
    record = ROWS * WIDTH * 4
    assert ledger.held(Tier.HOST, Account.HIDDEN) == 2 * record
    assert ledger.held(Tier.HOST) == SLOT
    store(tiers, 3, tier=Tier.DEVICE)
    assert ledger.held(Tier.DEVICE, Account.HIDDEN) == record


def test_neighbours_travel_in_one_copy(tiers: TierManager):
    store(tiers, *range(8))
    tiers.fetch(keys(5, 2, 7, 0, 1, 3, 6, 4)).wait()
    tiers.synchronize()
    ways = tiers.stats().ways
    assert (ways[Lane.STORE].jobs, ways[Lane.STORE].copies) == (2, 2)
    assert (ways[Lane.FETCH].jobs, ways[Lane.FETCH].copies) == (2, 2)


def test_a_store_slot_holds_many_records():
    """As many as its bytes, whatever a slot that records arrive in or a slab holds."""
    with open_tiers(
        Ledger(), device="cpu", slot_bytes=SLOT, store_bytes=8 * SLOT, slab_bytes=2 * SLOT, fetch_slots=2
    ) as tiers:
        store(tiers, *range(100))
        tiers.synchronize()
        assert tiers.stats().ways[Lane.STORE].jobs == -(-100 // 32)
        assert torch.equal(tiers.fetch(keys(*range(99, -1, -1))).wait(), rows_of(*range(99, -1, -1)))
        store(tiers, *range(3, 90, 7), codec="fp8")
        tiers.check_integrity()
        with pytest.raises(ValueError, match=f"allowed are the {SLOT} of a staging slot"):
            tiers.store(keys(1), torch.zeros(SLOT // 4 // WIDTH + 1, WIDTH), [SLOT // 4 // WIDTH + 1], codec="raw")


def test_slots_of_a_store_and_slabs_hold_what_arrives():
    for store_bytes, slab_bytes in ((SLOT - 4096, None), (None, SLOT - 4096)):
        with pytest.raises(ValueError, match=f"must be slot_bytes = {SLOT} or more"):
            open_tiers(Ledger(), device="cpu", slot_bytes=SLOT, store_bytes=store_bytes, slab_bytes=slab_bytes)


def test_a_slow_link_is_hidden_or_exposed(tmp_path: Path):
    seconds = 0.05
    link = Link(fetch=LinkSpeed(latency=seconds))
    with open_tiers(Ledger(), device="cpu", slot_bytes=SLOT, transport=SimulatedThreads(link=link)) as tiers:
        store(tiers, 1, 2)
        hidden = tiers.fetch(keys(1))
        hidden._batches[0].arrival.synchronize()  # type: ignore[union-attr]
        hidden.wait()
        stats = tiers.stats().ways[Lane.FETCH]
        assert (stats.late, stats.busy_ns >= seconds * 1e9) == (0, True)
        assert stats.exposed_ns < stats.busy_ns / 5
        ticket = tiers.fetch(keys(2))
        ticket.wait()
        stats = tiers.stats().ways[Lane.FETCH]
        assert stats.late == 1
        assert stats.exposed_ns >= 0.5 * seconds * 1e9
        assert stats.gigabytes_per_second is not None


def of_layers(*layers: int) -> list[RecordKey]:
    return [RecordKey(Feature.HIDDEN, layer, 0, 0) for layer in layers]


def test_copies_are_counted_by_the_layer_of_their_records(tiers: TierManager):
    for layer in (3, 5):
        tiers.store(of_layers(layer), rows_of(layer), [ROWS], codec="raw")
    tiers.fetch(of_layers(3)).wait()
    tiers.fetch(of_layers(5)).wait()
    tiers.fetch(of_layers(3, 5)).wait()  # one batch of both: it belongs to neither
    tiers.store(of_layers(7), rows_of(7), [ROWS], codec="raw", tier=Tier.DEVICE)
    tiers.synchronize()
    stats = tiers.stats()
    jobs = {layer: {way: counted.jobs for way, counted in ways.items()} for layer, ways in stats.layers.items()}
    assert jobs == {
        3: {Lane.STORE: 1, Lane.FETCH: 1, Lane.SPILL: 0, Lane.LOAD: 0},
        5: {Lane.STORE: 1, Lane.FETCH: 1, Lane.SPILL: 0, Lane.LOAD: 0},
        7: {Lane.STORE: 0, Lane.FETCH: 0, Lane.SPILL: 0, Lane.LOAD: 0},
    }
    batches = {layer: [ways[way].batches for way in (Lane.STORE, Lane.FETCH)] for layer, ways in stats.layers.items()}
    assert batches == {3: [1, 1], 5: [1, 1], 7: [1, 0]}
    assert (stats.ways[Lane.FETCH].jobs, stats.ways[Lane.FETCH].batches) == (3, 3)
    assert all(stats.layers[layer][Lane.STORE].nbytes for layer in (3, 5))
    told = json.loads(json.dumps(stats.as_dict()))["layers"]
    assert list(told) == ["3", "5", "7"]
    assert told["5"]["store"]["nbytes"] == stats.layers[5][Lane.STORE].nbytes


def test_a_slow_link_is_exposed_in_its_layer():
    seconds = 0.05
    transport = SimulatedThreads(link=Link(fetch=LinkSpeed(latency=seconds)))
    with open_tiers(Ledger(), device="cpu", slot_bytes=SLOT, transport=transport) as tiers:
        for layer in (1, 2):
            tiers.store(of_layers(layer), rows_of(layer), [ROWS], codec="raw")
        ahead = tiers.fetch(of_layers(1))
        ahead._batches[0].arrival.synchronize()  # type: ignore[union-attr]
        ahead.wait()
        tiers.fetch(of_layers(2)).wait()
        hidden, exposed = (tiers.stats().layers[layer][Lane.FETCH] for layer in (1, 2))
    assert (hidden.late, exposed.late) == (0, 1)
    assert hidden.hidden_ns >= 0.5 * seconds * 1e9
    assert exposed.exposed_ns >= 0.5 * seconds * 1e9 > hidden.exposed_ns


def test_store_and_fetch_do_not_wait_for_a_copy():
    link = Link(fetch=LinkSpeed(latency=0.6), store=LinkSpeed(latency=0.6))
    transport = SimulatedThreads(link=link, compute_thread=True)
    with open_tiers(Ledger(), device="cpu", slot_bytes=SLOT, transport=transport) as tiers:
        begin = time.monotonic()
        store(tiers, *range(4))
        tickets = [tiers.fetch(keys(part)) for part in range(4)]  # one more than there are slots
        answers = [ticket.wait() for ticket in tickets]
        assert time.monotonic() - begin < 0.5
        tiers.synchronize()
        assert torch.equal(torch.cat(answers), rows_of(*range(4)))


@pytest.mark.parametrize(
    ("complaint", "change"),
    [
        ("unknown codec 'int3'", {"codec": "int3"}),
        ("not in disk", {"tier": Tier.DISK}),
        ("must be distinct", {"keys": keys(1, 1)}),
        ("are not the 20 rows", {"sizes": [10, 9]}),
        ("are not the 20 rows", {"sizes": [20, 0]}),
        ("are not the 20 rows", {"sizes": [20]}),
        ("float32", {"rows": rows_of(1, 2).double()}),
        ("float32", {"rows": rows_of(1, 2).flatten()}),
        ("needs both", {"codec": "nvfp4_delta"}),
        ("must be finite", {"codec": "nvfp4", "rows": rows_of(1, 2).index_fill(0, torch.tensor([4]), torch.nan)}),
        ("must be finite", {"codec": "fp8", "rows": rows_of(1, 2).index_fill(0, torch.tensor([4]), torch.inf)}),
        ("does not fit a slab", {"rows": torch.zeros(50, WIDTH), "sizes": [45, 5]}),
    ],
)
def test_bad_stores_are_refused_before_anything_happens(tiers: TierManager, complaint: str, change: dict):
    store(tiers, 1)
    arguments = {"keys": keys(1, 2), "rows": rows_of(3, 4), "sizes": [ROWS, ROWS], "codec": "raw"} | change
    with pytest.raises(ValueError, match=complaint):
        tiers.store(**arguments)
    assert len(tiers) == 1
    assert torch.equal(tiers.fetch(keys(1)).wait(), rows_of(1))


def test_banks_must_fit_the_rows(tiers: TierManager):
    bank = tiers.bank(torch.zeros(2, WIDTH + 1))
    with pytest.raises(ValueError, match=f"centroids of width {WIDTH + 1}"):
        store(tiers, 1, codec="nvfp4_delta", bank=bank, clusters=[0])
    bank.release()
    bank = tiers.bank(torch.zeros(2, WIDTH))
    of_two = "one of 2 centroids"
    for clusters, complaint in (([2], of_two), ([-1], of_two), ([0, 1], "one for each of 1")):
        with pytest.raises(ValueError, match=complaint):
            store(tiers, 1, codec="nvfp4_delta", bank=bank, clusters=clusters)
    with pytest.raises(ValueError, match="needs both"):
        store(tiers, 1, codec="nvfp4", bank=bank, clusters=[0])
    bank.release()


@pytest.mark.parametrize(
    ("out", "places", "complaint"),
    [
        (torch.empty(19, WIDTH), None, "needed are 20 rows"),
        (torch.empty(20, WIDTH - 1), None, f"width {WIDTH}"),
        (None, torch.arange(20), "give `out` as well"),
        (torch.empty(40, WIDTH), torch.arange(19), "needed are 20 places"),
        (torch.empty(40, WIDTH), torch.arange(20, dtype=torch.int32), "int64"),
    ],
)
def test_an_answer_that_does_not_fit_costs_nothing(tiers: TierManager, out: Tensor, places: Tensor, complaint: str):
    store(tiers, 1, 2)
    ticket = tiers.fetch(keys(1, 2))
    with pytest.raises(ValueError, match=complaint):
        ticket.wait(out, places)
    assert torch.equal(ticket.wait(), rows_of(1, 2))
    with pytest.raises(ValueError, match="already"):
        ticket.wait()


def test_a_fetch_is_of_one_width(tiers: TierManager):
    store(tiers, 1)
    tiers.store(keys(2), torch.zeros(3, 16), [3], codec="raw")
    with pytest.raises(ValueError, match=r"one width: 2 keys have \[16, 96\]"):
        tiers.fetch(keys(1, 2))
    with pytest.raises(ValueError, match="one or more records"):
        tiers.fetch([])
    assert torch.equal(tiers.fetch(keys(1)).wait(), rows_of(1))


def filled(tickets: int) -> list[Tensor]:
    """Destinations for tickets, poisoned."""
    return [torch.full((ROWS, WIDTH), torch.nan) for _ in range(tickets)]


def test_a_ticket_progresses_though_others_hold_every_slot(tiers: TierManager):
    store(tiers, *range(8))
    outs = filled(3)
    held = [tiers.fetch(keys(part), out) for part, out in enumerate(outs)]
    answer = tiers.fetch(keys(3, 4)).wait()
    assert torch.equal(answer, rows_of(3, 4))
    assert torch.equal(outs[0], rows_of(0))  # the first to set out was decoded for it, and the others too: they came
    jobs = tiers.stats().ways[Lane.FETCH].jobs
    assert torch.equal(torch.cat([ticket.wait() for ticket in held]), rows_of(0, 1, 2))
    assert tiers.stats().ways[Lane.FETCH].jobs == jobs == 4
    tiers.check_integrity()


def test_a_guess_makes_way_and_sets_out_again(tiers: TierManager):
    store(tiers, *range(8))
    guesses = [tiers.fetch(keys(part)) for part in range(3)]
    assert torch.equal(tiers.fetch(keys(3, 4)).wait(), rows_of(3, 4))
    tiers.check_integrity()
    assert torch.equal(torch.cat([ticket.wait() for ticket in guesses]), rows_of(0, 1, 2))
    assert tiers.stats().ways[Lane.FETCH].jobs == 5  # the last of the guesses came twice
    with tiers.fetch(keys(5)):
        pass
    tiers.check_integrity()


def test_a_guess_whose_records_were_replaced_makes_way_too(tiers: TierManager, ledger: Ledger):
    store(tiers, *range(4))
    guesses = [tiers.fetch(keys(part)) for part in range(3)]
    rings = ledger.held(Tier.DEVICE, Account.STAGING)
    tiers.store(keys(0, 1, 2), rows_of(10, 11, 12), [ROWS] * 3, codec="raw")
    assert torch.equal(tiers.fetch(keys(3)).wait(), rows_of(3))
    assert torch.equal(tiers.fetch(keys(0)).wait(), rows_of(10))
    tiers.check_integrity()
    # The bytes that made way are booked until they are read.
    assert ledger.held(Tier.DEVICE, Account.STAGING) == rings + SLOT
    assert torch.equal(torch.cat([ticket.wait() for ticket in guesses]), rows_of(0, 1, 2))
    assert ledger.held(Tier.DEVICE, Account.STAGING) == rings


def test_a_guess_whose_records_were_replaced_makes_no_way_beyond_the_budget():
    with open_tiers(Ledger(MemoryBudget(device=5 * SLOT)), device="cpu", slot_bytes=SLOT) as tiers:
        store(tiers, *range(4))
        guesses = [tiers.fetch(keys(part)) for part in range(3)]
        tiers.store(keys(0, 1, 2), rows_of(10, 11, 12), [ROWS] * 3, codec="raw")
        with pytest.raises(TierCapacityError, match="say where their rows go"):
            tiers.fetch(keys(3)).wait()
        assert torch.equal(torch.cat([ticket.wait() for ticket in guesses]), rows_of(0, 1, 2))
        assert torch.equal(tiers.fetch(keys(3)).wait(), rows_of(3))
        tiers.check_integrity()


def test_a_store_that_finds_no_room_names_its_own_tier():
    with open_tiers(Ledger(MemoryBudget(device=5 * SLOT, host=2 * SLOT)), device="cpu", slot_bytes=SLOT) as tiers:
        store(tiers, *range(4))
        guesses = [tiers.fetch(keys(part)) for part in range(3)]
        tiers.store(keys(0, 1, 2), rows_of(10, 11, 12), [ROWS] * 3, codec="raw")
        wanted = tiers.fetch(keys(3), *filled(1))  # which would have to set bytes aside, for which there is no room
        with pytest.raises(TierCapacityError) as error:
            store(tiers, *range(4, 12))
        assert error.value.tier is Tier.HOST
        assert torch.equal(torch.cat([ticket.wait() for ticket in guesses]), rows_of(0, 1, 2))
        assert torch.equal(wanted.wait(), rows_of(3))
        tiers.check_integrity()


def test_what_has_a_destination_sets_out_before_guesses(tiers: TierManager):
    store(tiers, *range(8))
    held = [tiers.fetch(keys(part)) for part in range(3)]
    guess, wanted = tiers.fetch(keys(3)), tiers.fetch(keys(4))
    wanted.into(*filled(1))
    held[0].close()
    tiers.progress()
    assert not any(batch.reading for batch in wanted._batches) and all(batch.reading for batch in guess._batches)
    assert torch.equal(wanted.wait(), rows_of(4)) and torch.equal(guess.wait(), rows_of(3))
    for ticket in held:
        ticket.close()


def test_a_store_lands_what_keeps_records_from_leaving():
    with open_tiers(Ledger(MemoryBudget(device="1MiB", host=2 * SLOT)), device="cpu", slot_bytes=SLOT) as tiers:
        store(tiers, *range(4), tier=Tier.DEVICE)
        store(tiers, *range(4, 12))
        outs = filled(5)
        with pytest.raises(TierCapacityError):
            store(tiers, 12)
        tickets = [tiers.fetch(keys(part), out) for part, out in zip(range(4, 9), outs, strict=True)]
        tiers.forget(keys(7, 8))  # which fetches have not set out for
        store(tiers, 12, 13)
        tiers.check_integrity()
        assert torch.equal(torch.cat([ticket.wait() for ticket in tickets]), rows_of(*range(4, 9)))


def test_a_failed_copy_is_told_to_its_own_ticket_alone(ledger: Ledger):
    faults = iter([OSError("the bus is down")])

    def fault(point: Point, lane: Lane | None) -> float:
        if point is Point.COPY and lane is Lane.FETCH:
            for error in faults:
                raise error
        return 0.0

    with open_tiers(ledger, device="cpu", slot_bytes=SLOT, transport=SimulatedThreads(delay=fault)) as tiers:
        store(tiers, *range(5))
        outs = filled(3)
        held = [tiers.fetch(keys(part), out) for part, out in enumerate(outs)]
        assert torch.equal(tiers.fetch(keys(3, 4)).wait(), rows_of(3, 4))
        with pytest.raises(TransferError, match="the bus is down"):
            held[0].wait()
        assert torch.equal(torch.cat([ticket.wait() for ticket in held[1:]]), rows_of(1, 2))
        tiers.check_integrity()


def test_a_fetch_given_up_frees_its_records(tiers: TierManager):
    store(tiers, *range(8))
    held = [tiers.fetch(keys(part)) for part in range(3)]
    waiting = tiers.fetch(keys(3, 4))
    tiers.forget(keys(3, 4))
    tiers.check_integrity()  # what a fetch is about to read stays
    held_bytes = tiers.ledger.held(Tier.HOST, Account.HIDDEN)
    waiting.close()
    tiers.check_integrity()
    assert tiers.ledger.held(Tier.HOST, Account.HIDDEN) == held_bytes - 2 * ROWS * WIDTH * 4
    for ticket in held:
        ticket.close()


def test_an_answer_that_comes_in_parts_is_whole(tiers: TierManager):
    store(tiers, *range(12), tier=Tier.DEVICE)
    store(tiers, *range(4, 12))  # the first four stay on the device and are there at once
    others = [tiers.fetch(keys(part)) for part in (5, 6, 7)]
    out = torch.zeros(120, WIDTH)
    ticket = tiers.fetch(keys(*range(12)), out)
    with pytest.raises(ValueError, match="another tensor"):
        ticket.wait(torch.empty(120, WIDTH))
    with pytest.raises(ValueError, match="another tensor"):
        ticket.into(torch.empty(120, WIDTH))
    assert ticket.wait() is out and torch.equal(out, rows_of(*range(12)))
    for other in others:
        other.close()


def test_closing_gives_everything_back(ledger: Ledger):
    tiers = open_tiers(ledger, device="cpu", slot_bytes=SLOT)
    bank = tiers.bank(rows_of(7)[:2].clone())
    store(tiers, *range(20), codec="nvfp4_delta", bank=bank, clusters=[0] * 20)
    bank.release()
    ticket, taken = tiers.fetch(keys(1, 17)), tiers.fetch(keys(2))
    tiers.close()
    tiers.close()
    assert all(ledger.held(tier) == 0 for tier in Tier)
    for call in (ticket.wait, taken.wait, lambda: store(tiers, 1), lambda: tiers.fetch(keys(1))):
        with pytest.raises(ValueError, match="closed"):
            call()
    ticket.close()
