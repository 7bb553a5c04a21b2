"""`compute-sanitizer` as a part of a GPU day: the output of the tool and of its program becomes the right row."""

import importlib
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import residency_fuzz as fuzz
import torch
from simulation import Point

from tiered.offload.codec_bytes import Codec
from tiered.offload.thread_transport import LaneTransport
from tiered.offload.transport import Lane

ROOT = Path(__file__).resolve().parents[1]
RAN = {"ran": ["one", "two"], "wrong": []}
# The tool prints a part of its output before the program runs, and the rest after its end.
TOOL = """#!/usr/bin/env python3
import json, os, subprocess, sys
script = json.loads(os.environ["FAKE_TOOL"])
with open(script["log"], "w") as log:
    json.dump(sys.argv[1:], log)
print("========= COMPUTE-SANITIZER")
print(script["before"], flush=True)
status = 0
if script["runs"]:
    status = subprocess.run(sys.argv[sys.argv.index(sys.executable):]).returncode
    if status:
        print("========= Target application returned an error")
print(script["after"], flush=True)
sys.exit(status or script["status"])
"""
PROGRAM = """
import os, sys, time
print("making ready", os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"), flush=True)
time.sleep({sleeps})
print({says!r}, flush=True)
sys.exit({status})
"""
OUT_OF_BOUNDS = """========= Invalid __global__ read of size 4 bytes
=========     at _decode_rows+0x1b0 in decode_rows.py:61
=========     by thread (31,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x331bda] in libcuda.so.1
========= """
RACE = """========= Error: Race reported between Write access at _sum+0x2a0 in full_drift.py:14
=========     and Read access at _sum+0xd30 in full_drift.py:21 [508 hazards]
========="""
WARNING = RACE.replace("Error: ", "Warning: ")
REFUSAL = '========= Error: Device not supported. Please refer to the "Supported Devices" section of the documentation'


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("gpu_parts.sanitizer")


@pytest.fixture
def sanitized(part: ModuleType) -> ModuleType:
    return importlib.import_module("gpu_parts.sanitized")


def setting(device: str = "cpu") -> Any:
    return importlib.import_module("gpu_parts.setting").Setting(device=device, tiny=True, seed=5)


class Fake:
    """A tool on the PATH and a program, with output that a test sets."""

    def __init__(self, part: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._part, self._monkeypatch, self._folder = part, monkeypatch, folder
        tool = folder / "compute-sanitizer"
        tool.write_text(TOOL.replace("/usr/bin/env python3", sys.executable))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    def run(
        self,
        tool: str | None = "memcheck",
        *,
        before: str = "",
        after: str = "========= ERROR SUMMARY: 0 errors",
        status: int = 0,
        runs: bool = True,
        says: str = "sanitized: " + json.dumps(RAN),
        program_status: int = 0,
        sleeps: float = 0.0,
        limit: float = 30.0,
        what: str = "kernels",
    ) -> dict[str, Any]:
        program = self._folder / "program.py"
        program.write_text(PROGRAM.format(says=says, status=program_status, sleeps=sleeps))
        script = {"before": before, "after": after, "status": status, "runs": runs, "log": str(self._folder / "log")}
        self._monkeypatch.setenv("FAKE_TOOL", json.dumps(script))
        self._monkeypatch.setattr(self._part, "PROGRAM", (sys.executable, str(program)))
        return self._part.run(setting(), tool, what, limit=limit)

    @property
    def called(self) -> list[str]:
        return json.loads((self._folder / "log").read_text())


@pytest.fixture
def fake(part: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    return Fake(part, monkeypatch, tmp_path)


def test_a_clean_run(fake: Fake):
    row = fake.run()
    assert row.pop("run_s") > 0
    assert row == {"ok": True, "errors": 0, "warnings": 0, "found": [], "ran": ["one", "two"]}
    options, program = fake.called[:10], fake.called[10:]
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--tool": "memcheck",
        "--error-exitcode": "99",
        "--report-api-errors": "no",
        "--target-processes": "application-only",
        "--print-limit": "20",
    }
    assert program[0] == sys.executable and program[2:6] == ["kernels", "--device", "cpu", "--seed"]


SUMMARY = "========= ERROR SUMMARY: {} errors"
RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)"
FOUND = {
    "out of bounds": ({"before": OUT_OF_BOUNDS, "after": SUMMARY.format(1), "status": 99}, 1, "_decode_rows+0x1b0"),
    "one error": ({"before": OUT_OF_BOUNDS, "after": "========= ERROR SUMMARY: 1 error", "status": 99}, 1, "block (0"),
    "more than printed": (
        {
            "before": OUT_OF_BOUNDS,
            "after": SUMMARY.format(128) + "\n" + SUMMARY.format(28) + " were not printed. Use --print-limit",
            "status": 99,
        },
        128,
        "of size 4",
    ),
    "the program dies of it": (
        {"before": OUT_OF_BOUNDS, "after": SUMMARY.format(1), "says": "CUDA error", "program_status": 1},
        1,
        "of size 4",
    ),
    "told before it hung": ({"before": OUT_OF_BOUNDS, "sleeps": 5, "limit": 0.5}, 1, "of size 4"),
    "a race": (
        {"tool": "racecheck", "before": f"{RACE}\n{WARNING}", "after": RACES.format(2, 1, 1), "status": 99},
        1,
        "508 hazards",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_findings_of_the_tool_are_errors(fake: Fake, part: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(part, "_GRACE", 0.5)
    said, errors, detail = FOUND[name]
    row = fake.run(**said)
    assert row["ok"] is False and row["errors"] == errors and str(errors) in row["why"]
    assert detail in json.dumps(row["found"]) and "Host Frame" not in json.dumps(row["found"])
    assert len(row["found"]) == (2 if name == "a race" else 1)


PLANTED = {
    "found": ({"before": OUT_OF_BOUNDS, "after": SUMMARY.format(1), "says": "CUDA error", "program_status": 1}, True),
    "not found": ({}, False),
    "found elsewhere": (
        {"before": OUT_OF_BOUNDS.replace("_decode", "cub"), "after": SUMMARY.format(1), "status": 99},
        False,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_has_to_be_found(fake: Fake, name: str):
    said, ok = PLANTED[name]
    row = fake.run(what="planted", **said)
    assert row["ok"] is ok and ("why" in row) is not ok
    assert "--kernel-regex" in fake.called


def test_a_refused_tool_gives_no_verdict_on_a_planted_error(fake: Fake):
    row = fake.run(what="planted", before=REFUSAL, says="CUDA error", program_status=1)
    assert "Device not supported" in row["why"] and "ok" not in row


@pytest.mark.parametrize(("tool", "filtered"), [("memcheck", False), ("racecheck", True), ("initcheck", False)])
def test_kernels_of_ours_alone_are_raced(fake: Fake, tool: str, filtered: bool):
    fake.run(tool)
    options = fake.called[: fake.called.index(sys.executable)]
    assert ("--kernel-regex" in options) is filtered
    if filtered:
        pattern = options[options.index("--kernel-regex") + 1].removeprefix("kns=")
        folder = ROOT / "kernels"
        ours = re.findall(r"\blaunch\((\w+), ", "".join(path.read_text() for path in folder.glob("*.py")))
        assert len(ours) >= 12 and all(re.match(pattern, name) for name in ours)
        assert not any(re.match(pattern, name) for name in ("_ZN2at6native29vectorized", "void at::native::reduce"))


def test_a_remark_beside_a_verdict_is_no_refusal(fake: Fake):
    assert fake.run(before="========= Warning: clusters are not supported by this tool")["ok"] is True


def test_a_hazard_that_is_a_warning_is_shown(fake: Fake):
    row = fake.run("racecheck", before=WARNING, after=RACES.format(1, 0, 1))
    assert row["ok"] is True and row["warnings"] == 1 and "508 hazards" in row["found"][0][1]


NO_VERDICT = {
    "the device is refused": (
        {"before": REFUSAL, "says": "CUDA error: unknown error", "program_status": 1},
        "Device not supported",
    ),
    "an option is not known": (
        {"before": "========= Error: unrecognised option '--print-limit'", "runs": False, "after": ""},
        "unrecognised option",
    ),
    "it hangs": ({"sleeps": 5, "limit": 0.5}, "no verdict in 0 s"),
    "it ends itself in time": (
        {"says": "Timeout (0:00:30)!\nThread 0x1 (most recent call first):", "program_status": 1},
        "no verdict in 30 s",
    ),
}


@pytest.mark.parametrize("name", NO_VERDICT)
def test_without_a_verdict_it_is_skipped(fake: Fake, part: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(part, "_GRACE", 0.5)
    said, why = NO_VERDICT[name]
    row = fake.run(**said)
    assert why in row["why"] and "ok" not in row


FAILED = {
    "the program crashes": (
        {"says": "ValueError: bad", "program_status": 1},
        "making ready 1 | ValueError: bad",
    ),
    "the program is killed": ({"says": "", "program_status": -9}, "status"),
    "nothing ran": ({"runs": False}, "it said nothing"),  # seen with tools that do not fit the driver
    "no summary": ({"after": ""}, "no summary"),
    "an error that is not summed up": ({"status": 99}, "exit status 99"),
    "a bare crash": ({"tool": None, "says": "ValueError: bad", "program_status": 1}, "ready None | ValueError"),
    "a bare hang": ({"tool": None, "sleeps": 5, "limit": 0.5}, "did not end in"),
    "it says that it is done and crashes": ({"tool": None, "program_status": 3}, "exit status 3"),
}


@pytest.mark.parametrize("name", FAILED)
def test_output_without_a_verdict_fails(fake: Fake, part: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(part, "_GRACE", 0.5)
    said, why = FAILED[name]
    with pytest.raises(RuntimeError, match=why.replace("|", r"\|")):
        fake.run(**said)


@pytest.mark.parametrize("tool", ["memcheck", None])
def test_wrong_answers_are_wrong_whatever_the_tool_says(fake: Fake, tool: str | None):
    says = "sanitized: " + json.dumps({"ran": [], "wrong": ["schedule 7: 2 wrong answers"]})
    row = fake.run(tool, says=says, program_status=1)
    assert row["ok"] is False and row["why"] == "schedule 7: 2 wrong answers"


def test_cases(part: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert part.cases(setting())[:2] == ["bare kernels", "bare transports"]
    assert part.cases(setting())[2:] == [
        "racecheck kernels",
        "racecheck transports",
        "memcheck kernels",
        "memcheck transports",
        "memcheck planted",
        "initcheck kernels",
    ]
    assert part.measure(setting(), "memcheck kernels") == {"status": "skipped", "why": "needs a CUDA device"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert part.measure(setting("cuda"), "racecheck kernels")["why"] == "compute-sanitizer is not on the PATH"


def test_runs_go_side_by_side_and_fail_alone(part: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "compute-sanitizer").write_text("")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked, running, together = [], [], []

    def run(setting: Any, tool: str, what: str, *, limit: float) -> dict[str, Any]:
        asked.append((tool, what, limit))
        running.append(what)
        time.sleep(0.02)
        together.append(len(running))
        running.pop()
        if tool == "racecheck":
            raise RuntimeError("crash")
        return {"ok": True, "of": f"{tool} {what}"}

    monkeypatch.setattr(part, "run", run)
    part._begun.cache_clear()
    there = setting("cuda")
    assert part.measure(there, "memcheck transports") == {"ok": True, "of": "memcheck transports"}
    with pytest.raises(RuntimeError, match="crash"):
        part.measure(there, "racecheck kernels")
    assert part.measure(there, "initcheck kernels")["ok"]
    assert 1 < max(together) <= part.AT_ONCE
    assert len(asked) == len(set(asked)) == 6 and {limit for *_, limit in asked} == {part.LIMIT}
    part._begun.cache_clear()


# --- the program


class OneWrongByte:
    """One byte of a lane arrives wrong, once."""

    left: ClassVar[int] = 0

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def move(self, transport: LaneTransport, lane: Lane, pieces: Any) -> int:
        nbytes = MOVE(transport, lane, pieces)
        if lane is self.lane and not self.left:
            type(self).left = 1
            pieces[-1].destination[0] ^= 255
        return nbytes


MOVE = LaneTransport._move


@pytest.fixture
def one_wrong_byte(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    OneWrongByte.left = 0
    fault = OneWrongByte(request.param)
    monkeypatch.setattr(LaneTransport, "_move", lambda self, lane, pieces: fault.move(self, lane, pieces))
    yield
    assert OneWrongByte.left == 1, "the fault happened"


CPU = torch.device("cpu")


def test_transports_are_right(sanitized: ModuleType):
    ran = sanitized.run_transports(CPU, 3, schedules=2, end=0.0)
    assert ran["ran"] == ["copies", *(f"tiers {codec}" for codec in Codec)]
    assert ran["wrong"] == [] and ran["schedules"] == 1 and ran["answers"] > 0


@pytest.mark.parametrize("one_wrong_byte", [Lane.FETCH, Lane.STORE], indirect=True)
def test_a_wrong_copy_is_found(sanitized: ModuleType, one_wrong_byte: None):
    assert not sanitized.copies_are_right(CPU, 3)


@pytest.mark.parametrize("one_wrong_byte", [Lane.FETCH, Lane.STORE], indirect=True)
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.NVFP4_DELTA])
def test_a_wrong_record_is_found(sanitized: ModuleType, one_wrong_byte: None, codec: Codec):
    assert not sanitized.tiers_are_right(CPU, 3, codec)


@pytest.mark.parametrize("one_wrong_byte", [Lane.FETCH], indirect=True)
def test_a_wrong_byte_is_reported(sanitized: ModuleType, one_wrong_byte: None):
    assert sanitized.run_transports(CPU, 3, schedules=0, end=0.0)["wrong"] == ["copies: bytes differ"]


def test_a_wrong_schedule_is_found(sanitized: ModuleType, monkeypatch: pytest.MonkeyPatch):
    outcome = fuzz.Outcome(answers=3, wrong=1, errors=["lost"])
    monkeypatch.setattr(sanitized, "SCHEDULES", [lambda seed, device: outcome])
    ran = sanitized.run_transports(CPU, 11, schedules=2, end=float("inf"))
    assert ran["wrong"] == [f"schedule {seed}: 1 wrong answers; lost" for seed in (11, 12)] and ran["answers"] == 6


def test_on_cuda_half_of_the_delays_hold_up_a_stream(monkeypatch: pytest.MonkeyPatch):
    schedule, held = object.__new__(fuzz.Delays), []
    lanes: list[object] = [*Lane, None]
    schedule.noise, schedule.slowest = random.Random(1), dict.fromkeys(lanes, 1e-3)
    monkeypatch.setattr(fuzz, "stand_still", lambda device, seconds: held.append((device.type, seconds)))
    places = list(itertools.product(Point, (*Lane, None)))
    for device, on_stream in (
        ("cpu", []),
        ("cuda", [(Point.SUBMIT, None), (Point.COPY, Lane.FETCH), (Point.COPY, Lane.STORE)]),
    ):
        schedule.device = torch.device(device)
        for place in places:
            held.clear()
            host = [seconds for _ in range(400) if (seconds := schedule.delay(*place))]
            assert all(where == device and 0 < seconds < 1e-3 for where, seconds in held), place
            assert 150 < len(host) + len(held) < 250, "every second one is held up at all"
            assert (60 < len(held) < 140) if place in on_stream else not held, place


@pytest.mark.parametrize("wrong", [[], ["a"]])
def test_the_exit_status_counts_wrong_results(
    sanitized: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: list[str]
):
    monkeypatch.setattr(sanitized, "run_kernels", lambda device: {"ran": [str(device)], "wrong": wrong})
    monkeypatch.setattr(sanitized.faulthandler, "dump_traceback_later", lambda seconds, exit: None)
    assert sanitized.main(["kernels", "--device", "cpu"]) == len(wrong)
    assert capsys.readouterr().out == f'sanitized: {{"ran": ["cpu"], "wrong": {json.dumps(wrong)}}}\n'


def test_kernels_run_once_each(sanitized: ModuleType, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(sanitized, "small_cases", lambda: {"one": 1, "two": 2})
    monkeypatch.setattr(sanitized, "run_once", lambda case, device: ran.append((case, device)))
    assert sanitized.run_kernels(CPU) == {"ran": ["one", "two"], "wrong": []} and ran == [(1, CPU), (2, CPU)]
    monkeypatch.setattr(sanitized, "small_cases", dict)
    assert sanitized.run_kernels(CPU)["wrong"]


def test_a_planted_index_is_refused_on_a_cpu(sanitized: ModuleType):
    with pytest.raises(IndexError, match="out of range"):
        sanitized.run_planted(CPU)


def test_it_ends_at_its_limit_with_a_traceback(part: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'bench'}:{ROOT}")
    asked = ["transports", "--device", "cpu", "--schedules", "1000", "--seconds", "1000", "--limit", "1"]
    ended = subprocess.run([*part.PROGRAM, *asked], capture_output=True, text=True, timeout=100)
    assert ended.returncode and "Timeout (" in ended.stderr and "most recent call first" in ended.stderr
    assert part.LATE.search(ended.stderr)
