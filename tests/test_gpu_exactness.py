"""The exactness part of a GPU day: its laws hold on a CPU, and a broken law is found with its first difference."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulation import Point

from tiered.offload.thread_transport import LaneTransport
from tiered.offload.transport import Copy, Lane, Transport
from tiered.policies.base import StepKind

BENCH = Path(__file__).resolve().parents[1] / "bench"
OTHERS = {"prefill": 0, "commit": 0}  # forwards of models whose rows see blocks
FIGURES = {"a padded batch, each alone", "all renewed, none, bfloat16"}


def part(name: str) -> Any:
    return importlib.import_module(f"gpu_parts.{name}")


@pytest.fixture
def exactness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCH)
    exactness = part("exactness")
    monkeypatch.setattr(exactness, "LAYERS", 3)
    yield exactness
    for cached in (exactness._delta, exactness._raw):
        cached.cache_clear()


@pytest.fixture
def setting(exactness: Any) -> Any:
    return part("setting").Setting(device="cpu", tiny=True, seed=0)


def test_all_cases(exactness: Any, setting: Any):
    rows = {case: exactness.measure(setting, case) for case in exactness.cases(setting)}
    json.dumps(rows, allow_nan=False)
    for case, row in rows.items():
        assert ("ok" in row and row["ok"] and "why" not in row) or case in FIGURES, (case, row)
        if "passes" in row:
            assert row["passes"] == {"refresh": 2, "update": 2, "step": 4, **OTHERS}, case
    assert rows["all renewed, none, float32"]["equal_tokens_share"] == 1.0
    assert max(rows["a padded batch, each alone"]["relative_logits"]) < 1e-5


@pytest.mark.parametrize(
    ("case", "before"),
    [
        ("raw, offloaded, resident", None),
        ("delta, offloaded, resident", None),
        ("copies on time, late", "_delta"),
    ],
)
def test_wrong_bytes_are_found(
    exactness: Any, setting: Any, case: str, before: str | None, monkeypatch: pytest.MonkeyPatch
):
    whole = LaneTransport._move
    if before is not None:  # of two calls that both fetch, one is right
        getattr(exactness, before)(setting)

    def damaged(self: LaneTransport, lane: Lane, pieces: tuple[Copy, ...]) -> int:
        moved = whole(self, lane, pieces)
        if lane is Lane.FETCH:
            pieces[0].destination[:16] ^= 0x40
        return moved

    monkeypatch.setattr(LaneTransport, "_move", damaged)
    row = exactness.measure(setting, case)
    assert row["ok"] is False
    assert " after forward " in row["why"] and "(update)" in row["why"] and " elements, by up to " in row["why"]


def test_a_control_that_finds_nothing_is_reported(exactness: Any, setting: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exactness, "Damaging", part("slow_transports").Synchronous)
    row = exactness.measure(setting, exactness.CONTROL)
    assert row == {"seen": None, "ok": False, "why": "stored rows were damaged, and nothing came of it"}


def test_a_call_that_never_fetched_holds_no_law(exactness: Any, setting: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        exactness._LAWS, "idle", (lambda _: exactness._call(setting, exactness.make_policy("none")),) * 2
    )
    assert exactness.measure(setting, "idle") == {
        "passes": {"refresh": 8, "update": 0, "step": 0, **OTHERS},
        "ok": False,
        "why": "nothing was fetched",
    }


def left(exactness: Any) -> Any:
    made = exactness.Left()
    made.kinds = [StepKind.REFRESH, StepKind.STEP]
    made.stores = [torch.randn(4, 1, 2, 5, 3, generator=torch.Generator().manual_seed(number)) for number in (0, 1)]
    made.logits = [torch.randn(1, 2, 7, generator=torch.Generator().manual_seed(number)) for number in (2, 3)]
    made.out = type("Out", (), {"sequences": torch.arange(6)[None]})()
    return made


def test_the_first_difference_is_named(exactness: Any):
    one, other = left(exactness), left(exactness)
    assert one.difference(other) is None
    other.out.sequences[0, 3] = 0
    assert one.difference(other) == "tokens, of the same logits"
    other.logits[1][0, 0, 0] += 2
    assert one.difference(other) == "logits of forward 1 (step): 1 of 14 elements, by up to 2"
    other.stores[1][3, 0, 1, 4, 2] = torch.nan
    assert one.difference(other) == "value of layer 1 after forward 1 (step): 1 of 30 elements, by up to nan"
    other.stores[0][2] *= -1
    assert (one.difference(other) or "").startswith("key of layer 1 after forward 0 (refresh): 30 of 30 elements")
    other.kinds[1] = StepKind.UPDATE
    assert one.difference(other) == "forwards were 1 refresh, 1 step here, 1 refresh, 1 update there"


def test_bits_count_and_not_values(exactness: Any):
    one, other = left(exactness), left(exactness)
    one.logits[0][0, 0, 0], other.logits[0][0, 0, 0] = 0.0, -0.0
    assert one.difference(other) == "logits of forward 0 (refresh): 1 of 14 elements, by up to 0"
    one.logits[0][0, 0, 0] = other.logits[0][0, 0, 0] = torch.nan
    assert one.difference(other) is None


def test_slow_transports_carry_the_same(exactness: Any):
    slow = part("slow_transports")
    cpu = torch.device("cpu")
    for made in (slow.transport(cpu, delay=slow.random_delays(cpu, 1)), slow.Synchronous(slow.transport(cpu))):
        assert isinstance(made, Transport)
        source, destination = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        event = made.copy(Lane.FETCH, [Copy(source, destination)])
        assert not isinstance(made, slow.Synchronous) or event.done()
        event.synchronize()
        assert torch.equal(source, destination)
        with pytest.raises(ValueError, match="cannot run on lane"):
            made.run(Lane.FETCH, lambda: 0)
        made.close()


def test_delays_come_and_go(exactness: Any):
    delay = part("slow_transports").random_delays(torch.device("cpu"), 0)
    seconds = [delay(Point.COPY, Lane.FETCH) for _ in range(200)]
    assert 0 < sum(each > 0 for each in seconds) < 120 and max(seconds) < 0.01


def test_on_a_device_copies_wait_on_their_own_streams(exactness: Any, monkeypatch: pytest.MonkeyPatch):
    slow, cuda = part("slow_transports"), torch.device("cuda")
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    delay = slow.random_delays(cuda, 0)
    for _ in range(50):
        delay(Point.SUBMIT, Lane.FETCH)
        delay(Point.COPY, Lane.LOAD)  # of the disk: no stream is its own
    assert not slept
    for _ in range(50):
        delay(Point.COPY, Lane.FETCH)
    assert 5 < len(slept) < 30 and all(isinstance(cycles, int) and 0 <= cycles <= 2_000_000 for cycles in slept)
    monkeypatch.setattr(slow, "SimulatedCuda", lambda device, **given: (device, given))
    assert slow.transport(cuda, delay=delay) == (cuda, {"delay": delay})
