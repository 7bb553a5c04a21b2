"""The table of C, M and T: what its cells say of a sweep's rows; docs/benchmarks.md shows what was measured."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/sweep_table.py, whose folder is on the path when it runs."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("sweep_table")


def row(clusters: int | None, threshold: int | None, correct: int, speed: float, **other: Any) -> dict[str, Any]:
    """A row of a sweep, as far as the table reads it."""
    policy = "none" if threshold is None else "polestar"
    knobs = {"clusters": clusters, "top_m": None if threshold is None else 4, "update_threshold": threshold}
    figures = {"correct": correct, "tokens_per_second": speed, "device_bytes": 1 << 20, "host_bytes": 0}
    return {"status": "ok", "task": "sort", "policy": policy} | knobs | figures | other


def test_a_cell_is_a_points_right_answers_and_the_middle_of_its_speeds(script: ModuleType):
    rows = [
        *(row(8, 0, 60, speed) for speed in (30.0, 10.0, 20.4)),
        row(8, 4, 52, 80.0, device_bytes=3 << 20, host_bytes=2048),
        row(None, 4, 50, 90.0),
        row(4, 0, 1, 1.0, status="refused"),
        row(8, 0, 9, 9.0, task="chain"),
        row(None, None, 59, 7.0),
        row(16, 0, 40, 5.0, top_m=1),
    ]
    assert script.table(rows).splitlines() == [
        "|  | T 0 | T 4 | device | host |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| C auto, M 4 | - | 50 (90) | 1.00 MiB | 0 |",
        "| C 8, M 4 | 60 (20) | 52 (80) | 3.00 MiB | 2.00 KiB |",
        "| C 16, M 1 | 40 (5) | - | 1.00 MiB | 0 |",
        "| `none` | 59 (7) |  | 1.00 MiB | 0 |",
    ]


def test_the_page_shows_what_was_measured(script: ModuleType):
    shown = script.between_marks(script.PAGE.read_text(), script.MARK)
    assert shown == script.table(script.read_parquet(script.ROWS))


def test_the_readme_says_what_the_table_shows(script: ModuleType):
    rows = [row for row in script.read_parquet(script.ROWS) if row["task"] == "sort"]
    right, speed = {}, {}
    for each in rows:
        knobs = each["clusters"], each["top_m"], each["update_threshold"]
        right[knobs], speed[knobs] = each["correct"], each["tokens_per_second"]
    whole, four_of_eight = ([right[clusters, 4, threshold] for threshold in (0, 1, 2, 4, 8)] for clusters in (4, 8))
    less = [right[knobs] for knobs in right if None not in knobs and knobs[:2] not in ((4, 4), (8, 4))]
    assert (min(whole), max(whole), min(four_of_eight), max(four_of_eight), max(less)) == (50, 60, 43, 48, 40)
    assert next(each["correct"] for each in rows if each["policy"] == "fast_dllm_dual") == 38
    assert [right[4, 4, threshold] for threshold in (0, 1, 4)] == [60, 57, 52]
    assert speed[4, 4, 4] / speed[4, 4, 0] == pytest.approx(1.5, abs=0.05)
    assert speed[None, 4, 4] / speed[4, 4, 4] == pytest.approx(1.6, abs=0.05)


@pytest.mark.parametrize("wrong", ["no rows", "no marks"])
def test_what_cannot_be_done_is_named(
    wrong: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page, rows = tmp_path / "page.md", tmp_path / "rows.parquet"
    page.write_text("nothing to fill")
    rows.write_text("no Parquet")
    given = {"no rows": rows, "no marks": script.ROWS}[wrong]
    monkeypatch.setattr(sys, "argv", ["sweep_table.py", "--rows", str(given), "--page", str(page)])
    with pytest.raises(SystemExit):
        script.main()
    assert {"no rows": "no Parquet", "no marks": "<!-- sweep -->"}[wrong] in capsys.readouterr().err
    assert page.read_text() == "nothing to fill"
