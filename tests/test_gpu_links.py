"""Copies and fetches as parts of a GPU day: the bytes that are counted move, and a wrong one is found."""

import importlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from measuring import device_timer
from measuring.device_timer import device_times, stand_still

from tiered.offload.codec_bytes import Codec
from tiered.offload.thread_transport import LaneTransport
from tiered.tiers.stored_rows import StoredRows

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
KIB = 1 << 10


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return lambda name: importlib.import_module(f"gpu_parts.{name}")


@pytest.fixture
def setting(module: Callable[[str], ModuleType]) -> Any:
    return module("setting").Setting(device="cpu", tiny=True, seed=5)


@pytest.fixture(autouse=True)
def nothing_cached(module: Callable[[str], ModuleType]) -> Iterator[None]:
    """Clears the caches of each part after a test."""
    yield
    for name, keepers in {
        "copies": ("_host_memory", "_device_memory"),
        "fetches": ("_memory", "_peak_times"),
        "moved_bytes": ("copy_bandwidth",),
    }.items():
        for keeper in keepers:
            getattr(module(name), keeper).cache_clear()


# --- time


def test_times_are_of_the_rounds_alone():
    calls: list[float] = []

    def work() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.2 if len(calls) <= 2 else 0.01)

    times = device_times(work, CPU, rounds=3, warm_up=2)
    assert len(calls) == 5 and len(times) == 3
    assert all(0.01 <= seconds < 0.15 for seconds in times)


@pytest.mark.parametrize(("rounds", "warm_up"), [(0, 1), (-1, 0), (1, -1)])
def test_rounds_that_make_no_sense(rounds: int, warm_up: int):
    with pytest.raises(ValueError, match=f"rounds = {rounds} must be 1 or more, warm_up = {warm_up}"):
        device_times(lambda: None, CPU, rounds=rounds, warm_up=warm_up)


def test_a_cpu_that_stands_still_sleeps():
    begin = time.perf_counter()
    stand_still(CPU, 0.05)
    assert time.perf_counter() - begin >= 0.05


@pytest.mark.parametrize("hold", [False, True])
def test_on_cuda_events_are_round_the_work(hold: bool, monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            log.append(f"mark {stream}")
            self.at = len(log)

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: "Event") -> float:
            return 2.0 * (other.at - self.at)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("idle"))
    monkeypatch.setattr(device_timer, "stand_still", lambda device, seconds: log.append("hold"))
    times = device_times(lambda: log.append("work"), torch.device("cuda"), rounds=2, hold=hold)
    one = ["idle", *["hold"][: int(hold)], "mark of cuda", "work", "mark of cuda", "wait"]
    assert log == ["work", *one, *one]
    assert times == [0.004, 0.004]


def test_speeds(module: Callable[[str], ModuleType]):
    speeds = module("moved_bytes").speeds
    assert speeds(3_000_000_000, [1.0, 1.5, 2.0, 3.0, 6.0]) == pytest.approx(
        {"gb_per_s": 1.5, "gb_per_s_p20": 0.9, "gb_per_s_p80": 2.2, "noise_share": (3.0 - 1.25) / 2.0}
    )
    assert speeds(10**9, [0.5]) == {"gb_per_s": 2.0, "gb_per_s_p20": 2.0, "gb_per_s_p80": 2.0, "noise_share": 0.0}


@pytest.mark.parametrize("place", [0, 7, 99])
def test_one_wrong_byte_is_a_difference(module: Callable[[str], ModuleType], place: int):
    difference = module("moved_bytes").difference
    wanted = torch.arange(100, dtype=torch.uint8)
    found = wanted.clone()
    assert difference(found, wanted) is None
    found[place] ^= 1
    assert difference(found, wanted) == f"1 of 100 bytes are wrong, the first at {place}"


def test_bytes_are_random(module: Callable[[str], ModuleType]):
    fill = module("moved_bytes").fill_at_random
    one, two = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1 << 16, dtype=torch.uint8)
    fill(one, 1)
    fill(two, 2)
    assert (one != two).float().mean() > 0.99
    assert torch.bincount(one.int(), minlength=256).min() > 150  # 256 each
    fill(two, 1)
    assert torch.equal(one, two)


def test_bandwidth_counts_both_sides(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch):
    bandwidth = module("moved_bytes")
    monkeypatch.setattr(bandwidth, "device_times", lambda *_, **__: [0.5, 0.25, 1.0])
    assert bandwidth.copy_bandwidth(CPU, True) == 2 * (1 << 20) / 0.25


# --- copies


def test_every_copy_has_a_row(module: Callable[[str], ModuleType], setting: Any):
    copies = module("copies")
    rows = {case: copies.measure(setting, case) for case in copies.cases(setting)}
    assert len(rows) == 10 and json.dumps(rows, allow_nan=False)
    ran = {case: row for case, row in rows.items() if "status" not in row}
    assert list(ran) == ["pageable to device", "pageable to host", "pageable both ways", "device to device"]
    assert all("does not work for device cpu" in row["why"] for case, row in rows.items() if case not in ran)
    assert all(row["ok"] is True and row["gb_per_s"] > 0 for row in ran.values())
    mib = 1 << 20
    assert [row["bytes"] for row in ran.values()] == [mib, mib, 2 * mib, 2 * mib]
    assert rows["pageable both ways"]["medium_bytes"] == 2 * mib // 16


@pytest.mark.parametrize("direction", ["to device", "to host", "both ways"])
@pytest.mark.parametrize("fault", ["the last moves nothing", "one byte is wrong"])
def test_a_wrong_copy_is_found(
    module: Callable[[str], ModuleType], setting: Any, monkeypatch: pytest.MonkeyPatch, direction: str, fault: str
):
    copies, calls = module("copies"), itertools.count(1)
    right = copies.copy_all

    def wrong(pairs: Any, device: torch.device) -> None:
        # One to warm up, those that are timed, and then the one that is checked.
        if fault == "one byte is wrong" or next(calls) % (copies.ROUNDS + 2):
            right(pairs, device)
        if fault == "one byte is wrong":
            pairs[-1][0][4321] ^= 4

    monkeypatch.setattr(copies, "copy_all", wrong)
    row = copies.measure(setting, f"pageable {direction}")
    assert row["ok"] is False and "bytes are wrong" in row["why"]


def test_both_ways_at_once_touch_no_byte_twice(module: Callable[[str], ModuleType]):
    pairs = module("copies")._pairs
    host, device = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    for value, side in enumerate(side for pair in pairs("both ways", host, device) for side in pair):
        side += value + 1
    assert sorted(torch.cat([host, device]).unique().tolist()) == [1, 2, 3, 4]
    assert all(len(side) == 32 for pair in pairs("both ways", host, device) for side in pair)


def test_on_cuda_both_ways_are_between_two_waits(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch):
    copies, log = module("copies"), []
    on = ["current"]

    class Stream:
        def __init__(self, device: torch.device, name: str = "") -> None:
            self.name = name or f"side {len(made)}"
            made.append(self)

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

    class Side:
        def copy_(self, source: str, non_blocking: bool) -> None:
            log.append(f"{source} on {on[-1]}" + ("" if non_blocking else ", blocking"))

    @contextmanager
    def stream(side: Stream) -> Iterator[None]:
        on.append(side.name)
        yield
        on.pop()

    made: list[Stream] = []
    current = Stream(torch.device("cuda"), "current")
    for name, fake in {"Stream": Stream, "stream": stream, "current_stream": lambda device: current}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    copies._streams.cache_clear()
    try:
        copies.copy_all([(Side(), "down"), (Side(), "up")], torch.device("cuda"))
        copies.copy_all([(Side(), "alone")], torch.device("cuda"))
    finally:
        copies._streams.cache_clear()
    assert log == [
        *("side 1 waits for current", "down on side 1"),
        *("side 2 waits for current", "up on side 2"),
        *("current waits for side 1", "current waits for side 2"),
        "alone on current",
    ]


# --- fetches


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("size", [4 * KIB, 144 * KIB])
def test_records_are_scattered(module: Callable[[str], ModuleType], size: int, run: int):
    fetches, total = module("fetches"), 1 << 20
    windows = [fetches.segments(size, window, total, run) for window in range(8)]
    for records in windows:
        assert len(records) == total // size
        assert [record.destination for record in records] == [size * number for number in range(len(records))]
        gaps = [after.source - before.source - size for before, after in itertools.pairwise(records)]
        assert [gap == 0 for gap in gaps] == [number % run != 0 for number in range(1, len(records))]
    taken = sorted((record.source, record.source + size) for records in windows for record in records)
    assert taken[0][0] >= 0 and taken[-1][1] <= 16 * total
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken)), "no byte is fetched twice"


def test_every_fetch_has_a_row(module: Callable[[str], ModuleType], setting: Any):
    fetches = module("fetches")
    rows = {case: fetches.measure(setting, case) for case in fetches.cases(setting)}
    assert len(rows) == 1 + 12 + 2 and json.dumps(rows, allow_nan=False)
    assert rows["copy peak"]["pinner"] == "pageable"
    peak = fetches.peak(setting) / 1e9
    for case, row in list(rows.items())[1:]:
        assert row["ok"] is True, case
        assert row["over_peak"] == pytest.approx(row["gb_per_s"] / peak) and row["peak_gb_per_s"] == peak
    for size in (4, 16, 64, 144, 256, 1024):
        assert rows[f"{size} KiB scattered"]["record_bytes"] == size * KIB
        count = 1024 // size
        assert rows[f"{size} KiB scattered"]["copies"] == count
        assert rows[f"{size} KiB merged"]["copies"] == math.ceil(count / 4)


@pytest.mark.parametrize("case", ["4 KiB scattered", "144 KiB merged", "1024 KiB scattered", "delta fetch 2 clusters"])
def test_a_wrong_fetch_is_found(
    module: Callable[[str], ModuleType], setting: Any, monkeypatch: pytest.MonkeyPatch, case: str
):
    move = LaneTransport._move

    def wrong(transport: LaneTransport, lane: Any, pieces: Any) -> int:
        nbytes = move(transport, lane, pieces)
        if lane.value == "fetch":
            pieces[-1].destination[0] ^= 255
        return nbytes

    monkeypatch.setattr(LaneTransport, "_move", wrong)
    row = module("fetches").measure(setting, case)
    assert row["ok"] is False and ("bytes are wrong" in row["why"] or "rows are not" in row["why"])


def test_a_fetch_that_writes_nothing_is_found(
    module: Callable[[str], ModuleType], setting: Any, monkeypatch: pytest.MonkeyPatch
):
    fetches, calls, read = module("fetches"), itertools.count(1), StoredRows.read

    def fetch(stored: StoredRows, layer: int, clusters: Any, out: Any, places: Any) -> None:
        # The one that is checked comes after one to warm up and those that are timed.
        if next(calls) < fetches.ROUNDS + 2:
            read(stored, layer, clusters, out, places)

    monkeypatch.setattr(StoredRows, "read", fetch)
    row = fetches.tier_fetch(setting, 6, peak=1e9)
    assert row["ok"] is False and row["why"] == "24 of 24 rows are not the encoded ones"
    assert json.dumps(row, allow_nan=False)


def test_a_fetch_of_stored_rows_is_counted_by_its_bytes(module: Callable[[str], ModuleType], setting: Any):
    row = module("fetches").tier_fetch(setting, 6, peak=2e9)
    assert row["bytes"] == 6 * 4 * Codec.NVFP4_DELTA.row_bytes(128, 2)
    assert row["floor_us"] == pytest.approx(row["bytes"] / 2e3)
    assert row["over_peak"] == pytest.approx(row["floor_us"] / row["fetch_us"])
    assert 0 < row["error"] < 0.1
