"""Law 2 for features: a store with streamed layers holds the rows of a resident one, to the bit."""

import random
from collections.abc import Callable

import pytest
import torch
from simulation import Point, SimulatedThreads
from torch import Tensor

from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.core.rows import Rows, parts_of
from tiered.forward import stream_bytes
from tiered.forward.feature_store import FeatureStore
from tiered.forward.sizes import CallShape
from tiered.forward.stream_bytes import StreamBytes
from tiered.forward.streamed_store import StreamedFeatureStore
from tiered.models.llada import LLaDA
from tiered.models.shape import ModelShape
from tiered.offload.errors import TransferError
from tiered.offload.thread_transport import ThreadTransport
from tiered.offload.transport import Lane
from tiered.tiers.tiers import Tiers

LAYERS, BATCH, LENGTH, PROMPT = 6, 4, 45, 21
FEATURES = {Feature.KEY: LAYERS, Feature.VALUE: LAYERS, Feature.HIDDEN: LAYERS, Feature.FFN_OUT: LAYERS}
COUNTS = {Feature.KEY: 4, Feature.VALUE: 6, Feature.HIDDEN: 1, Feature.FFN_OUT: 5}


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    sizes = {"d_model": 32, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 48}
    tokens = {"vocab_size": 64, "mask_token_id": 63, "eos_token_id": 62, "pad_token_id": 62}
    return LLaDA.from_config({**sizes, **tokens, "max_sequence_length": 64}).shape


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_bytes, "FEWEST_CHUNK_ROWS", 8)


def bytes_of(shape: ModelShape, slots: int = 2) -> StreamBytes:
    needed = StreamBytes.of(
        CallShape(
            shape=shape, batch=BATCH, context=LENGTH, block_length=LENGTH, answer=LENGTH - PROMPT, dtype="float32"
        ),
        COUNTS,
        slots=slots,
    )
    assert needed is not None
    return needed


def open_for(ledger: Ledger, delay: Callable[[Point, Lane | None], float] | None = None) -> Tiers:
    transport = ThreadTransport() if delay is None else SimulatedThreads(delay=delay)
    return Tiers(ledger, device=torch.device("cpu"), transport=transport)


def both(needed: StreamBytes, tiers: Tiers) -> tuple[FeatureStore, StreamedFeatureStore]:
    resident = FeatureStore(needed.sizes, FEATURES, torch.device("cpu"))
    return resident, StreamedFeatureStore(FEATURES, needed, tiers)


def some_rows(chance: random.Random, sequences: int, first: int) -> Rows:
    """A span, or scattered rows with or without filler, from column `first` on; sometimes of some sequences alone."""
    start = chance.randrange(first, LENGTH)
    stop = chance.randrange(start + 1, LENGTH + 1)
    if chance.random() < 0.2:
        start, stop = first, LENGTH
    if chance.random() < 0.5:
        rows = Rows.span(start, stop)
    else:
        count = chance.randint(1, stop - start)
        index = torch.tensor([chance.sample(range(start, stop), count) for _ in range(sequences)])
        valid = torch.tensor([[chance.random() < 0.8 for _ in range(count)] for _ in range(sequences)])
        rows = Rows.at(
            index, valid if chance.random() < 0.5 else None, range(start, stop) if chance.random() < 0.5 else range(0)
        )
    if chance.random() < 0.3:
        rows = rows.only(torch.tensor([[chance.random() < 0.5] for _ in range(sequences)]))
    return rows


def same(resident: Tensor, streamed: Tensor) -> bool:
    """Whether written numbers agree. A number that was never written is NaN in `resident`."""
    assert resident.shape == streamed.shape and resident.stride() == streamed.stride()
    return bool(((resident == streamed) | resident.isnan()).all())


def jitter(seed: int) -> Callable[[Point, Lane | None], float]:
    chance = random.Random(seed)
    return lambda point, lane: max(0.0, chance.uniform(-0.004, 0.001))


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_streamed_store_is_a_resident_one(shape: ModelShape, slots: int, seed: int):
    chance = random.Random(seed)
    needed = bytes_of(shape, slots)
    ledger = Ledger()
    with open_for(ledger, jitter(seed) if seed % 2 else None) as tiers:
        resident, streamed = both(needed, tiers)
        here = BATCH
        for step in range(10):
            sequences = here if chance.random() < 0.7 else chance.randint(1, here)
            for store in (resident, streamed):
                store.narrow(sequences)
            ordered = chance.random() < 0.7
            for number in range(LAYERS):
                layer = number if ordered else chance.randrange(LAYERS)
                for feature in FEATURES:
                    if chance.random() < 0.6:
                        rows = some_rows(chance, sequences, PROMPT if feature is Feature.FFN_OUT else 0)
                        heads, elements = (2, 8) if feature in (Feature.KEY, Feature.VALUE) else (1, 32)
                        values = torch.randn(sequences, heads, rows.count, elements)
                        resident.write(feature, layer, rows, values)
                        streamed.write(feature, layer, rows, values)
                    if chance.random() < 0.7:
                        assert same(resident.view(feature, layer), streamed.view(feature, layer)), (
                            step,
                            layer,
                            feature,
                        )
            if step % 3 == 2 and here > 1:
                kept = [number for number in range(here) if number != step // 3 % here]  # the first, the second, …
                for store in (resident, streamed):
                    store.keep(kept)
                here -= 1
            tiers.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)


def fill(store: FeatureStore, feature: Feature, layer: int, seed: int = 0) -> None:
    values = torch.randn(BATCH, 2, LENGTH, 8, generator=torch.Generator().manual_seed(100 * seed + layer))
    store.write(feature, layer, Rows.span(0, LENGTH), values)


def test_the_next_layer_is_on_its_way_when_one_is_read(shape: ModelShape):
    needed = bytes_of(shape)
    with open_for(Ledger()) as tiers:
        _, store = both(needed, tiers)
        for layer in range(LAYERS):
            fill(store, Feature.VALUE, layer)
        asked = tiers.stats().asked[Tier.HOST]
        assert asked == 0  # nothing that is overwritten whole is fetched
        store.view(Feature.VALUE, 0)
        chunks = needed.streams[1].chunks().parts
        # Layer 0 and, beside it, the next layer.
        assert tiers.stats().asked[Tier.HOST] == 2 * chunks
        store.view(Feature.VALUE, 1)
        assert tiers.stats().asked[Tier.HOST] == 3 * chunks
        store.view(Feature.VALUE, 1)
        assert tiers.stats().asked[Tier.HOST] == 3 * chunks


def test_a_block_is_written_into_its_pages_alone(shape: ModelShape):
    needed = bytes_of(shape, slots=1)
    with open_for(Ledger()) as tiers:
        _, store = both(needed, tiers)
        for layer in range(LAYERS):
            fill(store, Feature.VALUE, layer)
        store.view(Feature.VALUE, 0)
        asked, stored = tiers.stats().asked[Tier.HOST], tiers.stats().stored[Tier.HOST]
        store.write(Feature.VALUE, 1, Rows.span(9, 12), torch.zeros(BATCH, 2, 3, 8))
        assert tiers.stats().asked[Tier.HOST] == asked + BATCH  # a page of each sequence
        assert tiers.stats().stored[Tier.HOST] == stored  # layer 0 was only read
        store.view(Feature.VALUE, 2)
        assert tiers.stats().stored[Tier.HOST] == stored + BATCH


def test_rows_overwritten_on_their_way_do_not_come_back(shape: ModelShape):
    needed = bytes_of(shape)
    with open_for(Ledger(), lambda point, lane: 0.01 * (lane is Lane.FETCH)) as tiers:
        _, store = both(needed, tiers)
        for layer in range(LAYERS):
            fill(store, Feature.VALUE, layer)
        store.view(Feature.VALUE, 0)  # and the next layer is being fetched
        fill(store, Feature.VALUE, 1, seed=1)
        expected = store.view(Feature.VALUE, 1).clone()
        for layer in range(2, LAYERS):
            store.view(Feature.VALUE, layer)
        assert torch.equal(store.view(Feature.VALUE, 1), expected)
        resident, _ = both(needed, tiers)
        fill(resident, Feature.VALUE, 1, seed=1)
        assert torch.equal(resident.view(Feature.VALUE, 1), expected)


def test_scattered_rows_are_read_back_once(shape: ModelShape, monkeypatch: pytest.MonkeyPatch):
    needed, reads = bytes_of(shape), []
    with open_for(Ledger()) as tiers:
        _, store = both(needed, tiers)
        for layer in range(LAYERS):
            fill(store, Feature.VALUE, layer)
        original = Tensor.tolist
        monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(1) or original(tensor))
        index = torch.stack([torch.randperm(LENGTH)[:6] for _ in range(BATCH)])
        rows = Rows.at(index)
        for layer in range(LAYERS):
            for part in parts_of(rows.count, 4):
                store.write(Feature.VALUE, layer, rows[part], torch.zeros(BATCH, 2, rows[part].count, 8))
        assert len(reads) == 2  # two parts, six layers
        within = Rows.at(index, within=range(LENGTH))
        for layer in range(LAYERS):
            store.write(Feature.VALUE, layer, within, torch.zeros(BATCH, 2, 6, 8))
        assert len(reads) == 2
        index += 0  # the same memory with other content is other rows
        store.write(Feature.VALUE, 0, rows, torch.zeros(BATCH, 2, 6, 8))
        assert len(reads) == 3


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.STORE])
def test_a_failed_copy_is_an_error_and_leaks_nothing(shape: ModelShape, lane: Lane):
    broken: set[Lane] = set()

    def fault(point: Point, of: Lane | None) -> float:
        if point is Point.COPY and of in broken:
            broken.discard(of)
            raise OSError("the bus is down")
        return 0.0

    needed, ledger = bytes_of(shape), Ledger()
    with open_for(ledger, fault) as tiers:
        resident, store = both(needed, tiers)
        for layer in range(3):
            for one in (resident, store):
                fill(one, Feature.VALUE, layer)
        tiers.synchronize()
        broken.add(lane)
        if lane is Lane.STORE:
            fill(store, Feature.VALUE, 3)
            tiers.synchronize()
        with pytest.raises(TransferError):
            for layer in (0, 1, 2):
                store.view(Feature.VALUE, layer)
        for one in (resident, store):  # other layers are as they were
            for layer in range(4, LAYERS):
                fill(one, Feature.VALUE, layer, seed=1)
        for layer in range(4, LAYERS):
            assert torch.equal(resident.view(Feature.VALUE, layer), store.view(Feature.VALUE, layer))
        tiers.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)
