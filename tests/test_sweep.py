"""bench/sweep.py as a user runs it: what it measures, keeps, refuses and goes on with. A quick worker stands in."""

import errno
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

TESTS = Path(__file__).resolve().parent
# Four policies' points: 2 × 2 of polestar, and one each of the others.
SMALL = ["--clusters", "4,8", "--top-m", "2", "--update-threshold", "0,1", "--examples", "sort=6,lookup=2"]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TESTS.parent / "bench")
    return importlib.import_module("sweep")


@pytest.fixture
def run(sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs a small sweep into a folder with further arguments; `begun`: what was measured by this run alone."""
    log = tmp_path / "log"

    def once(*arguments: str) -> SimpleNamespace:
        log.write_text("")
        code = sweep.main([*SMALL, "--out", str(tmp_path / "out"), "--worker", worker(log), *arguments])
        written = capsys.readouterr()
        begun = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
        last = json.loads(written.out.splitlines()[-1])
        return SimpleNamespace(code=code, last=last, out=written.out, err=written.err, begun=begun)

    return once


def worker(log: Path) -> str:
    return f"{sys.executable} -S -I {TESTS / 'sweep_worker.py'} {log}"


def table(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rows.parquet").to_pylist()


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_every_point_has_a_row_for_every_task_and_a_second_run_measures_nothing(run, tmp_path: Path):
    first = run()
    assert first.code == 0 and len(first.begun) == 6
    assert first.last | {"out": None} == {
        "out": None,
        "points": 6,
        "runs": 1,
        "ok": 6,
        "refused": 0,
        "failed": 0,
        "missing": 0,
        "rows": 12,
        "skipped": 0,
    }
    rows = table(tmp_path / "out")
    axes = {(row["policy"], row["clusters"], row["top_m"], row["update_threshold"], row["codec"]) for row in rows}
    polestar = {("polestar", clusters, 2, threshold, "nvfp4_delta") for clusters in (4, 8) for threshold in (0, 1)}
    assert axes == polestar | {(policy, None, None, None, None) for policy in ("none", "fast_dllm_dual")}
    assert [row["task"] for row in rows] == 6 * ["sort", "lookup"]
    assert {(row["status"], row["context"], row["batch"], row["confidence"]) for row in rows} == {("ok", 512, 8, 0.99)}
    head = record(tmp_path / "out")
    assert head["schema"] == "tiered sweep 1" and (head["points"], head["rows"], head["skipped"]) == (6, 12, [])
    assert head["grid"]["axes"]["update_threshold"] == [0, 1] and head["grid"]["fixed"]["tasks"]["sort"] == 6
    assert {"command", "revision", "processor", "torch"} <= head.keys()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}
    again = run()
    assert again.begun == [] and again.last == first.last
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")} == before


def test_the_table_alone_is_enough_to_go_on_from(run, tmp_path: Path):
    run()
    rows, before = table(tmp_path / "out"), record(tmp_path / "out")
    for path in (tmp_path / "out" / "points").iterdir():
        path.unlink()
    (tmp_path / "out" / "points").rmdir()
    assert run().begun == []
    # A wider grid measures what is new; a narrower one forgets nothing.
    wider = run("--batches", "8,2")
    assert {batch for *_, batch in wider.begun} == {2} and len(wider.begun) == 6
    assert [row for row in table(tmp_path / "out") if row["batch"] == 8] == rows
    assert run("--policies", "none").begun == []
    assert len(table(tmp_path / "out")) == 24
    # One machine measured all of it, and the record still says so.
    assert record(tmp_path / "out")["made_on"] == before["made_on"] and len(before["made_on"]) == 1


@pytest.mark.parametrize(
    "changed",
    [["--examples", "sort=7,lookup=2"], ["--seed", "1"], ["--max-new-tokens", "64"], ["--block-length", "16"]],
    ids=lambda changed: changed[0],
)
def test_what_was_measured_otherwise_is_never_mixed_in(run, tmp_path: Path, changed: list[str]):
    run("--policies", "none,fast_dllm_dual")
    old = table(tmp_path / "out")
    other = run("--policies", "none,fast_dllm_dual", *changed)
    assert len(other.begun) == 2
    rows = table(tmp_path / "out")
    assert len(rows) == 4 and not {row["point"] for row in rows} & {row["point"] for row in old}
    # Skipped, by name; and what was there is put aside, not thrown away.
    files = [each["file"] for each in record(tmp_path / "out")["skipped"]]
    assert sum(file.startswith("points/") for file in files) == 2
    assert sum(file.startswith("rows.parquet row ") for file in files) == 4
    assert "of another sweep" in other.err and other.last["skipped"] == 6
    assert pq.read_table(tmp_path / "out" / "rows.skipped.parquet").to_pylist() == old


def test_a_policy_option_is_part_of_the_point_and_reaches_those_that_have_it(run, tmp_path: Path):
    run("--option", "cluster_layers=1")
    rows = table(tmp_path / "out")
    options = {row["policy"]: json.loads(row["policy_options"]) for row in rows}
    assert options["polestar"]["cluster_layers"] == 1 and options["none"] == options["fast_dllm_dual"] == {}
    # The others are as they were without it.
    assert {policy for _, _, policy, _ in run().begun} == {"polestar"}


def test_runs_are_interleaved(run, tmp_path: Path):
    begun = run("--num-runs", "3", "--policies", "none,polestar").begun
    order = [key for key, *_ in begun]
    assert len(set(order)) == 5 and order == 3 * order[:5]
    assert [number for _, number, *_ in begun] == 5 * [0] + 5 * [1] + 5 * [2]
    assert [row["run"] for row in table(tmp_path / "out")] == 10 * [0] + 10 * [1] + 10 * [2]


def test_several_processes_at_once_make_the_same_table(run, sweep: ModuleType, tmp_path: Path):
    run("--jobs", "3")
    rows = table(tmp_path / "out")
    run("--out", str(tmp_path / "single"))
    assert table(tmp_path / "single") == rows


def test_a_dry_run_measures_and_writes_nothing(run, tmp_path: Path):
    plan = run("--dry-run", "--num-runs", "2")
    assert plan.begun == [] and not (tmp_path / "out").exists()
    assert plan.last == {"points": 6, "runs": 2, "done": 0, "failed": 0, "to_do": 12, "estimated_seconds": None}
    run("--policies", "none")
    for path in (tmp_path / "out" / "points").glob("*.json"):
        kept = json.loads(path.read_text()) | {"wall": 100.0}
        path.write_text(json.dumps(kept))
    plan = run("--dry-run", "--num-runs", "2", "--jobs", "2")
    # None of the other policies was measured: they are taken to be as slow as what was.
    assert plan.last == {"points": 6, "runs": 2, "done": 1, "failed": 0, "to_do": 11, "estimated_seconds": 550.0}
    assert "about 9 min 10 s" in plan.out and plan.out.count(" C=4 M=2 T=0 ") == 1
    assert re.match("8 . 32 of 544 rows: weights 7.23 MiB", plan.out)


@pytest.mark.parametrize(
    ("expression", "points"),
    [
        ("policy=polestar,update_threshold=0|1", 4),
        ("policy = polestar , update_threshold = 1", 2),
        ("policy!=polestar", 2),
        ("clusters=none|8", 4),
        ("clusters=none,policy=none", 1),
        ("budget=12582912", 6),
        ("confidence=0.990,clusters!=8|none", 2),
    ],
)
def test_a_filter_takes_points(run, expression: str, points: int):
    plan = run("--dry-run", "--budgets", "12MiB", "--filter", expression)
    assert plan.last["points"] == points


def test_bad_points_become_rows_that_say_why_and_the_others_are_measured(run, tmp_path: Path):
    both = ["--policies", "none", "--batches", "901,902,903,904,905,906,907,8", "--timeout", "2"]
    first = run(*both)
    assert first.code == 1 and (first.last["failed"], first.last["refused"], first.last["ok"]) == (6, 1, 1)
    assert "6 measurements failed" in first.err
    rows = {(row["batch"], row["task"]): row for row in table(tmp_path / "out")}
    assert len(rows) == 16
    expected = {
        901: ("failed", "exit status 1: out of luck"),
        902: ("failed", "no answer within 2 s"),
        903: ("failed", "no rows on the last line of its output: 'no rows'"),
        904: ("failed", "rows that cannot be: exact_match = 1.5"),
        905: ("failed", "killed by SIGKILL"),
        906: ("refused", "too large"),
        907: ("failed", "exit status 1: the first time"),
    }
    for batch, (status, why) in expected.items():
        row = rows[batch, "lookup"]
        assert row["status"] == status and row["why"].startswith(why)
        assert row["seconds"] is row["correct"] is row["device_bytes"] is None
    assert rows[906, "sort"]["status"] == "ok" and rows[901, "sort"]["status"] == "failed"
    # They are known until somebody asks for another try, and what was refused stays so.
    assert run(*both).begun == []
    third = run(*both, "--retry", "--filter", "batch=901|906|907|8")
    assert sorted(batch for *_, batch in third.begun) == [901, 907]
    assert third.code == 1 and third.last["failed"] == 1
    assert {row["status"] for row in table(tmp_path / "out") if row["batch"] == 907} == {"ok"}


def test_a_full_disk_is_named_and_what_is_finished_stays(
    run, sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = importlib.import_module("sweeping.store")
    written: list[Path] = []
    write = store.write_then_rename

    def full(path: Path, fill: Callable[[Path], object]) -> None:
        if len(written) == 3:
            path.with_name(f".{path.name}.part").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, fill)

    with monkeypatch.context() as patch, pytest.raises(IndexError):
        patch.setattr(store, "write_then_rename", full)
        run()  # there is no last line
    assert sweep.main([*SMALL, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert len(list((tmp_path / "out" / "points").glob("*.json"))) == 3
    assert not list((tmp_path / "out").rglob("*.part")) and not (tmp_path / "out" / "rows.parquet").exists()
    rest = run()
    assert len(rest.begun) == 3 and len(table(tmp_path / "out")) == 12


def test_a_full_disk_ends_it_with_a_message(run, sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    store = importlib.import_module("sweeping.store")

    def full(path: Path, fill: Callable[[Path], object]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_then_rename", full)
    assert sweep.main([*SMALL, "--out", str(tmp_path / "out"), "--worker", worker(tmp_path / "log")]) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err and str(tmp_path / "out" / "points") in err and "Traceback" not in err


def test_a_sweep_that_died_between_the_table_and_its_record_is_mended(run, tmp_path: Path):
    run()
    rows = table(tmp_path / "out")
    (tmp_path / "out" / "run.json").unlink()
    assert run().begun == [] and record(tmp_path / "out")["rows"] == 12
    old = record(tmp_path / "out") | {"rows": 4, "points": 2}
    (tmp_path / "out" / "run.json").write_text(json.dumps(old))
    assert run().begun == [] and record(tmp_path / "out")["rows"] == 12
    assert table(tmp_path / "out") == rows


def test_two_sweeps_do_not_share_a_folder(run, sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with importlib.import_module("sweeping.store").locked(tmp_path / "out"), pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'out'} is in use by another sweep" in error
    assert run().code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clusters", "4,x"], "clusters = 'x'; allowed: a whole number from 1, or auto"),
        (["--clusters", "0"], "clusters = '0'"),
        (["--confidences", "1.5"], "confidence = '1.5'; allowed: a number from 0 to 1"),
        (["--budgets", "12 potatoes"], "budget = '12 potatoes'"),
        (["--contexts", ""], "context = ''"),
        (["--policies", "polstar"], "did you mean 'polestar'"),
        (["--codecs", "nvfp5"], "did you mean 'nvfp4'"),
        (["--examples", "sort=0"], "sort=0"),
        (["--examples", "sortt=3"], "did you mean 'sort'"),
        (["--examples", "sort=3", "--contexts", "64,128"], "without lookups"),
        (["--option", "cluster_layer=1"], "did you mean 'cluster_layers'"),
        (["--option", "clusters=1"], "--clusters"),
        (["--option", "seed"], "NAME=VALUE"),
        (["--filter", "threshold=1"], "did you mean 'update_threshold'"),
        (["--filter", "update_threshold=3"], "update_threshold = '3'; allowed: 0, 1, none"),
        (["--filter", "policy"], "AXIS=VALUE"),
        (["--filter", "policy=none,clusters=4"], "leaves no point of 6"),
        (["--num-runs", "0"], "--num-runs 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["--threads", "0"], "threads = 0"),
        (["--block-length", "12"], "max_new_tokens 32 is not a multiple of block_length 12"),
        (["--model", "nobody"], "nobody"),
        (["--device", "tpu"], "tpu"),
        (["--out", str(Path(__file__))], "test_sweep.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(run, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("kills", "thresholds", "points"),
    [pytest.param(3, "0,1", 10, id="3"), pytest.param(20, "0,1,2,4,8", 22, id="20", marks=pytest.mark.long)],
)
def test_a_sweep_ended_by_ctrl_c_and_killed_at_random_moments_resumes_to_the_same_table(
    sweep: ModuleType, tmp_path: Path, kills: int, thresholds: str, points: int
):
    grid = ["--clusters", "4,8", "--top-m", "1,2", "--update-threshold", thresholds, "--num-runs", "3"]
    grid += ["--examples", "sort=6,chain=3,lookup=2"]
    killed, whole, log = tmp_path / "killed", tmp_path / "whole", tmp_path / "log"
    command = [*grid, "--out", str(killed), "--worker", worker(log)]
    signals = ",".join(["SIGINT", *kills * ["SIGKILL"]])
    driver = [sys.executable, "-P", str(TESTS / "sweep_killer.py"), str(log), signals, *command]
    done = subprocess.run(driver, capture_output=True, text=True, check=True, timeout=120)
    stopped, *ends = json.loads(done.stdout.splitlines()[-1])
    assert stopped == {"signal": "SIGINT", "exit": 130, "table": True}
    assert "measurements missing; the same command goes on" in done.stderr
    assert [end["exit"] for end in ends] == kills * [-9], "a kill came too late to hit anything"
    begun, kept = log.read_text().count("\n"), len(list((killed / "points").glob("*.json")))
    # Each of the ends may have cost what was being measured, and nothing more.
    assert begun - kills - 1 <= kept <= begun and kept < 3 * points
    assert sweep.main(command) == 0
    assert sweep.main([*grid, "--out", str(whole), "--worker", worker(tmp_path / "log of whole"), "--jobs", "2"]) == 0
    assert table(killed) == table(whole) and len(table(killed)) == 3 * points * 3
    one, other = record(killed), record(whole)
    assert one["skipped"] == [] and one == other | {"command": one["command"]}
