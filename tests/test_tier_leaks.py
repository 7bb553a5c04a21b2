"""Thousands of stores and fetches leave memory, descriptors and threads where they were."""

import os
import threading
from pathlib import Path

import pytest
import torch

from tiered.core.budget import MemoryBudget
from tiered.core.features import Feature, Tier
from tiered.core.ledger import Ledger
from tiered.tiers.opening import open_tiers
from tiered.tiers.record_book import RecordKey

WIDTH, ROWS, SLOT = 48, 4, 8192
EARLY = 1000  # cycles after which nothing may grow any more


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def running() -> set[object]:
    """Threads, and descriptors with what they are of. Those of other tests may end meanwhile."""
    links = [(path, os.path.realpath(path)) for path in Path("/proc/self/fd").iterdir()]
    return {*threading.enumerate(), *(link for link in links if link[0].is_symlink())}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of resident pages")
@pytest.mark.parametrize("cycles", [2_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_nothing_grows(cycles: int):
    ledger = Ledger(MemoryBudget(host=8 * SLOT))
    before = running()
    rows = torch.randn(ROWS, WIDTH)
    with open_tiers(ledger, device="cpu", slot_bytes=SLOT) as tiers:
        bank = tiers.bank(torch.randn(4, WIDTH))
        early = None
        for cycle in range(cycles):
            key = RecordKey(Feature.HIDDEN, 0, 0, cycle % 12)
            tiers.store([key], rows, [ROWS], codec="nvfp4_delta", bank=bank, clusters=[cycle % 4])
            tiers.fetch([RecordKey(Feature.HIDDEN, 0, 0, (cycle * 5) % min(12, cycle + 1))]).wait()
            if cycle == EARLY:
                tiers.synchronize()
                early = resident_bytes(), tiers.stats().pinned_actual, len(running() - before)
        tiers.synchronize()
        late = resident_bytes(), tiers.stats().pinned_actual, len(running() - before)
        assert early is not None
        assert late[0] - early[0] < (cycles - EARLY) * 512
        assert late[1:] == early[1:]
        stats = tiers.stats()
        assert sum(stats.stored.values()) == sum(stats.asked.values()) == cycles
        bank.release()
    assert not running() - before
    assert all(ledger.held(tier) == 0 for tier in Tier)
