"""Thousands of stores and reads leave memory, descriptors and threads where they were."""

import os
import threading
from pathlib import Path

import pytest
import torch
from long_cases import and_long

from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.tiers.record_bytes import RecordBytes, StoredCluster
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers

EARLY = 500  # cycles after which nothing may grow any more


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def running() -> set[object]:
    """Threads, and open descriptors with their targets."""
    links = [(path, os.path.realpath(path)) for path in Path("/proc/self/fd").iterdir()]
    return {*threading.enumerate(), *(link for link in links if link[0].is_symlink())}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of resident pages")
@pytest.mark.parametrize("cycles", and_long([1_500], [10_000]))
def test_nothing_grows(cycles: int):
    width, rows, clusters, codec = 48, 4, 12, Codec.NVFP4_DELTA
    needed = RecordBytes(
        tier=Tier.HOST,
        codec=codec,
        regions=1,
        rows=rows * clusters,
        row_bytes=codec.row_bytes(width, 4),
        clusters=clusters,
        centroid_bytes=4 * width,
        record_rows=5,
        slots=3,
    )
    every = [StoredCluster(0, number, slice(rows * number, rows * (number + 1))) for number in range(clusters)]
    ledger, before = Ledger(), running()
    values, centroid, out = torch.randn(rows, width), torch.randn(1, width), torch.empty(rows, width)
    with Tiers(ledger, device=torch.device("cpu")) as tiers:
        stored, early = StoredRows(tiers, needed, 1), None
        for cycle in range(cycles):
            stored.store(0, [every[cycle % clusters]], values, centroid)
            stored.send(0, [every[cycle * 7 % min(clusters, cycle + 1)]])
            stored.recall()
            stored.read(0, [every[cycle * 5 % min(clusters, cycle + 1)]], out, [slice(0, rows)])
            if cycle == EARLY:
                tiers.synchronize()
                early = resident_bytes(), tiers.stats().pinned_actual, len(running() - before)
        stats = tiers.ended()
        late = resident_bytes(), stats.pinned_actual, len(running() - before)
        assert early is not None
        assert late[0] - early[0] < (cycles - EARLY) * 512
        assert late[1:] == early[1:]
        assert sum(stats.stored.values()) == cycles * rows and stats.asked[Tier.HOST] > cycles
    assert not running() - before
    assert all(ledger.held(tier) == 0 for tier in Tier)
