"""`bench/gpu_day.py` as a user runs it: what becomes of parts that crash, hang or lie, of its time and of its file.

A quick worker stands in for the processes that measure, but for the last tests.
"""

import errno
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
BENCH = TESTS.parent / "bench"
Plan = Mapping[str, Mapping[str, str] | float]


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)


@pytest.fixture
def day() -> ModuleType:
    return importlib.import_module("gpu_day")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Path]:
    """The folder that notes every process that the worker starts. None may be left when the test is over."""
    folder = tmp_path / "processes"
    folder.mkdir()
    yield folder
    left = alive(folder)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


def alive(folder: Path) -> list[int]:
    """Processes of `folder` that have not ended; one that nobody has asked about yet has."""

    def runs(process: str) -> bool:
        try:
            return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [int(path.name) for path in folder.iterdir() if runs(path.name)]


@pytest.fixture
def worker(tmp_path: Path, processes: Path) -> Callable[[Plan], list[str]]:
    """The command of a worker that follows a plan."""
    numbers = count()

    def command(plan: Plan) -> list[str]:
        file = tmp_path / f"plan-{next(numbers)}.json"
        file.write_text(json.dumps(plan))
        return [sys.executable, "-S", "-I", str(TESTS / "gpu_day_worker.py"), str(file), str(processes)]

    return command


@pytest.fixture
def part_rows(worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Runs one part with these cases: its rows without their times, the log, the processes, the seconds."""
    from gpu_parts import runner
    from gpu_parts.part import Part
    from gpu_parts.setting import Setting

    monkeypatch.setattr(runner, "SHORTEST", 0.05)
    setting = Setting(device="cpu", tiny=True, seed=0, folder=str(tmp_path))

    def once(
        cases: Mapping[str, str], *, limit: float = 20.0, case_seconds: float = 10.0, again: float = 0.0, **options: Any
    ) -> SimpleNamespace:
        part = Part(name="kernels", seconds=1, case_seconds=case_seconds, what="")
        began = time.monotonic()
        with (tmp_path / "log").open("w+b", buffering=0) as log:
            command = worker({"kernels": cases, "again": again})
            found = list(runner.run_part(part, setting, limit=limit, log=log, command=command, **options))
        rows = [(case, {name: value for name, value in row.items() if name != "took_s"}) for case, row in found]
        started = {row.pop("process") for _, row in rows if "process" in row}
        took = {case: row["took_s"] for case, row in found if "took_s" in row}
        assert len(dict(rows)) == len(rows), "a case has two rows"
        text = (tmp_path / "log").read_text(errors="replace")
        return SimpleNamespace(
            rows=dict(rows), took=took, started=len(started), log=text, seconds=time.monotonic() - began
        )

    return once


OK = {"ms": 1.0}
BAD = {"failed": "RuntimeError: no luck", "traceback": []}


@pytest.mark.parametrize(
    ("cases", "rows", "started"),
    [
        ({"a": "ok", "b": "ok"}, {"a": OK, "b": OK}, 1),
        # Another process goes on behind the crash.
        ({"a": "ok", "b": "segv", "c": "ok"}, {"a": OK, "b": {"failed": "killed by SIGSEGV"}, "c": OK}, 2),
        ({"a": "segv", "b": "segv"}, {case: {"failed": "killed by SIGSEGV"} for case in "ab"}, 0),
        ({"a": "exit 4", "b": "ok"}, {"a": {"failed": "exit status 4: out of luck"}, "b": OK}, 1),
        ({"a": "fail", "b": "ok"}, {"a": BAD, "b": OK}, 1),
        # It has a row already, and takes the device with it.
        ({"a": "ok", "b": "broken", "c": "ok"}, {"a": OK, "b": BAD, "c": OK}, 2),
        ({"a": "half", "b": "ok"}, {"a": {"failed": "exit status 5"}, "b": OK}, 1),
        ({"a": "garbage", "b": "ok"}, {"a": OK, "b": OK}, 1),
        ({"a": "exit 0", "b": "ok"}, {"a": {"failed": "exit status 0: out of luck"}, "b": OK}, 1),
        # Nothing was begun, so another process would do no better: but nobody takes it for measured.
        ({"a": "leave", "b": "ok"}, {case: {"failed": "exit status 0"} for case in "ab"}, 0),
        ({"a": "ok", "b": "leave"}, {"a": OK, "b": {"failed": "exit status 0"}}, 1),
        ({"": "import"}, {"": {"failed": "ModuleNotFoundError: no module"}}, 0),
        ({"": ""}, {"": {"failed": "exit status 1: out of luck"}}, 0),
        ({"": '{"cases": []}\n'}, {"": {"failed": "exit status 1: out of luck"}}, 0),
        ({"": '{"cases": [1]}\n{"cases": "ab"}\n'}, {"": {"failed": "exit status 1: out of luck"}}, 0),
    ],
    ids=lambda value: " ".join(map(str, value.values()))[:30] if isinstance(value, dict) else "",
)
def test_what_goes_wrong_costs_its_own_row(part_rows, cases: Mapping[str, str], rows: dict[str, Any], started: int):
    found = part_rows(cases)
    # A process that left of its own accord may be followed by one more, which says the same.
    assert found.rows == rows and found.started == started


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("hang", "no answer within 0.6 s"),
        ("flood", "no answer within 0.6 s"),
        ("flood lines", "no answer within 0.6 s"),
        ("deaf", "no answer within 0.6 s"),
    ],
)
def test_what_never_ends_is_ended_with_all_that_it_started(part_rows, processes: Path, action: str, why: str):
    found = part_rows({"a": "ok", "b": action, "c": "ok"}, case_seconds=0.6)
    assert found.rows == {"a": OK, "b": {"failed": why}, "c": OK} and found.started == 2
    assert 0.6 <= found.took["b"] < 5 and len(list(processes.iterdir())) == (4 if action == "hang" else 2)
    assert alive(processes) == []


def test_a_process_that_does_not_begin_is_not_waited_for(part_rows, monkeypatch: pytest.MonkeyPatch):
    from gpu_parts import runner

    monkeypatch.setattr(runner, "STARTING", 0.5)
    found = part_rows({"": "hang"})
    assert found.rows == {"": {"failed": "no answer within 0.5 s"}} and found.seconds < 5


def test_a_process_that_goes_on_may_take_its_time_to_begin(part_rows):
    found = part_rows({"a": "segv", "b": "ok"}, case_seconds=0.5, again=1.0)
    assert found.rows == {"a": {"failed": "killed by SIGSEGV"}, "b": OK}


def test_time_that_runs_out_in_the_middle_skips_the_rest(part_rows):
    found = part_rows({"a": "ok", "b": "hang", "c": "ok", "d": "ok"}, limit=1.0)
    assert found.rows == {"a": OK} | {case: {"skipped": "no time left"} for case in "bcd"}
    assert "b" in found.took and "c" not in found.took and found.seconds < 4
    # None for a process at all.
    found = part_rows({"a": "ok"}, limit=0.0)
    assert found.rows == {"": {"skipped": "no time left"}} and found.log == ""


def test_a_wish_to_stop_ends_it_at_once(part_rows):
    began = time.monotonic()
    found = part_rows({"a": "ok", "b": "hang", "c": "ok"}, stop=lambda: time.monotonic() > began + 1)
    assert found.rows == {"a": OK} | {case: {"skipped": "ended by a signal"} for case in "bc"} and found.seconds < 4
    assert part_rows({"a": "ok"}, stop=lambda: True).rows == {"": {"skipped": "ended by a signal"}}


def test_what_is_no_row_is_in_the_log(part_rows):
    found = part_rows({"a": "garbage", "b": "half"})
    assert "not JSON" in found.log and found.log.count("not understood") == 5  # the NaN among them
    assert found.log.count("out of place") == 8 and "unheard of" in found.log


def test_the_process_is_killed_when_the_caller_has_enough(worker, processes: Path, tmp_path: Path):
    from gpu_parts.part import Part
    from gpu_parts.runner import run_part
    from gpu_parts.setting import Setting

    part = Part(name="kernels", seconds=1, case_seconds=10, what="")
    setting = Setting(device="cpu", tiny=True, seed=0, folder=str(tmp_path))
    command = worker({"kernels": {"a": "ok", "b": "hang"}})
    with (tmp_path / "log").open("w+b", buffering=0) as log:
        with closing(run_part(part, setting, limit=20, log=log, command=command)) as rows:
            assert next(rows)[0] == "a"
        assert alive(processes) == []


@pytest.fixture
def run(day: ModuleType, worker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    """A rehearsal with a plan and further arguments: exit status, last line, output, what the file holds, seconds."""
    from gpu_parts import runner

    monkeypatch.setattr(runner, "SHORTEST", 0.05)

    def once(plan: Plan, *arguments: str, out: Path = tmp_path / "out") -> SimpleNamespace:
        command = ["--rehearse", "--out", str(out), "--worker", shlex.join(worker(plan)), *arguments]
        began = time.monotonic()
        code = day.main(command)
        seconds, written = time.monotonic() - began, capsys.readouterr()
        last = json.loads(written.out.splitlines()[-1])
        file = TESTS.parent / last["file"]
        kept = json.loads(file.read_text()) if file.exists() else None
        return SimpleNamespace(
            code=code, last=last, out=written.out, err=written.err, file=file, kept=kept, seconds=seconds
        )

    return once


MACHINE = {"machine": {"device": "name NVIDIA H100 80GB HBM3"}}
STEM = "nvidia-h100-80gb-hbm3"


def cases_of(kept: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {row["case"]: row for row in part["rows"]} for name, part in kept["parts"].items()}


def test_the_shares_of_the_parts_fit_the_day_and_what_runs_in_them():
    part, tests, sanitizer, line = (
        importlib.import_module(f"gpu_parts.{name}") for name in ("part", "gpu_tests", "sanitizer", "command_line")
    )
    names = [of.name for of in part.PARTS]
    assert sum(of.seconds for of in part.PARTS) == 60 * line.MINUTES
    assert names.index("kernels") < names.index("gpu_tests")  # which finds them compiled
    assert part.part_named("gpu_tests").case_seconds > tests._SECONDS
    assert part.part_named("sanitizer").case_seconds > sanitizer.LIMIT


def test_the_parts_run_in_order_and_the_file_is_named_after_the_device(run, tmp_path: Path):
    from gpu_parts.part import PARTS

    done = run(MACHINE | {"copies": {"a": "ok"}, "steps": {"b": "ok", "c": "wrong"}, "kernels": {"d": "fail"}})
    assert done.file == tmp_path / "out" / f"{STEM}.json" and done.code == 1
    assert sorted(path.name for path in done.file.parent.iterdir()) == [f"{STEM}.json", f"{STEM}.log"]
    assert list(done.kept["parts"]) == [part.name for part in PARTS]
    assert cases_of(done.kept)["steps"]["c"].items() >= {"ms": 1.0, "ok": False, "why": "3 bytes"}.items()
    assert {"command", "revision", "processor", "torch", "python"} <= done.kept.keys()
    assert done.kept["device"] == done.last["device"] == "NVIDIA H100 80GB HBM3"
    assert done.kept["seconds"] == done.last["seconds"] > 0 and done.last["stopped_by"] is None
    assert done.last["rows"]["steps"] == {"ok": 1, "wrong": 1} and done.last["rows"]["kernels"] == {"failed": 1}
    assert done.last["wrong"] == ["kernels: d", "steps: c"] and done.last["more_wrong"] == 0
    # One line for each row, and in the summary what failed comes before everything else.
    assert "kernels: d: failed (0.0 s); RuntimeError: no luck" in done.err and "steps: c: wrong" in done.err
    assert done.err.count("\n") == sum(len(rows) for rows in cases_of(done.kept).values())
    assert done.out.index("kernels: d") < done.out.index("not measured") < done.out.index("copies")


def test_nothing_wrong_is_exit_status_0(run):
    done = run(MACHINE)
    assert done.code == 0 and done.last["wrong"] == [] and "Failed" not in done.out


def test_a_rehearsal_says_so_everywhere(run, capsys: pytest.CaptureFixture[str], day):
    done = run(MACHINE)
    assert done.kept["rehearsal"] is True and "means anything" in done.kept["note"] and done.last["rehearsal"] is True
    assert "REHEARSAL" in done.out and done.out.count("not measured") == len(targets().TARGETS)
    assert day.main(["--show", str(done.file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:-1] == done.out.splitlines()[:-1] and json.loads(shown[-1]) == done.last


def targets() -> ModuleType:
    return importlib.import_module("gpu_parts.targets")


def test_some_parts_alone_still_begin_with_the_machine(run):
    done = run(MACHINE, "--parts", "steps, kernels", "--label", "before.1")
    assert list(done.kept["parts"]) == ["machine", "kernels", "steps"]
    assert done.file.name == f"{STEM}-before.1.json" and (done.file.parent / f"{STEM}-before.1.log").exists()


def test_a_machine_that_cannot_be_asked_has_no_name(run):
    for _ in range(2):  # such a file is nobody's to keep
        done = run({"machine": {"device": "segv"}}, "--parts", "copies")
        assert done.file.name == "unknown-device.json" and done.code == 1 and done.kept["device"] is None
        assert cases_of(done.kept)["copies"].keys() == {"only"}


def test_a_file_that_is_there_is_not_written_over(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = run(MACHINE)
    before = first.file.read_bytes()
    with pytest.raises(SystemExit) as ended:
        run(MACHINE, "--parts", "copies")
    err = capsys.readouterr().err
    assert ended.value.code == 2 and f"{STEM}.json" in err and "--replace" in err and "--label" in err
    # Said before anything but the machine was looked at, and without a trace.
    assert "copies" not in err and first.file.read_bytes() == before
    assert sorted(path.name for path in first.file.parent.iterdir()) == [f"{STEM}.json", f"{STEM}.log"]
    assert list(run(MACHINE, "--parts", "copies", "--replace").kept["parts"]) == ["machine", "copies"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "kernel"], "unknown part 'kernel'; did you mean 'kernels'?"),
        (["--parts", ""], "unknown part ''"),
        (["--minutes", "0"], "--minutes 0"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--minutes", "inf"], "--minutes inf"),
        (["--seed", "-1"], "--seed -1"),
        (["--label", "../x"], "--label '../x'; letters"),
        (["--out", __file__], "test_gpu_day.py; a folder"),
        (["--out", str(BENCH / "results" / "gpu")], "any folder but"),
        (["--out", str(BENCH / "gpu_parts" / ".." / "results")], "any folder but"),
        (["--show", "/no/such/file"], "--show"),
        (["--show", __file__], "damaged"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(run, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(MACHINE, *arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and "Traceback" not in err
    assert not (BENCH / "results" / "gpu" / f"{STEM}.json").exists()


def test_without_a_device_or_a_folder_it_says_what_to_do(day, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, said in ([], "--rehearse --out FOLDER"), (["--rehearse"], "needs --out"):
        with pytest.raises(SystemExit) as ended:
            day.main(arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_on_a_machine_with_a_device_it_is_measured_at_full_size(day, worker, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    settings = []
    real = day.run_part

    def noted(part: Any, setting: Any, **options: Any) -> Any:
        settings.append(setting)
        return real(part, setting, **options)

    monkeypatch.setattr(day, "run_part", noted)
    command = ["--out", str(tmp_path), "--parts", "copies", "--seed", "7", "--worker", shlex.join(worker(MACHINE))]
    assert day.main(command) == 0
    assert [(each.device, each.tiny, each.seed) for each in settings] == 2 * [("cuda", False, 7)]
    # Files of a part are kept apart from those of other days.
    assert settings[1].files == tmp_path / STEM and not (tmp_path / STEM).exists()
    kept = json.loads((tmp_path / f"{STEM}.json").read_text())
    assert kept["rehearsal"] is False and "note" not in kept and "REHEARSAL" not in capsys.readouterr().out


def test_what_a_part_leaves_over_goes_to_the_next_and_the_later_ones_keep_theirs(day, worker, tmp_path, monkeypatch):
    from gpu_parts.part import Part
    from gpu_parts.results import Results

    now, limits, patience = [100.0], {}, {}
    takes = {"machine": 1.0, "copies": 30.0, "steps": 1.0, "budget": 0.0}

    def run_part(part: Part, setting: Any, *, limit: float, **_: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        limits[part.name], patience[part.name] = limit, part.case_seconds
        now[0] += takes[part.name]
        yield "a", {"ms": 1.0}

    monkeypatch.setattr(day, "run_part", run_part)
    monkeypatch.setattr(day.time, "monotonic", lambda: now[0])
    shares = {"machine": 5, "copies": 10, "steps": 5, "budget": 20}
    parts = [Part(name=name, seconds=seconds, case_seconds=4, what="") for name, seconds in shares.items()]
    args = SimpleNamespace(rehearse=True, seed=0, out=tmp_path, worker=None, label="", replace=True)
    log = SimpleNamespace(stream=None, name=lambda path: None)
    day.measure(args, parts, Results({}, print), log, end=180.0, stop=lambda: False)
    # Twice the seconds of the table: 10, 20, 10, 40. The second took one second more than it and the first had.
    assert limits == {"machine": 10.0, "copies": 29.0, "steps": 9.0, "budget": 48.0}
    assert set(patience.values()) == {8.0}
    limits.clear()
    now[0] = 100.0
    takes.update(dict.fromkeys(takes, 0.0))
    day.measure(args, parts, Results({}, print), log, end=110.0, stop=lambda: False)
    assert limits == {"machine": 1.25, "copies": 3.75, "steps": 5.0, "budget": 10.0} and set(patience.values()) == {4}


def test_the_sum_of_all_is_a_hard_limit(run, day: ModuleType, monkeypatch: pytest.MonkeyPatch):
    # The last resort would end pytest.
    monkeypatch.setattr(day.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    # Every part would hang for ever.
    plan = {"kernels": {"a": "flood"}, "gpu_tests": {"b": "hang"}, "steps": {"": "hang"}, "budget": {"c": "ok 60"}}
    done = run(MACHINE | plan, "--minutes", "0.15", "--parts", ",".join(plan))
    assert done.seconds < 9 and done.kept["seconds"] < 9
    rows = cases_of(done.kept)
    assert rows["machine"]["device"]["ms"] == 1.0
    assert {rows[part][case]["skipped"] for part, case in (("kernels", "a"), ("gpu_tests", "b"), ("budget", "c"))} == {
        "no time left"
    }
    assert rows["steps"] == {"": {"case": "", "skipped": "no time left"}} and done.code == 0


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_it_and_keeps_what_is_there(run, processes: Path, number: int, name: str):
    done = run(MACHINE | {"kernels": {"a": "ok", "b": f"stop {int(number)}", "c": "ok"}})
    assert done.code == 128 + number and done.last["stopped_by"] == done.kept["stopped_by"] == name
    rows = cases_of(done.kept)
    assert rows["kernels"]["a"]["ms"] == 1.0 and f"ended by {name}" in done.out
    assert {row["skipped"] for row in [*rows["steps"].values(), rows["kernels"]["c"]]} == {"ended by a signal"}
    assert len(list(processes.iterdir())) == 2, "something was begun after the signal"


def test_a_full_disk_is_named_once_and_costs_no_row(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results = importlib.import_module("gpu_parts.results")
    write, tries = results.write_then_rename, count()

    def full(path: Path, fill: Callable[[Path], object]) -> None:
        if next(tries) >= 5:
            path.with_name(f".{path.name}.part").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, fill)

    monkeypatch.setattr(results, "write_then_rename", full)
    done = run(MACHINE | {"copies": {"a": "ok", "b": "ok"}, "steps": {"c": "wrong"}}, "--parts", "copies,steps")
    assert done.err.count("No space left on device") == 1 and str(done.file) in done.err
    assert done.last["rows"] == {"machine": {"ok": 1}, "copies": {"ok": 2}, "steps": {"wrong": 1}}
    assert done.last["wrong"] == ["steps: c"] and done.last["file_error"] == "No space left on device"
    assert done.code == 1 and "steps: c" in done.out
    # What was written before is whole.
    assert cases_of(done.kept)["copies"].keys() == {"a", "b"} and "steps" not in done.kept["parts"]
    assert not list(tmp_path.rglob("*.part"))


def test_a_disk_that_has_room_again_gets_everything(run, monkeypatch: pytest.MonkeyPatch):
    results = importlib.import_module("gpu_parts.results")
    write, tries = results.write_then_rename, count()

    def full(path: Path, fill: Callable[[Path], object]) -> None:
        if next(tries) in (2, 3, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, fill)

    monkeypatch.setattr(results, "write_then_rename", full)
    done = run(MACHINE, "--parts", "copies,steps")
    assert done.err.count("No space left on device") == 1
    assert done.code == 0 and done.last["file_error"] is None and list(done.kept["parts"]) == list(done.last["rows"])


def test_a_folder_that_takes_no_file_costs_the_file_alone(run, tmp_path: Path):
    (tmp_path / "file").touch()
    done = run(MACHINE | {"copies": {"a": "exit 3"}}, "--parts", "copies", out=tmp_path / "file" / "out")
    assert done.code == 1 and done.kept is None and done.err.count("error") == 1 and str(done.file) in done.err
    # The log that nobody sees still tells how a process died.
    assert done.last["rows"] == {"machine": {"ok": 1}, "copies": {"failed": 1}} and "out of luck" in done.out


def test_a_summary_that_fails_leaves_the_last_line(run, day: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("no summary")

    monkeypatch.setattr(day, "show", broken)
    done = run(MACHINE, "--parts", "copies")
    assert "no summary" in done.err and done.last["rows"]["copies"] == {"ok": 1} and done.code == 0


def test_what_nobody_thought_of_leaves_the_last_line_as_well(run, day: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def broken(part: str, row: Mapping[str, Any]) -> str:
        if part == "copies":
            raise RuntimeError("no words")
        return ""

    monkeypatch.setattr(day, "line_of", broken)
    done = run(MACHINE, "--parts", "copies")
    assert done.code == 1 and "no words" in done.err and done.last["stopped_by"] == "RuntimeError in gpu_day.py"
    assert done.last["rows"]["copies"] == {"ok": 1} and cases_of(done.kept)["copies"].keys() == {"only"}


def test_a_process_that_cannot_be_started_fails_its_part(run):
    done = run(MACHINE, "--parts", "copies", "--worker", "/no/such/program")
    assert done.code == 1 and done.last["rows"] == {"machine": {"failed": 1}, "copies": {"failed": 1}}
    assert "/no/such/program" in cases_of(done.kept)["copies"][""]["failed"]


def long_day(rows: int) -> dict[str, Any]:
    """One in which everything fails, with long names, reasons and figures."""
    from gpu_parts.part import PARTS

    def row(part: str, number: int) -> dict[str, Any]:
        name, why = f"{part} [bold] case {number} " + 60 * "x", f"error {number}: [red] " + 300 * "y"
        kind = number % 4
        if kind == 3:
            return {"case": name, "over_floor": 1000.0 + number, "kinds": None}
        return {"case": name} | ({"failed": why}, {"ok": False, "why": f"line\n{why}"}, {"skipped": why})[kind]

    parts = {part.name: {"seconds": 99.9, "rows": [row(part.name, number) for number in range(rows)]} for part in PARTS}
    return {"device": "a" * 300, "seconds": 540.0, "stopped_by": "SIGTERM", "rehearsal": True, "parts": parts}


def test_the_end_of_the_output_fits_what_comes_back(
    day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "day.json"
    file.write_text(json.dumps(long_day(rows=50)))
    assert day.main(["--show", str(file)]) == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 61 and len(out) < 12000 and max(map(len, lines[:-1])) <= 140
    assert "and 274 more, see the file" in out and "[bold]" in out and "error 0: [red]" in out and "1,047.00x" in out
    last = json.loads(lines[-1])
    assert len(last["wrong"]) == 40 and last["more_wrong"] == 286 - 40


@pytest.mark.slow
def test_it_ends_itself_even_where_it_hangs_itself(worker, tmp_path: Path, processes: Path):
    code = f"""
        import sys, time
        sys.path.insert(0, {str(BENCH)!r})
        import gpu_day
        gpu_day.show = lambda *_: time.sleep(600)
        gpu_day.main(sys.argv[1:])
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), "--rehearse", "--out", str(tmp_path / "out")]
    command += ["--minutes", "0.03", "--parts", "copies", "--worker", shlex.join(worker(MACHINE))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Timeout" in done.stderr
    # Nothing of what was measured is lost.
    kept = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert list(kept["parts"]) == ["machine", "copies"] and kept["seconds"] is not None


@pytest.fixture
def real_worker(tmp_path: Path, processes: Path) -> Callable[[str], list[str]]:
    """The command of the real worker, with a part `kernels` whose cases are functions of this source code."""

    def command(source: str) -> list[str]:
        file = tmp_path / "worker.py"
        file.write_text(
            textwrap.dedent(f"""
            import ctypes, json, os, subprocess, sys, time, types
            from pathlib import Path
            from gpu_parts import worker
            folder = Path({str(processes)!r})
            (folder / str(os.getpid())).touch()
            own = dict()
            """)
            + f"exec({textwrap.dedent(source)!r}, globals(), own)\n"
            + textwrap.dedent("""
            part = types.ModuleType("gpu_parts.kernels")
            part.cases = lambda setting: [name for name in own if not name.startswith("_")]
            part.measure = lambda setting, case: own[case]()
            sys.modules["gpu_parts.kernels"] = part if own else None
            worker.main()
            """)
        )
        return [sys.executable, "-P", str(file)]

    return command


SAYS = """
def prints():
    print("a library says hello")
    os.system("echo so does its library in C")
    return {"ms": 1.0}
def raises():
    raise ValueError("no luck\\nat all")
def nothing():
    pass
def no_number():
    return {"ms": float("nan")}
def leaves():
    sys.exit("done here")
def broken():
    worker._answers = lambda setting: False
    return {"ms": 2.0}
def after():
    return {"ms": 3.0}
"""


@pytest.fixture
def real_rows(real_worker, tmp_path: Path) -> Callable[[str], tuple[list[tuple[str, dict[str, Any]]], str]]:
    """Rows of the real worker, and the log."""
    from gpu_parts.part import Part
    from gpu_parts.runner import run_part
    from gpu_parts.setting import Setting

    def once(source: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
        part = Part(name="kernels", seconds=1, case_seconds=20, what="")
        setting = Setting(device="cpu", tiny=True, seed=0, folder=str(tmp_path))
        with (tmp_path / "log").open("w+b", buffering=0) as log:
            rows = list(run_part(part, setting, limit=60, log=log, command=real_worker(source)))
        return rows, (tmp_path / "log").read_text()

    return once


@pytest.mark.slow
def test_a_worker_turns_whatever_a_case_does_into_a_row(real_rows, processes: Path):
    found, log = real_rows(SAYS)
    rows = dict(found)
    assert list(rows) == ["prints", "raises", "nothing", "no_number", "leaves", "broken", "after"]
    assert [rows[case]["ms"] for case in ("prints", "broken", "after")] == [1.0, 2.0, 3.0]
    assert "a library says hello" in log and "so does its library in C" in log and "--- kernels: raises" in log
    assert rows["raises"]["failed"] == "ValueError: no luck" and rows["raises"]["traceback"][-1] == "at all"
    assert not any(str(BENCH.parent) in line for line in rows["raises"]["traceback"])
    assert rows["nothing"]["failed"].startswith("TypeError: measure() gave None")
    assert rows["no_number"]["failed"].startswith("ValueError")
    assert rows["leaves"]["failed"] == "exit status 1: done here"
    # One process up to the exit, one up to the broken device, one for the rest.
    assert len(list(processes.iterdir())) == 3


def test_a_part_that_cannot_be_imported_says_why(real_rows):
    found, log = real_rows("")
    row = dict(found)[""]
    assert len(found) == 1 and row["failed"].startswith("ModuleNotFoundError: import of gpu_parts.kernels halted")
    assert row["traceback"] and "Traceback" in log


HANGS = """
def quick():
    return {"ms": 1.0}
def hangs():
    for own_session in (False, True):
        child = subprocess.Popen([sys.executable, "-S", "-I", "-c", "import time; time.sleep(600)"],
                                 start_new_session=own_session)
        (folder / str(child.pid)).touch()
    # Without giving up the interpreter's lock, as a library may.
    ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.slow
def test_a_killed_day_leaves_a_whole_file_and_no_orphan(real_worker, processes: Path, tmp_path: Path):
    from gpu_parts.family import MARK, family

    command = [sys.executable, str(BENCH / "gpu_day.py"), "--rehearse", "--out", str(tmp_path / "out")]
    command += ["--parts", "kernels", "--worker", shlex.join(real_worker(HANGS))]
    day = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(list(processes.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        # The worker that looked at the machine has ended; of this one two children hang as well.
        environment = Path("/proc", str(alive(processes)[0]), "environ").read_bytes()
        mark = next(word for word in environment.split(b"\0") if word.startswith(MARK.encode()))
        mark = mark.decode().partition("=")[2]
        assert len(family(mark)) == 4  # the worker, what waits beside it for the end, two children
    finally:
        day.kill()
        day.communicate()
    kept = json.loads((tmp_path / "out" / "cpu.json").read_text())
    assert cases_of(kept)["kernels"].keys() == {"quick"} and kept["seconds"] is None
    deadline = time.monotonic() + 10
    while (family(mark) or alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert family(mark) == [] and alive(processes) == []


@pytest.mark.parametrize(
    ("target", "values", "expected"),
    [
        # Every row that should be there, and the worst of them.
        ("block step", {"fast_dllm_dual 1024": 1.1, "polestar_raw 1024": 1.3}, ("ok", 1.3, "polestar_raw 1024")),
        ("block step", {"fast_dllm_dual 1024": 1.4, "polestar_raw 1024": 1.2}, ("missed", 1.4, "fast_dllm_dual 1024")),
        (
            "block step",
            {"fast_dllm_dual 1024": 1.1, "polestar_raw 1024": None},
            ("not measured", 1.1, "fast_dllm_dual"),
        ),
        ("block step", {"fast_dllm_dual 1024": 1.4, "polestar_raw 1024": None}, ("missed", 1.4, "fast_dllm_dual 1024")),
        ("block step", {"none 1024": 1.1, "fast_dllm_dual 4096": 1.1}, ("not measured", None, "")),
        ("block step", {}, ("not measured", None, "")),
        ("update step", {"polestar_raw 1024": 1.5, "polestar_delta 32768": 1.2}, ("ok", 1.5, "polestar_raw 1024")),
        ("update step", {"polestar_raw 1024": 1.0, "polestar_delta 32768": 1.6}, ("missed", 1.6, "polestar_delta")),
        ("fetches", {"16 KiB chosen": 0.1, "64 KiB chosen": 0.9, "1024 KiB chosen": 0.95}, ("ok", 0.9, "64 KiB")),
        ("fetches", {"64 KiB engine": 0.1, "64 KiB chosen": 0.95, "144 KiB chosen": 0.8}, ("missed", 0.8, "144 KiB")),
        ("hidden", {"polestar_raw 32768": 0.96, "polestar_delta 32768": 0.94}, ("missed", 0.94, "polestar_delta")),
        ("hidden", {"polestar_raw 32768": 0.96, "polestar_raw 1024": 0.2}, ("ok", 0.96, "polestar_raw")),
        ("bit for bit", {"raw, offloaded, resident": True, "twice the same": False}, ("ok", 1, "raw")),
        ("bit for bit", {"raw, offloaded, resident": False}, ("missed", 0, "raw")),
        ("plan", {"none 1024": -0.011, "uniform 4096": 0.001}, ("missed", 0.011, "none 1024")),
        ("plan", {"none 1024": -0.009, "uniform 4096": 0.001}, ("ok", 0.009, "none 1024")),
        ("24 GiB", {"polestar_delta, host 64GiB": 2.5, "fast_dllm_dual, host 64GiB": 0.5}, ("ok", 2.5, "polestar")),
        ("24 GiB", {"polestar_delta, host 64GiB": 0.9}, ("missed", 0.9, "polestar")),
    ],
)
def test_a_target_is_met_where_all_its_rows_are(target: str, values: Mapping[str, Any], expected: tuple[Any, ...]):
    wanted = next(each for each in targets().TARGETS if target in each.name)

    def row(value: Any) -> dict[str, Any]:
        if value is None:
            return {"failed": "RuntimeError: no luck"}
        own, others = ({"over_floor": over, "median_ms": 1.0} for over in (value, 0.5))
        plain, update = (own, others) if target == "block step" else (others, own)
        return {
            "kinds": {"step": plain, "update": update, "refresh": others},
            "copies": {"fetch": {"hidden_share": value}},
            "memory": {"plan_difference_share": value},
            "over_peak": value,
            "ran_over_fast_dllm_dual": value,
        } | ({"ok": value} if isinstance(value, bool) else {})

    rows = [{"case": case} | row(value) for case, value in values.items()]
    found = targets().read(wanted, {wanted.part: {"rows": rows}, "other": {"rows": rows}})
    assert (found.verdict, found.worst) == expected[:2] and found.case.startswith(expected[2])


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"took_s": 1.23, "over_floor": 1.234, "time_us": 3.0}, "floors: a: ok (1.2 s); 1.23x its floor"),
        ({"ok": True, "gb_per_s": 51.26}, "floors: a: ok; 51.3 GB/s"),
        ({"ok": True, "over_peak": 0.912, "gb_per_s": 51.26}, "floors: a: ok; 91.2% of the peak"),
        ({"ok": True}, "floors: a: ok"),
        ({"ok": False, "why": "3 bytes\nare wrong", "over_floor": 1.0}, "floors: a: wrong; 3 bytes are wrong"),
        ({"ok": False}, "floors: a: wrong; no reason given"),
        ({"failed": "RuntimeError: no", "took_s": 0.0}, "floors: a: failed (0.0 s); RuntimeError: no"),
        ({"skipped": "needs a device"}, "floors: a: skipped; needs a device"),
        # Counts of tests, not what became of the row.
        ({"passed": 7, "failed": 0, "skipped": 3, "ok": True}, "floors: a: ok; 7 passed"),
        ({"passed": 7, "failed": 1, "skipped": 3, "ok": False, "why": "1 failed"}, "floors: a: wrong; 1 failed"),
        (
            {"kinds": {"step": {"median_ms": 5.9, "over_floor": 1.2}, "update": {"median_ms": 8}}, "total_ms": 1},
            "floors: a: ok; step 5.9 ms = 1.20x its floor",
        ),
        ({"kinds": {"step": 7, "update": None}, "total_ms": 1}, "floors: a: ok; 1.0 ms"),
        ({"over_floor": "?", "total_ms": 2.0}, "floors: a: ok; 2.0 ms"),
    ],
    ids=range(13),
)
def test_a_row_is_told_in_a_line(row: Mapping[str, Any], line: str):
    assert importlib.import_module("gpu_parts.wording").line_of("floors", {"case": "a"} | dict(row)) == line


def test_a_rehearsal_of_a_real_part_finds_nothing_wrong(day: ModuleType, tmp_path: Path, capsys):
    assert day.main(["--rehearse", "--out", str(tmp_path), "--parts", "machine"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["wrong"] == [] and last["rows"] == {"machine": {"ok": 1}}
    assert cases_of(json.loads((tmp_path / "cpu.json").read_text()))["machine"]["device"]["name"] == "cpu"


@pytest.mark.long
def test_the_whole_rehearsal_as_a_user_runs_it(tmp_path: Path):
    from gpu_parts.part import PARTS
    from gpu_parts.results import status

    command = [sys.executable, str(BENCH / "gpu_day.py"), "--rehearse", "--out", "out", "--minutes", "20"]
    # As on a machine where nothing of this repository is installed; threads of one process would fight for a core.
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1260)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["wrong"]) == (0, []), done.stdout
    kept = json.loads((tmp_path / "out" / "cpu.json").read_text())
    rows = cases_of(kept)
    assert list(rows) == list(last["rows"]) == [part.name for part in PARTS]
    for part, of_part in rows.items():
        assert any(status(row) == "ok" for row in of_part.values()), f"{part} measured nothing"
    skipped = {(part, row["skipped"]) for part in rows for row in rows[part].values() if status(row) == "skipped"}
    assert {part for part, _ in skipped} == {"sanitizer", "copies"}
    assert {why for part, why in skipped if part == "sanitizer"} == {"needs a CUDA device"}
    assert all("does not work for device cpu here" in why for part, why in skipped if part == "copies")
    # Every target finds its figure at the sizes of a rehearsal as at those of a model; what only a device counts, not.
    longest = {"96": "1024", "160": "32768"}
    for row in kept["parts"]["steps"]["rows"]:
        name, positions = row["case"].split()
        row["case"] = f"{name} {longest[positions]}"
    for target in targets().TARGETS:
        found = targets().read(target, kept["parts"])
        if "plan" not in target.name:
            assert found.measured == found.expected > 0, target.name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"cpu.json", "cpu.log", "cpu"}
    assert {path.name for path in (tmp_path / "out" / "cpu").iterdir()} == {"trace.json.gz"}
