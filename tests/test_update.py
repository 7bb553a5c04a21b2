"""The study `update`: calls beside an earlier checkout's, times by kind of forward, launches, and its last line."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import measure
import pytest
from baselines.asked import PeerError
from baselines.checkout import Checkout
from baselines.matches import official_of
from measuring.point import Job
from measuring.process import BENCH
from measuring.store import Store, locked
from measuring.study import points_of, study_named
from workloads.models import save_random

pytestmark = pytest.mark.usefixtures("few_slots")

study = study_named("update")
COMMON = {"device": "cpu", "seed": 0}
NOWHERE: dict[str, Any] = {"before": None, "official": {"code": None, "python": None}}
TINY = {"size": ["40:2:4"], "width": [64], "layers": [3], "threads": [1], "policy": ["fast_dllm_dual", "polestar"]}


def settings_of(**axes: Any) -> list[dict[str, Any]]:
    return [dict(point.settings) for point in points_of(study, study.AXES | axes, COMMON)]


def test_a_point_is_a_policy_at_a_size_and_a_number_of_threads():
    launches, *seconds = settings_of()
    assert launches["part"] == "launches" and len(launches["policies"]) == 7
    policies = {name: of for point in seconds for name, of in point["policies"].items()}
    assert policies == launches["policies"]
    assert [(point["size"], point["threads"], *point["policies"]) for point in seconds] == [
        *product(("2048:4:32", "8192:8:8"), (1, 2), launches["policies"])
    ]
    assert seconds[-1]["prompt"] == 8192 and seconds[-1]["blocks"] == seconds[-1]["steps"] == 8
    assert list(policies)[:2] == ["fast_dllm_dual", "polestar"] == study.QUICK["policy"]
    assert policies["polestar-drift"] == ("polestar", {"refresh": "drift", "refresh_blocks": 64})
    for axis, bad in (("size", "2048"), ("size", "8:0:1"), ("policy", "polestarr"), ("part", "second"), ("threads", 0)):
        with pytest.raises(ValueError, match=str(bad)):
            settings_of(**{axis: [bad]})


def test_threads_are_an_axis_and_other_checkouts_stand_in_no_row_and_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "other"
    given = [
        "--threads",
        "1,3",
        "--size",
        "64:1:8",
        "--part",
        "seconds",
        "--policy",
        "polestar",
        "--before",
        str(other),
    ]
    (other / "tiered").mkdir(parents=True)
    (other / "tiered" / "__init__.py").touch()
    args = measure.parser_of(study).parse_args(given)
    points, local = measure.plan(study, args)
    assert [point.settings["threads"] for point in points] == [1, 3]
    assert local == NOWHERE | {"before": str(other)}
    assert str(other) not in json.dumps([dict(point.settings) for point in points])
    monkeypatch.setattr("sys.argv", ["bench/measure.py", "update", *given])
    assert measure.command_of(args).endswith("--before PATH")
    args = measure.parser_of(study).parse_args(["--before", str(tmp_path)])
    with pytest.raises(ValueError, match="--before"):
        measure.plan(study, args)


def test_official_code_stands_beside_the_policies_of_its_algorithm():
    beside = {name: official_of(name) for name in study.POLICIES}
    assert {name: peer and peer[0] for name, peer in beside.items()} == {
        "fast_dllm_dual": "fast_dual",
        "polestar": "polestar",
        "polestar-drift": None,
        "polestar-window": "polestar",
        "dllm_cache": "dllm_cache",
        "dkv_pd": "dkv_decode",
        "dkv_decode": "dkv_decode",
    }


@pytest.mark.long
def test_a_round_has_every_call_beside_that_of_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    points, made = points_of(study, study.AXES | TINY | {"part": ["seconds"]}, COMMON), []
    with locked(tmp_path):
        store = Store(tmp_path, points)
        for point in points:
            rows = study.measure(point.settings, **NOWHERE | {"before": str(BENCH.parent)})
            made += store.add(Job(point), [{"status": "ok"} | row for row in rows], 1.0, {})
        store.merge("")
    json.dumps(made, allow_nan=False)
    dual, polestar = (row for row in made if "kind" not in row)
    assert (dual["rows"], dual["forwards"]) == (2 * 104 + 6 * 32, 8) and polestar["rows"] > dual["rows"]
    for row in (dual, polestar):
        assert row["same_tokens"] == 1 and row["over_before"] == pytest.approx(row["seconds"] / row["before_seconds"])
        assert row["floor_seconds"] == pytest.approx(row["full_seconds"] * row["rows"] / 104)
        kinds = [each for each in made if each["policy"] == row["policy"] and "kind" in each and "op" not in each]
        assert sum(kind["forwards"] for kind in kinds) == 8
        assert sum(kind["forwards"] * kind["rows"] for kind in kinds) == pytest.approx(row["rows"])
        assert 0 < sum(kind["forwards"] * kind["ms"] for kind in kinds) <= 1e3 * row["seconds"]
        for kind in kinds:
            own = [each for each in made if each.get("kind") == kind["kind"] and each["policy"] == row["policy"]]
            of = [each for each in own if "op" in each]
            assert {"qkv", "mlp", "attention"} < {each["op"] for each in of}
            assert 0 < sum(each["ms"] for each in of) <= kind["ms"]
            assert 0 < sum(each["before_ms"] for each in of) <= kind["before_ms"]
    assert measure.main(["update", "--show", "--out", str(tmp_path)]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| `polestar` 40:2:4, threads 1 |") and "100%" in line for line in shown)
    assert any(line.startswith("| `polestar` 40:2:4, threads 1: update |") for line in shown)
    ratios = {"time": polestar["seconds"] / dual["seconds"], "rows": polestar["rows"] / dual["rows"]}
    said = json.loads(last)
    assert {name: said[f"polestar_over_dual_{name}"] for name in ratios} == pytest.approx(ratios, abs=1e-3)
    assert said["rows"] == len(made) and said["two_threads_over_one"] is None


@pytest.mark.long
def test_launches_are_counted_of_both_checkouts():
    (point,) = settings_of(part=["launches"], policy=["fast_dllm_dual"])
    rows = list(study.measure(point, **NOWHERE | {"before": str(BENCH.parent)}))
    assert {(row["policy"], row["kind"]) for row in rows} == {("fast_dllm_dual", kind) for kind in ("refresh", "step")}
    assert all(
        row["launches"] == row["before_launches"] > 0 and row["reads"] == row["before_reads"] == 0 for row in rows
    )


@pytest.mark.slow
def test_a_failure_in_another_checkout_ends_with_its_reason(tmp_path: Path):
    with pytest.raises(PeerError, match="another checkout"):
        Checkout(tmp_path)
    (tmp_path / "tiered").mkdir()
    (tmp_path / "tiered" / "__init__.py").write_text("raise ImportError('too old')")
    with pytest.raises(PeerError, match="exit status 1"):
        Checkout(tmp_path)


@pytest.mark.long
def test_another_checkout_goes_on_after_a_failed_call(tmp_path: Path):
    save_random(tmp_path, 64, 1, 16)
    with Checkout(BENCH.parent, tmp_path) as checkout:
        with pytest.raises(PeerError, match="polestarr"):
            checkout.call([1, 2], "polestarr", {}, {"max_new_tokens": 4})
        assert len(checkout.call([1, 2], "none", {}, {"max_new_tokens": 4})["tokens"]) == 4


@pytest.fixture
def call() -> Callable[..., dict[str, Any]]:
    """Makes a row of a call."""

    def make(policy: str, seconds: float, *, run: int = 0, size: str = "2048:4:32", threads: int = 1, **more: Any):
        of = {"part": "seconds", "point": f"{size} {threads}", "run": run, "status": "ok", "size": size}
        figures = {"seconds": seconds, "rows": 100 * len(policy), "over_floor": 2.0}
        return of | {"threads": threads, "prompt": int(size.split(":")[0]), "policy": policy} | figures | more

    return make


def launched(policy: str, kind: str, launches: float, **more: Any) -> dict[str, Any]:
    of = {"part": "launches", "point": "l", "run": 0, "status": "ok", "threads": 1, "policy": policy, "kind": kind}
    return of | {"launches": launches, "reads": 5.0} | more


def test_the_tables_have_earlier_figures_missing_points_and_operations(call: Callable[..., dict[str, Any]]):
    official = {"official": "polestar", "official_why": "no folder polestar"}
    times = {"kind": "update", "forwards": 2, "rows": 64.0}
    rows = [
        launched("polestar", "update", 420.0, before_launches=430.0, before_reads=6.0),
        launched("polestar", "update", 300.0, op="drift", before_launches=310.0),
        launched("polestar", "update", 1.0, op="embed", before_launches=1.0),
        call("polestar", 3.0, before_seconds=6.0, over_before=0.5, same_tokens=1.0, before_commit="abc", **official),
        call("polestar", 1.0, threads=2, over_official=0.25, official="x", official_seconds=4.0, commits={"x": "def"}),
        {**call("polestar", 0.0, before_ms=9.0, ms=8.0, **times)},
        {**call("polestar", 0.0, ms=6.0, before_ms=7.0, kind="update", op="mlp")},
        {"part": "seconds", "point": "b", "run": 0, "threads": 1, "status": "failed", "why": "killed"},
    ]
    tables = study.tables(rows)
    assert tables["update"].splitlines()[2:] == [
        "| `polestar` 2048:4:32, threads 1 | 800 | 3.00 | 2.00 | 6.00 | 0.50 | 100% |  |  |",
        "| `polestar` 2048:4:32, threads 2 | 800 | 1.00 | 2.00 |  |  |  | 4.00 | 0.25 |",
        "",
        "before abc, x def",
        "",
        "`official, polestar`: no folder polestar.",
        "",
        "seconds failed: killed.",
    ]
    (line,) = tables["update_times"].splitlines()[2:]
    assert line == "| `polestar` 2048:4:32, threads 1: update | 2 | 64 | 8.0 | 9.0 | mlp 7.0 → 6.0 |"
    (line,) = tables["update_launches"].splitlines()[2:]
    assert line == "| `polestar`: update | 420 | 430 | drift 310 → 300 | 5 | 6 |"


def test_the_last_line_takes_ratios_within_a_round(call: Callable[..., dict[str, Any]]):
    missing = study.last_line([])
    assert set(missing.values()) == {None} and len(missing) == 6
    rows = [launched("polestar", "update", 420.0), launched("polestar", "step", 40.0)]
    # A slow second round moves no ratio.
    for run, slow in enumerate((1, 10, 1)):
        rows += [call("fast_dllm_dual", 2.0 * slow, run=run), call("polestar", 5.0 * slow, run=run)]
        rows += [call("polestar", 8.0 * slow, run=run, threads=2)]
        rows += [
            call(name, s * slow, run=run, size="8192:8:8") for name, s in (("polestar-drift", 3.0), ("dkv_pd", 2.0))
        ]
    assert study.last_line(rows) == {
        "polestar_over_dual_time": 2.5,
        "polestar_over_dual_rows": round(8 / 14, 3),
        "polestar_drift_over_dkv_pd_time": 1.5,
        "two_threads_over_one": 1.6,
        "update_launches_per_layer": 420.0,
        "host_reads_in_layers": 5.0,
    }
