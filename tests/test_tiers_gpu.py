"""The tiers on a CUDA device: law 2 with real streams, real kernels and pinned memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tier_fuzz import round_trip
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.tiers.manager import TierManager
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey

pytestmark = pytest.mark.gpu

WIDTH, ROWS, RECORDS, SLOT = 512, 24, 40, 1 << 17


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TierManager]:
    budget = MemoryBudget(device="64MiB", host="2MiB", disk="8MiB", disk_path=tmp_path)
    ledger = Ledger(budget)
    with open_tiers(ledger, device="cuda", dtype=torch.bfloat16, slot_bytes=SLOT) as tiers:
        yield tiers
        tiers.check_integrity()
    assert all(ledger.held(tier) == 0 for tier in Tier)


KEYS = [RecordKey(Feature.HIDDEN, 0, 0, part) for part in range(RECORDS)]


def rows(seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(RECORDS * ROWS, WIDTH, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("codec", Codec)
def test_an_offloaded_record_is_the_resident_one(tiers: TierManager, codec: Codec):
    bank = tiers.bank(rows(1)[:8].clone()) if codec.needs_base else None
    clusters = [part % 8 for part in range(RECORDS)] if bank else None
    tiers.store(KEYS, rows(2), [ROWS] * RECORDS, codec=codec, bank=bank, clusters=clusters)
    expected = [
        round_trip(part, codec, bank.centroids[clusters[number]] if bank and clusters else None)
        for number, part in enumerate(rows(2).split(ROWS))
    ]
    order = torch.randperm(RECORDS).tolist()
    answer = tiers.fetch([KEYS[part] for part in order]).wait()
    if bank:
        bank.release()
    assert torch.equal(answer, torch.cat([expected[part] for part in order]))
    assert tiers.stats().pinned


def test_overlapping_stores_and_fetches_stay_apart(tiers: TierManager):
    for seed in range(200):
        torch.cuda._sleep(1_000_000)  # compute lags behind, so that every copy could run ahead of it
        tiers.store(KEYS, rows(seed), [ROWS] * RECORDS, codec="raw")
        answer = tiers.fetch(KEYS).wait()
        assert torch.equal(answer, rows(seed))
