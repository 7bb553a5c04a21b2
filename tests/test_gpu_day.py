"""`bench/gpu_day.py` as a user runs it: its file, its time, and parts that crash, hang or are wrong. A quick worker
stands in for the processes that measure, except in the last tests."""

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
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gpu_day as day
import pytest
from measuring import runner
from studies import gpu_day as study
from studies.gpu_day import TARGETS, read

TESTS = Path(__file__).resolve().parent
BENCH = TESTS.parent / "bench"
STEM = "nvidia-h100-80gb-hbm3"
Plan = dict[str, list[str]]
MACHINE: Plan = {"machine": ["a: name NVIDIA H100 80GB HBM3"]}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Path]:
    """The folder that notes every process that was started. None may be left when the test is over."""
    folder = tmp_path / "processes"
    folder.mkdir()
    yield folder
    left = alive(folder)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


def alive(folder: Path) -> list[int]:
    """Processes of `folder` that run. A zombie does not."""

    def runs(process: str) -> bool:
        try:
            return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [int(path.name) for path in folder.iterdir() if runs(path.name)]


@pytest.fixture
def worker(processes: Path) -> str:
    """The command of the quick worker."""
    return shlex.join([sys.executable, "-S", "-I", str(TESTS / "gpu_day_worker.py"), str(processes)])


@pytest.fixture
def run(worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A rehearsal of these cases with further arguments: exit status, last line, output, content of the file."""
    monkeypatch.setattr(runner, "SHORTEST", 0.05)

    def once(plan: Plan, *arguments: str, out: Path = tmp_path / "out") -> SimpleNamespace:
        def module(part: str) -> Any:
            return SimpleNamespace(cases=lambda setting: plan.get(part, ["a: ok"]))

        monkeypatch.setattr(study, "_module", module)
        began = time.monotonic()
        code = day.main(["--rehearse", "--out", str(out), "--worker", worker, *arguments])
        written = capsys.readouterr()
        last = json.loads(written.out.splitlines()[-1])
        file = TESTS.parent / (last["file"] or "no such file")
        kept = json.loads(file.read_text()) if file.exists() else None
        rows = {f"{row['part']} {row['case']}": row for row in (kept or {"rows": []})["rows"]}
        told = {"code": code, "last": last, "out": written.out, "err": written.err, "file": file, "kept": kept}
        return SimpleNamespace(**told, rows=rows, seconds=time.monotonic() - began)

    return once


def test_the_shares_of_the_parts_fit_the_day_and_their_cases_limits():
    tests, sanitizer = (importlib.import_module(f"gpu_parts.{name}") for name in ("gpu_tests", "sanitizer"))
    names = study.AXES["part"]
    assert sum(study.PARTS[name].seconds for name in names) == 60 * day.MINUTES
    assert names[0] == "machine" and names.index("kernels") < names.index("gpu_tests")  # which finds them compiled
    assert study.PARTS["gpu_tests"].case_seconds > tests.SECONDS
    assert study.PARTS["sanitizer"].case_seconds > sanitizer.LIMIT


def test_the_parts_run_in_order_and_the_file_is_named_after_the_device(run, tmp_path: Path, processes: Path):
    plan = {"steps": ["b: ok", "c: wrong"], "kernels": ["d: ok", "e: segv", "f: ok"], "copies": ["g: skip"]}
    done = run(MACHINE | plan)
    assert done.file == tmp_path / "out" / f"{STEM}.json" and done.code == 1
    assert sorted(path.name for path in done.file.parent.iterdir()) == ["gpu_day.log", f"{STEM}.json"]
    assert list(dict.fromkeys(row["part"] for row in done.kept["rows"])) == study.AXES["part"]
    # A crash costs one row, and one more process.
    assert [done.rows[f"kernels {case}"]["status"] for case in plan["kernels"]] == ["ok", "failed", "ok"]
    assert done.rows["kernels e: segv"]["why"] == "killed by SIGSEGV" and len(list(processes.iterdir())) == 12
    assert done.rows["steps c: wrong"].items() >= {"ms": 1.0, "ok": False, "why": "3 bytes"}.items()
    assert {"command", "revision", "processor", "torch", "python"} <= done.kept.keys()
    assert done.kept["device"] == done.last["device"] == "NVIDIA H100 80GB HBM3"
    assert done.kept["seconds"] == done.last["seconds"] > 0 and done.last["stopped_by"] is None
    assert done.last["rows"]["steps"] == {"ok": 1, "failed": 1} and done.last["rows"]["copies"] == {"skipped": 1}
    assert done.last["failed"] == ["kernels: e: segv", "steps: c: wrong"] and done.last["more_failed"] == 0
    # One line for each row, and in the summary failures come before everything else.
    assert "steps: c: wrong run 0: failed" in done.err and done.err.count("\n") == len(done.rows)
    assert done.out.index("steps: c") < done.out.index("not measured") < done.out.index("no such device")


def test_a_rehearsal_says_so_everywhere(run, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    done = run(MACHINE)
    assert done.code == 0 and done.last["failed"] == [] and "| failed | why |" not in done.out
    assert done.kept["rehearsal"] is done.last["rehearsal"] is True and "means anything" in done.kept["note"]
    assert "rehearsal" in done.out and done.out.count("not measured") == len(TARGETS)
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu_targets -->\n<!-- /gpu_targets -->\n")
    assert day.main(["--show", str(done.file), "--into", str(page)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:-1] == done.out.splitlines()[:-1] and json.loads(shown[-1]) == done.last
    assert page.read_text().count("not measured") == len(TARGETS)


def test_some_parts_alone_still_begin_with_the_machine(run):
    done = run(MACHINE, "--parts", "steps, kernels", "--label", "before.1")
    assert list(done.last["rows"]) == ["machine", "kernels", "steps"] and done.file.name == f"{STEM}-before.1.json"


def test_a_machine_that_cannot_be_asked_has_no_name(run):
    for _ in range(2):  # such a file is written over
        done = run({"machine": ["a: segv"]}, "--parts", "copies")
        assert done.file.name == "unknown-device.json" and done.code == 1 and done.kept["device"] is None
        assert done.rows["copies a: ok"]["status"] == "ok"


def test_a_file_that_is_there_is_not_written_over(run, processes: Path, capsys: pytest.CaptureFixture[str]):
    first = run(MACHINE)
    before, started = first.file.read_bytes(), len(list(processes.iterdir()))
    with pytest.raises(SystemExit) as ended:
        run(MACHINE, "--parts", "copies")
    err = capsys.readouterr().err
    assert ended.value.code == 2 and f"{STEM}.json" in err and "--replace" in err and "--label" in err
    # The error comes after the machine's part alone, and without a trace.
    assert "Traceback" not in err and first.file.read_bytes() == before
    assert len(list(processes.iterdir())) == started + 1
    assert list(run(MACHINE, "--parts", "copies", "--replace").last["rows"]) == ["machine", "copies"]


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
        (["--out", str(BENCH / "gpu_parts" / ".." / "results")], "any folder but"),
        (["--show", "/no/such/file"], "/no/such/file"),
        (["--show", str(BENCH / "results" / "demo.json")], "a file of a GPU day"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(run, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(MACHINE, *arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and "Traceback" not in err
    assert not (BENCH / "results" / "gpu" / f"{STEM}.json").exists()


def test_without_a_device_or_a_folder_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, said in ([], "--rehearse --out FOLDER"), (["--rehearse"], "needs --out"):
        with pytest.raises(SystemExit) as ended:
            day.main(arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A day of four parts in made time: for each its limit, its cases' and its settings. `takes`: seconds."""
    now, takes = [100.0], {"machine": 0.0, "copies": 0.0, "steps": 0.0, "budget": 0.0}
    shares = {"machine": 5, "copies": 10, "steps": 5, "budget": 20}
    monkeypatch.setattr(day, "PARTS", {name: study.Part(seconds, 4) for name, seconds in shares.items()})
    monkeypatch.setattr(study, "_module", lambda part: SimpleNamespace(cases=lambda setting: ["a"]))
    monkeypatch.setattr(day.time, "monotonic", lambda: now[0])
    asked: list[tuple[float, float, Mapping[str, Any], str | None]] = []

    def run_group(jobs: Any, *, limit: float, timeout: float, local: Any, **_: Any) -> Iterator[runner.Ended]:
        asked.append((limit, timeout, jobs[0].point.settings, local["stem"]))
        now[0] += takes[jobs[0].point.settings["part"]]
        yield runner.Ended(job=jobs[0], rows=[{"status": "ok", "name": "A 1"}], seconds=1.0)

    monkeypatch.setattr(day, "run_group", run_group)

    def once(seconds: float, rehearse: bool = True) -> list[tuple[float, float, Mapping[str, Any], str | None]]:
        asked.clear()
        now[0] = 100.0
        args = SimpleNamespace(rehearse=rehearse, seed=7, out=tmp_path, worker=None, label="x", replace=True)
        measured = day.Day({}, [])
        day.measure(args, list(shares), measured, end=100.0 + seconds, stop=lambda: False)  # type: ignore[arg-type]
        return asked

    return SimpleNamespace(once=once, takes=takes)


def test_unused_time_goes_to_the_next_part_and_later_parts_keep_theirs(clock):
    clock.takes |= {"machine": 1.0, "copies": 30.0, "steps": 1.0}
    # Twice the seconds of the table: 10, 20, 10, 40. The second took one second more than it and the first had.
    assert [asked[:2] for asked in clock.once(80.0)] == [(10.0, 8.0), (29.0, 8.0), (9.0, 8.0), (48.0, 8.0)]
    clock.takes |= dict.fromkeys(clock.takes, 0.0)
    assert [asked[:2] for asked in clock.once(10.0)] == [(1.25, 4.0), (3.75, 4.0), (5.0, 4.0), (10.0, 4.0)]


@pytest.mark.parametrize(("rehearse", "device", "size"), [(True, "cpu", "tiny"), (False, "cuda", "full")])
def test_a_day_measures_the_device_at_full_size(clock, tmp_path: Path, rehearse: bool, device: str, size: str):
    asked = clock.once(40.0, rehearse)
    assert all(settings["device"] == device and settings["size"] == size for *_, settings, _ in asked)
    assert {settings["seed"] for *_, settings, _ in asked} == {7}
    # Files of a part are kept apart from those of other days.
    assert [stem for *_, stem in asked] == [None, *[str(tmp_path / "a-1-x")] * 3]


def test_the_sum_of_all_is_a_hard_limit(run, monkeypatch: pytest.MonkeyPatch):
    # The last resort would end pytest.
    monkeypatch.setattr(day.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    parts = ("kernels", "gpu_tests", "steps", "budget")
    done = run(MACHINE | {part: ["a: hang", "b: ok"] for part in parts}, "--minutes", "0.1", "--parts", ",".join(parts))
    assert done.seconds < 7 and done.kept["seconds"] < 7 and done.code == 0
    assert {done.rows[f"{part} {case}"]["why"] for part in parts for case in ("a: hang", "b: ok")} == {"no time left"}


def test_a_case_that_never_ends_is_killed(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(day, "PARTS", {"machine": study.Part(5, 5), "steps": study.Part(55, 0.1)})
    done = run(MACHINE | {"steps": ["a: ok", "b: hang", "c: ok"]})
    assert [done.rows[f"steps {case}"]["status"] for case in ("a: ok", "b: hang", "c: ok")] == ["ok", "failed", "ok"]
    assert done.rows["steps b: hang"]["why"].startswith("no answer within")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_it_and_keeps_the_rows_so_far(run, processes: Path, number: int, name: str):
    done = run(MACHINE | {"kernels": ["a: ok", f"b: stop {int(number)}", "c: ok"]})
    assert done.code == 128 + number and done.last["stopped_by"] == done.kept["stopped_by"] == name
    assert done.rows["kernels a: ok"]["ms"] == 1.0 and f"stopped_by: {name}" in done.out
    for row in ("kernels c: ok", f"kernels b: stop {int(number)}", "profile a: ok"):
        assert done.rows[row].items() >= {"status": "skipped", "why": "ended by a signal"}.items()
    assert len(list(processes.iterdir())) == 2, "something was begun after the signal"


@pytest.mark.parametrize("room_again", [False, True])
def test_a_full_disk_is_named_once_and_costs_no_row(run, monkeypatch, room_again: bool):
    write, tries = day.write_then_rename, count()

    def full(path: Path, fill: Callable[[Path], object]) -> None:
        if (number := next(tries)) >= 2 and not (room_again and number > 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, fill)

    monkeypatch.setattr(day, "write_then_rename", full)
    done = run(MACHINE | {"copies": ["a: ok", "b: ok"], "steps": ["c: wrong"]}, "--parts", "copies,steps")
    assert done.err.count("No space left on device") == 1 and str(done.file) in done.err
    assert done.last["rows"] == {"machine": {"ok": 1}, "copies": {"ok": 2}, "steps": {"failed": 1}}
    assert done.last["file_error"] == (None if room_again else "No space left on device")
    assert done.code == 1 and "steps: c" in done.out
    # The file that was written before is whole.
    assert len(done.rows) == (4 if room_again else 2) and "copies a: ok" in done.rows


def test_a_folder_that_takes_no_file_costs_the_file_alone(run, tmp_path: Path):
    (tmp_path / "file").touch()
    done = run(MACHINE | {"copies": ["a: segv"]}, "--parts", "copies", out=tmp_path / "file" / "out")
    assert done.code == 1 and done.kept is None and done.err.count("error") == 1 and str(done.file) in done.err
    assert done.last["rows"] == {"machine": {"ok": 1}, "copies": {"failed": 1}} and "SIGSEGV" in done.out


@pytest.mark.parametrize(("owner", "name", "code"), [(study, "tables", 0), (day, "reporting", 1)])
def test_an_unexpected_error_leaves_the_last_line(run, monkeypatch, owner: ModuleType, name: str, code: int):
    def broken(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(owner, name, broken)
    done = run(MACHINE, "--parts", "copies")
    assert done.code == code and "no luck" in done.err
    assert done.last["stopped_by"] == ("RuntimeError in gpu_day.py" if code else None)


def test_the_end_of_the_output_fits_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def row(part: str, number: int) -> dict[str, Any]:
        head = {"part": part, "case": f"case {number} " + 160 * "x", "took_s": 9.9, "size": "full"}
        if number % 3 == 2:
            return head | {"status": "ok", "over_floor": 1000.0 + number, "kinds": None}
        return head | {"status": ("failed", "skipped")[number % 3], "why": f"line {number}\n| " + 300 * "y"}

    rows = [row(part, number) for part in study.PARTS for number in range(50)]
    file = tmp_path / "day.json"
    head = {"study": "gpu_day", "device": "a" * 300, "seconds": 540.0, "stopped_by": "SIGTERM", "rehearsal": True}
    file.write_text(json.dumps(head | {"rows": rows}))
    assert day.main(["--show", str(file)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 60 and len(out) < 15000 and max(map(len, out.splitlines()[:-1])) <= 380
    assert "and 212 more, see the file" in out and "line 0 \\| y" in out and "1,047.00" in out
    last = json.loads(out.splitlines()[-1])
    assert len(last["failed"]) == 40 and last["more_failed"] == 221 - 40


@pytest.mark.slow
def test_it_ends_at_its_deadline_even_if_it_hangs(worker: str, tmp_path: Path):
    code = f"""
        import sys, time
        sys.path.insert(0, {str(BENCH)!r})
        import gpu_day
        gpu_day.Day.show = lambda *_: time.sleep(600)
        gpu_day.main(sys.argv[1:])
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), "--rehearse", "--out", str(tmp_path / "out")]
    command += ["--minutes", "0.03", "--parts", "copies", "--worker", worker]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Timeout" in done.stderr
    # No measured row is lost.
    kept = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert {row["part"] for row in kept["rows"]} == {"machine", "copies"} and kept["seconds"] is not None


@pytest.mark.slow
def test_a_killed_day_leaves_a_whole_file(worker: str, processes: Path, tmp_path: Path):
    code = f"""
        import sys, types
        sys.path.insert(0, {str(BENCH)!r})
        from studies import gpu_day as study
        cases = dict(machine=["a: ok"], copies=["a: ok", "b: hang"])
        study._module = lambda part: types.SimpleNamespace(cases=lambda setting: cases[part])
        import gpu_day
        gpu_day.main(sys.argv[1:])
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), "--rehearse", "--out", str(tmp_path / "out")]
    killed = subprocess.Popen([*command, "--parts", "copies", "--worker", worker], stderr=subprocess.DEVNULL)
    file, deadline = tmp_path / "out" / "unknown-device.json", time.monotonic() + 60
    while not (file.exists() and '"part": "copies"' in file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    kept = json.loads(file.read_text())
    assert [(row["part"], row["case"]) for row in kept["rows"]] == [("machine", "a: ok"), ("copies", "a: ok")]
    assert kept["seconds"] is None
    while alive(processes) and time.monotonic() < deadline:  # it ends with the day
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("target", "values", "expected"),
    [
        # Every row that should be there, and the worst of them.
        ("block step", {"fast_dllm_dual 1024": 1.1, "polestar_raw 1024": 1.3}, ("ok", 1.3, "polestar_raw 1024")),
        ("block step", {"fast_dllm_dual 1024": 1.4, "polestar_raw 1024": 1.2}, ("missed", 1.4, "fast_dllm_dual 1024")),
        ("block step", {"fast_dllm_dual 1024": 1.1, "polestar_raw 1024": None}, ("not measured", 1.1, "fast")),
        ("block step", {"fast_dllm_dual 1024": 1.4, "polestar_raw 1024": None}, ("missed", 1.4, "fast_dllm_dual 1024")),
        ("block step", {"none 1024": 1.1, "fast_dllm_dual 4096": 1.1}, ("not measured", None, "")),
        ("block step", {}, ("not measured", None, "")),
        ("update step", {"polestar_raw 1024": 1.5, "polestar_delta 32768": 1.2}, ("ok", 1.5, "polestar_raw 1024")),
        ("update step", {"polestar_raw 1024": 1.0, "polestar_delta 32768": 1.6}, ("missed", 1.6, "polestar_delta")),
        (
            "fetches",
            {"16 KiB scattered": 0.1, "64 KiB scattered": 0.9, "1024 KiB scattered": 0.95},
            ("ok", 0.9, "64 KiB"),
        ),
        (
            "fetches",
            {"64 KiB merged": 0.1, "64 KiB scattered": 0.95, "144 KiB scattered": 0.8},
            ("missed", 0.8, "144 KiB"),
        ),
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
def test_a_target_is_met_if_all_its_rows_meet_it(target: str, values: Mapping[str, Any], expected: tuple[Any, ...]):
    wanted = next(each for each in TARGETS if target in each.name)

    def row(value: Any) -> dict[str, Any]:
        if value is None:
            return {"status": "failed", "why": "RuntimeError: no luck"}
        own, others = ({"over_floor": over, "median_ms": 1.0} for over in (value, 0.5))
        plain, update = (own, others) if target == "block step" else (others, own)
        figures = {"kinds": {"step": plain, "update": update, "refresh": others}, "over_peak": value}
        figures |= {"copies": {"fetch": {"hidden_share": value}}, "memory": {"plan_difference_share": value}}
        return figures | {"ran_over_fast_dllm_dual": value} | ({"ok": value} if isinstance(value, bool) else {})

    parts = (wanted.part, "other")
    rows = [{"part": part, "case": case} | row(value) for part in parts for case, value in values.items()]
    found = read(wanted, rows)
    assert (found.verdict, found.worst) == expected[:2] and found.case.startswith(expected[2])


def test_a_part_that_cannot_be_imported_says_so_in_one_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gpu_parts.copies", None)  # type: ignore[arg-type]
    points = list(study.points({"part": ["copies", "machine"], "size": ["tiny"]}))
    assert [(point["part"], point["case"]) for point in points] == [("copies", ""), ("machine", "device")]
    with pytest.raises(ModuleNotFoundError, match=r"gpu_parts\.copies"):
        study.measure(points[0] | {"device": "cpu", "seed": 0, "threads": 1})


def test_a_case_is_measured_as_a_study_has_it(monkeypatch: pytest.MonkeyPatch):
    of = {"part": "machine", "case": "device", "size": "tiny", "device": "cpu", "seed": 0, "threads": 1}
    (row,) = study.measure(of)
    assert row["name"] == "cpu" and row["packages"]["torch"] and not row.keys() & of.keys()
    module: Any = SimpleNamespace(measure=lambda setting, case: {"ok": False, "why": "3 bytes"})
    monkeypatch.setattr(study, "_module", lambda part: module)
    assert study.measure(of) == [{"status": "failed", "ok": False, "why": "3 bytes"}]


@pytest.mark.slow
def test_a_rehearsal_of_a_real_part_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert day.main(["--rehearse", "--out", str(tmp_path), "--parts", "machine"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == [] and last["rows"] == {"machine": {"ok": 1}} and last["device"] == "cpu"


@pytest.mark.long
def test_the_whole_rehearsal_as_a_user_runs_it(tmp_path: Path):
    command = [sys.executable, str(BENCH / "gpu_day.py"), "--rehearse", "--out", "out", "--minutes", "20"]
    command += ["--parts", ",".join(study.PARTS)]
    # As on a machine where nothing of this repository is installed; threads of one process would fight for a core.
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1260)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["failed"]) == (0, []), done.stdout
    rows = json.loads((tmp_path / "out" / "cpu.json").read_text())["rows"]
    assert list(last["rows"]) == list(study.PARTS)
    assert {row["part"] for row in rows if row["status"] == "ok"} == set(study.PARTS), "every part measured something"
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert {row["part"] for row in skipped} == {"sanitizer", "copies", "weights"}
    for row in skipped:
        why = {
            "sanitizer": "needs a CUDA device",
            "copies": "does not work for device cpu here",
            "weights": "accelerate offloads from a GPU alone",
        }[row["part"]]
        assert why in row["why"]
    # Every target finds its figure at the sizes of a rehearsal as at those of a model, unless only a device counts it.
    longest = {"96": "1024", "160": "32768"}
    for row in rows:
        if row["part"] == "steps":
            name, positions = row["case"].split()
            row["case"] = f"{name} {longest[positions]}"
    for target in TARGETS:
        found = read(target, rows)
        assert found.measured == found.expected > 0 or {"plan", "accelerate's"} & {*target.name.split()}, target.name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"cpu.json", "gpu_day.log", "cpu.trace.json.gz"}


def test_no_part_is_forgotten():
    module: Callable[[str], ModuleType] = study._module
    for part in study.PARTS:
        assert callable(module(part).cases) and callable(module(part).measure)
