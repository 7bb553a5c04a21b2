"""bench/measure.py as a user runs it: points that it measures, keeps, refuses and resumes. A quick worker stands in."""

import errno
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import pytest
from measuring import store
from measuring.pages import between_marks, fill_marks
from measuring.point import Job, Point
from measuring.process import WORKER
from measuring.provenance import ROOT, command_line
from measuring.runner import Ended, run_group
from measuring.statistics import drop, interval, merged, noise_floor, paired
from measuring.store import locked, read_rows
from measuring.study import names
from measuring.table import read_table, write_table

TESTS = Path(__file__).resolve().parent
# 2 × 2 points of polestar, and one each of the others.
SMALL = ["--clusters", "4,8", "--top-m", "2", "--update-threshold", "0,1", "--examples", "sort:6,lookup:2"]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs a small sweep into a folder with further arguments; `begun`: points that this run alone measured."""
    log = tmp_path / "log"

    def once(*arguments: str) -> SimpleNamespace:
        log.write_text("")
        code = measure.main(["sweep", *SMALL, "--out", str(tmp_path / "out"), "--worker", worker(log), *arguments])
        written = capsys.readouterr()
        begun = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
        return SimpleNamespace(
            code=code, last=json.loads(written.out.splitlines()[-1]), out=written.out, err=written.err, begun=begun
        )

    return once


def worker(log: Path) -> str:
    return f"{sys.executable} -S -I {TESTS / 'measure_worker.py'} {log}"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Without columns that differ from run to run."""
    return [{name: value for name, value in row.items() if name != "took_s"} for row in read_rows(folder)[0]]


def test_every_point_has_its_rows_and_a_second_command_measures_anew(run, tmp_path: Path):
    first = run()
    assert first.code == 0 and len(first.begun) == 6
    counts = {"points": 6, "runs": 1, "ok": 6, "refused": 0, "failed": 0, "missing": 0, "rows": 12, "skipped": {}}
    assert {name: value for name, value in first.last.items() if name != "out"} == counts
    rows, about = read_rows(tmp_path / "out")
    polestar = {(clusters, 2, threshold) for clusters in (4, 8) for threshold in (0, 1)}
    assert {(row["clusters"], row["top_m"], row["update_threshold"]) for row in rows if "top_m" in row} == polestar
    assert [row["task"] for row in rows] == 6 * ["sort", "lookup"] and {row["status"] for row in rows} == {"ok"}
    assert [row["policy"] for row in rows if "top_m" not in row] == ["none", "none", "fast_dllm_dual", "fast_dllm_dual"]
    assert rows[0]["passes"] == {"step": 3} and rows[0]["call"]["confidence_threshold"] == 0.99
    (stamp,) = about["stamps"].values()
    assert {"revision", "processor", "torch"} <= stamp.keys() and about["command"].startswith("python")
    assert not list((tmp_path / "out" / "points").glob("*.json"))
    # Its output is made of the same rows, and needs no measuring.
    shown = run("--show")
    tables = shown.out.rpartition("{")[0]
    assert shown.begun == [] and "| C 8, M 2 |" in tables and first.out.startswith(tables)
    assert len(run().begun) == 6


def test_keep_measures_missing_points_and_a_narrower_command_forgets_nothing(run, tmp_path: Path):
    run()
    rows = rows_of(tmp_path / "out")
    assert run("--keep").begun == []
    wider = run("--keep", "--batch", "8,2")
    assert {batch for *_, batch in wider.begun} == {2} and len(wider.begun) == 6
    assert [row for row in rows_of(tmp_path / "out") if row["batch"] == 8] == rows
    assert len(run("--policy", "none").begun) == 1 and len(rows_of(tmp_path / "out")) == 24


@pytest.mark.parametrize("changed", [["--seed", "1"], ["--threads", "2"]], ids=lambda changed: changed[0])
def test_rows_that_rest_on_something_else_are_put_aside(run, tmp_path: Path, changed: list[str]):
    run("--policy", "none")
    old = rows_of(tmp_path / "out")
    other = run("--policy", "none", *changed)
    assert len(other.begun) == 1 and list(other.last["skipped"]) == ["rows.parquet"] and "not used" in other.err
    rows = rows_of(tmp_path / "out")
    assert not {row["point"] for row in rows} & {row["point"] for row in old}
    kept = read_table(tmp_path / "out" / "rows.1.parquet")[0]
    assert [row["point"] for row in kept] == [row["point"] for row in old]
    # A file that is no table is not deleted either.
    (tmp_path / "out" / "rows.parquet").write_text("mine")
    run("--policy", "none")
    assert (tmp_path / "out" / "rows.2.parquet").read_text() == "mine"


def test_rows_of_another_model_stay(run, tmp_path: Path):
    run("--policy", "none", "--model", "embedded")
    old = rows_of(tmp_path / "out")
    other = run("--policy", "none", "--model", "embedded-fresh")
    assert len(other.begun) == 1 and other.last["skipped"] == {}
    assert all(row in rows_of(tmp_path / "out") for row in old) and len(rows_of(tmp_path / "out")) == 2 * len(old)


def test_runs_are_interleaved(run, tmp_path: Path):
    begun = run("--runs", "3", "--policy", "none,polestar").begun
    order = [key for key, *_ in begun]
    assert len(set(order)) == 5 and order == 3 * order[:5]
    assert [row["run"] for row in rows_of(tmp_path / "out")] == 10 * [0] + 10 * [1] + 10 * [2]


def test_a_dry_run_measures_and_writes_nothing(run, tmp_path: Path):
    plan = run("--dry-run", "--runs", "2")
    assert plan.begun == [] and not (tmp_path / "out").exists()
    assert (plan.last["points"], plan.last["runs"], plan.last["seconds"]) == (6, 2, None)
    assert "clusters=4 top_m=2 update_threshold=0" in plan.err
    run("--policy", "none")
    assert run("--dry-run").last["seconds"] > 0


@pytest.mark.parametrize(
    ("expression", "points"),
    [
        ("policy=polestar,update_threshold=0|1", 4),
        ("policy = polestar , update_threshold = 1", 2),
        ("policy!=polestar", 2),
        ("clusters=none|8", 4),
        ("budget=12582912,policy=none", 1),
    ],
)
def test_a_filter_takes_points(run, expression: str, points: int):
    assert run("--dry-run", "--budget", "12MiB", "--filter", expression).last["points"] == points


def test_bad_points_become_rows_that_say_why_and_the_others_are_measured(run, tmp_path: Path):
    both = ["--policy", "none", "--batch", "901,902,903,904,905,906,907,8", "--timeout", "2"]
    first = run(*both)
    assert first.code == 1 and (first.last["failed"], first.last["refused"], first.last["ok"]) == (6, 1, 1)
    rows = {row["batch"]: row for row in rows_of(tmp_path / "out")}
    expected = {
        901: ("failed", "exit status 1: out of luck"),
        902: ("failed", "no answer within 2 s"),
        903: ("failed", "no rows: no rows"),
        904: ("failed", "KeyError: 'x'"),
        905: ("failed", "killed by SIGKILL"),
        906: ("refused", "too large"),
        907: ("failed", "exit status 1: the first time"),
    }
    for batch, (status, why) in expected.items():
        assert (rows[batch]["status"], rows[batch]["why"]) == (status, why) and "correct" not in rows[batch]
    # They are known until another try is asked for, and refused points stay refused.
    assert run(*both, "--keep").begun == []
    third = run(*both, "--retry", "--filter", "batch=901|906|907|8")
    assert sorted(batch for *_, batch in third.begun) == [901, 907] and third.last["failed"] == 1
    assert {row["status"] for row in rows_of(tmp_path / "out") if row["batch"] == 907} == {"ok"}


def test_a_refused_call_is_a_row_and_no_failure(run, tmp_path: Path):
    # Through the real worker: its error and that of the workload are one class.
    own = shlex.join(WORKER)
    ended = run("--policy", "none", "--budget", "1KiB", "--examples", "sort:1", "--worker", own)
    assert ended.code == 0 and ended.last["refused"] == 1
    (row,) = rows_of(tmp_path / "out")
    assert row["status"] == "refused" and "1.00 KiB" in row["why"]


def group(batches: list[int], tmp_path: Path, **options: Any) -> list[Ended]:
    """Outcomes of points of these batches, from one process and the one after it."""
    jobs = [
        Job(Point(study="sweep", settings={"policy": "none", "batch": batch, "tasks": [["sort", None, 2]]}))
        for batch in batches
    ]
    with (tmp_path / "stderr").open("w+b", buffering=0) as log:
        return list(run_group(jobs, log=log, command=worker(tmp_path / "log").split(), **options))


def test_points_that_share_a_process_lose_one_row_to_a_crash(tmp_path: Path):
    ended = group([1, 905, 2, 901, 906, 3], tmp_path)
    assert [each.rows[0]["status"] for each in ended] == ["ok", "failed", "ok", "failed", "refused", "ok"]
    late = group([1, 902, 2], tmp_path, timeout=1.0)
    assert [each.rows[0]["why"] for each in late] == [None, "no answer within 1 s", None]
    spent = group([1, 902, 2], tmp_path, limit=6.0)
    assert [each.rows[0]["status"] for each in spent] == ["ok", "skipped", "skipped"]


def test_a_full_disk_is_named_and_finished_points_stay(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    written: list[Path] = []
    write = store.write_then_rename

    def full(path: Path, fill: Callable[[Path], object]) -> None:
        def half(part: Path) -> None:
            part.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

        write(path, half if len(written) == 3 else fill)
        written.append(path)

    with monkeypatch.context() as patch, pytest.raises(IndexError):
        patch.setattr(store, "write_then_rename", full)
        run()  # there is no last line
    err = capsys.readouterr().err
    assert len(list((tmp_path / "out" / "points").glob("*.json"))) == 3
    assert not list((tmp_path / "out").rglob("*.part")) and not (tmp_path / "out" / "rows.parquet").exists()
    assert "Traceback" not in err
    rest = run()
    assert len(rest.begun) == 3 and len(rows_of(tmp_path / "out")) == 12


def test_two_runs_do_not_share_a_folder(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with locked(tmp_path / "out"), pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2 and f"{tmp_path / 'out'} is in use by another run" in capsys.readouterr().err
    assert run().code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--top-m", "4,x"], "top_m = 'x'; allowed: int, or none"),
        (["--clusters", "0"], "clusters"),
        (["--budget", "12 potatoes"], "12 potatoes"),
        (["--context", ""], "context = ''"),
        (["--policy", "polstar"], "did you mean 'polestar'"),
        (["--codec", "nvfp5"], "did you mean 'nvfp4'"),
        (["--examples", "sort:0"], "sort:0"),
        (["--examples", "sortt:3"], "did you mean 'sort'"),
        (["--filter", "threshold=1"], "threshold"),
        (["--filter", "policy=none,clusters=4"], "no point is left"),
        (["--runs", "0"], "--runs 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["--threads", "0"], "--threads 0"),
        (["--model", "nobody"], "nobody"),
        (["--out", str(Path(__file__))], "test_measure.py"),
        (["--show", "--out", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(run, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and "Traceback" not in err


def test_help_is_one_screen_with_every_study(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        measure.main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.count("\n") <= 45 and all(len(line) <= 120 for line in out.splitlines())
    assert all(f"\n  {name}" in out and what for name, what in names().items())
    assert measure.main(["sweeep"]) == 2 and "did you mean 'sweep'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kills", "thresholds", "points"),
    [pytest.param(3, "0,1", 10, id="3"), pytest.param(20, "0,1,2,4,8", 22, id="20", marks=pytest.mark.long)],
)
def test_ended_by_ctrl_c_and_killed_at_random_moments_it_resumes_to_the_same_table(
    tmp_path: Path, kills: int, thresholds: str, points: int
):
    grid = ["sweep", "--clusters", "4,8", "--top-m", "1,2", "--update-threshold", thresholds, "--runs", "3"]
    grid += ["--examples", "sort:6,chain:3,lookup:2"]
    killed, whole, log = tmp_path / "killed", tmp_path / "whole", tmp_path / "log"
    command = [*grid, "--out", str(killed), "--worker", worker(log)]
    signals = ",".join(["SIGINT", *kills * ["SIGKILL"]])
    driver = [sys.executable, "-P", str(TESTS / "measure_killer.py"), str(log), signals, *command]
    done = subprocess.run(driver, capture_output=True, text=True, check=True, timeout=120)
    stopped, *ends = json.loads(done.stdout.splitlines()[-1])
    assert stopped == {"signal": "SIGINT", "exit": 130, "table": False}
    assert "measurements are missing; the same command goes on" in done.stderr
    assert [end["exit"] for end in ends] == kills * [-9], "a kill came too late to hit anything"
    begun, kept = log.read_text().count("\n"), len(list((killed / "points").glob("*.json")))
    # Each of the ends may have cost the point that was being measured, and nothing more.
    assert begun - kills - 1 <= kept <= begun and kept < 3 * points
    assert measure.main(command) == 0
    assert measure.main([*grid, "--out", str(whole), "--worker", worker(tmp_path / "log of whole")]) == 0
    assert rows_of(killed) == rows_of(whole) and len(rows_of(killed)) == 3 * points * 3


def test_a_table_gives_back_the_written_rows(tmp_path: Path):
    rows = [
        {"a": 1, "b": 0.5, "c": "x", "d": {"e": [1, None]}, "f": True},
        {"a": 2, "b": 1, "c": 4, "g": 2**40},
    ]
    write_table(tmp_path / "t.parquet", rows, {"study": "s"})
    assert read_table(tmp_path / "t.parquet") == (rows, {"study": "s"})


def test_rounds_come_to_medians_ratios_and_a_floor():
    def row(point: str, run: int, speed: float, **more: Any) -> dict[str, Any]:
        head = {"point": point, "run": run, "stamp": "s", "took_s": run, "status": "ok", "why": None}
        return head | {"task": "sort", "correct": 3, "speed": speed} | more

    rows = [row("a", run, speed) for run, speed in enumerate((1.0, 2.0, 6.0))]
    rows += [row("b", run, speed) for run, speed in enumerate((2.0, 4.0, 6.0))]
    (one, two) = merged(rows, of=("task",), timed=("speed",))
    assert (one["speed"], one["runs"], two["speed"]) == (2.0, 3, 4.0) and one["speed_low"] == pytest.approx(1.4)
    assert paired(rows, "b", "a", "speed") == [2.0, 2.0, 1.0]
    assert noise_floor([1.1, 0.9, 1.0, 1.05, 1.0]) == {
        "pairs": 5,
        "p80": pytest.approx(0.1),
        "largest": pytest.approx(0.1),
    }
    with pytest.raises(ValueError, match="disagree: correct 2 after 3"):
        merged([*rows, row("a", 3, 1.0, correct=2)], of=("task",), timed=("speed",))
    beside = merged([row("a", 0, 1.0), row("a", 1, 2.0, theirs="x"), row("a", 2, 3.0)], timed=("speed",))
    assert [(each["theirs"], each["speed"], each["run"]) for each in beside] == [("x", 2.0, 0)]
    refused = {"point": "c", "run": 0, "status": "refused", "why": "no"}
    assert merged([refused], timed=("speed",)) == [refused]


def test_right_answers_have_an_interval():
    # Wilson's, from tables of the score interval.
    assert interval(52, 60) == pytest.approx((0.7583, 0.9308), abs=1e-4)
    assert interval(0, 10)[0] == 0 and interval(10, 10)[1] == 1


@pytest.mark.parametrize(
    ("both", "first", "second", "neither", "low", "high"),
    [
        (20, 12, 2, 16, 0.0562, 0.3292),  # Newcombe 1998, table II, method 10
        (280, 0, 0, 120, -0.0062, 0.0062),  # nothing differs
        (0, 5, 0, 0, 0.3855, 1.0),
    ],
)
def test_paired_answers_have_an_interval_of_their_difference(
    both: int, first: int, second: int, neither: int, low: float, high: float
):
    base = [True] * both + [True] * first + [False] * (second + neither)
    ours = [True] * both + [False] * first + [True] * second + [False] * neither
    share = (first - second) / len(base)
    assert drop(base, ours) == pytest.approx((share, low, high), abs=1e-4)
    assert drop(ours, base) == pytest.approx((-share, -high, -low), abs=1e-4)
    with pytest.raises(ValueError, match="cannot be paired"):
        drop(base, ours[1:])


def test_a_page_is_filled_between_its_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- /a -->\nafter")
    assert fill_marks(page, {"a": "new", "b": "no place"}) == ["a"]
    assert page.read_text() == "before\n<!-- a -->\nnew\n<!-- /a -->\nafter"
    assert between_marks(page.read_text(), "a") == "new"
    with pytest.raises(ValueError, match="<!-- b -->"):
        fill_marks(page, {"b": "x"})


def test_a_stored_command_names_no_path_outside_of_the_repository():
    given = ["bench/measure.py", "load", "--out", "/elsewhere/out", "--out=/elsewhere/out", f"{ROOT}/bench", "part=a,b"]
    assert command_line(given) == "python bench/measure.py load --out out --out=out bench part=a,b"
