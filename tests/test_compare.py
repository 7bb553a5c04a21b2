"""The rows of bench/compare.py, which of them a second run keeps, and that README.md shows what was measured."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tiered

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "compare.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of bench/, whose folder is on the path when it runs."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module


@pytest.fixture
def compare(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/compare.py with two questions of two examples."""
    module = script("compare")
    questions = (module.Question(task="sort", examples=1), module.Question(task="lookup", size=64, examples=2))
    monkeypatch.setattr(module, "QUESTIONS", questions)
    return module


@pytest.fixture
def run(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs it with some policies; returns what stands in its file, its last line, and the rows that were measured."""
    path = tmp_path / "results" / "compare.json"
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")

    def once(policies: str, *arguments: str) -> SimpleNamespace:
        measured: list[tuple[str, str]] = []
        measure = compare.measure

        def counted(runtime: Any, setting: Any, *given: Any) -> dict[str, Any]:
            measured.append((setting.variant.name, setting.commit))
            return measure(runtime, setting, *given)

        with monkeypatch.context() as patch:
            patch.setattr(compare, "measure", counted)
            patch.setattr(tiered, "from_pretrained", lambda *_, **__: runtime)
            patch.setattr(sys, "argv", ["compare.py", "--out", str(path), "--policies", policies, *arguments])
            compare.main()
        saved = json.loads(path.read_text())
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        return SimpleNamespace(path=path, saved=saved, rows=saved["rows"], last=last, measured=measured)

    return once


def test_rows_are_kept_as_long_as_what_they_rest_on_is_the_same(
    run: Callable[..., SimpleNamespace], compare: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    names = [(policy, commit) for commit in compare.NOISES["masks"].commits for policy in ("none", "dkv_greedy")]
    first = run("none,dkv_greedy")
    assert first.measured == 2 * names
    assert [(row["policy"], row["commit"]) for row in first.rows] == 2 * names
    # Random order goes with one commit rule alone: the row says so, and is asked again.
    refused = [row for row in first.rows if "why" in row]
    assert [(row["policy"], row["commit"]) for row in refused] == 2 * [("dkv_greedy", "threshold 0.9")]
    assert all("static" in row["why"] and "exact_match" not in row for row in refused)
    assert first.last["dkv_greedy"]["threshold 0.9"] == {"why": refused[0]["why"]}
    assert set(first.last["none"]["threshold 0.9"]["exact_match"]) == {"sort", "lookup"}

    again = run("none,dkv_greedy")
    assert again.measured == 2 * [("dkv_greedy", "threshold 0.9")]
    assert again.rows == first.rows
    # A run of other policies leaves what is there.
    other = run("fast_dllm_dual")
    assert set(other.measured) == {("fast_dllm_dual", commit) for commit in compare.NOISES["masks"].commits}
    assert [row for row in other.rows if row["policy"] != "fast_dllm_dual"] == first.rows
    # Options of one policy change: its rows go.
    changed = json.loads(other.path.read_text())
    changed["variants"]["fast_dllm_dual"]["options"]["refresh_interval"] = 3
    other.path.write_text(json.dumps(changed))
    assert {name for name, _ in run("none,fast_dllm_dual").measured} == {"fast_dllm_dual"}
    assert {name for name, _ in run("none", "--fresh").measured} == {"none"}
    # Other weights: all go.
    changed["weights_sha256"] = "of another model"
    other.path.write_text(json.dumps(changed))
    last = run("none")
    assert {name for name, _ in last.measured} == {row["policy"] for row in last.rows} == {"none"}


def test_a_quick_look_keeps_nothing_and_replaces_nothing(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    masks = replace(compare.NOISES["masks"], results=tmp_path / "compare.json")
    monkeypatch.setattr(compare, "NOISES", {"masks": masks})
    monkeypatch.setattr(sys, "argv", ["compare.py", "--quick", "--policies", "fast_dllm_dual"])
    compare.main()
    assert list(tmp_path.iterdir()) == []
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == ["fast_dllm_dual"] and list(last["fast_dllm_dual"]) == list(compare.NOISES["masks"].commits)
    for wrong in (["--quick", "--out", str(tmp_path / "compare.json")], ["--policies", "fast_dllm_duel"]):
        monkeypatch.setattr(sys, "argv", ["compare.py", *wrong])
        with pytest.raises(SystemExit):
            compare.main()


def test_a_row_counts_rows_as_the_policy_promises(run: Callable[..., SimpleNamespace]):
    rows = {row["policy"]: row for row in run("none,fast_dllm_dual").rows if row["commit"] == "one a step"}
    none, dual = rows["none"], rows["fast_dllm_dual"]
    assert none["cache_ratio"] == 0 and none["passes"].keys() == {"refresh"}
    passes, columns = dual["passes"], none["rows_per_forward"]
    recomputed = passes["refresh"] * columns + passes["step"] * 8
    forwards = passes["refresh"] + passes["step"]
    assert passes["step"] == 7 * passes["refresh"]
    assert dual["rows_per_forward"] == pytest.approx(recomputed / forwards, abs=0.06)
    assert dual["cache_ratio"] == pytest.approx(1 - recomputed / forwards / columns, abs=1e-3)
    assert dual["examples"] == 2 and dual["exact_match"] == dual["correct"] / 2
    assert dual["device_bytes"] > none["device_bytes"] and dual["moved_bytes"] == {}


def test_every_policy_and_preset_is_compared_beside_none_in_the_same_call(script: Callable[[str], ModuleType]):
    from tiered.policies.registry import POLICIES, PRESETS

    variants = {variant.name: variant for variant in script("variants").all_variants()}
    assert {variant.policy for variant in variants.values()} == {*POLICIES, *PRESETS}
    assert {*POLICIES, *PRESETS} <= set(variants)
    for variant in variants.values():
        reference = variants[variant.reference]
        assert reference.policy == "none"
        assert reference.call(answer=32, block=8) == variant.call(answer=32, block=8)
    # Its window slides over the whole answer.
    assert variants["elastic_cache"].call(answer=32, block=8) == {"max_new_tokens": 32, "block_length": 32}
    assert variants["fast_dllm_dual"].call(answer=32, block=8) == {"max_new_tokens": 32, "block_length": 8}
    assert variants["dkv_greedy"].call(answer=32, block=8)["remasking"] == "random"
    # Two rows of one policy would be one measured twice, but for a preset that gives an old thing a new name.
    made = [variant.make() for variant in variants.values() if variant.policy not in ("none", "uniform_prefix")]
    assert len(set(map(str, made))) == len(made)


def row(policy: str, task: str, commit: str, correct: int, **figures: Any) -> dict[str, Any]:
    """A row of ten examples."""
    long = {
        "size": None,
        "tokens_per_second": 1.0,
        "rows_per_forward": 2.0,
        "cache_ratio": 0.5,
        "passes": {"refresh": 1, "step": 3},
        "device_bytes": 1024,
        "host_bytes": 0,
        "moved_bytes": {"host->device": 3072, "device->host": 1024},
    }
    shown = {"exact_match": correct / 10, "nfe": 2.0, "tokens_per_forward": 4.0}
    return (
        {"policy": policy, "task": task, "commit": commit, "examples": 10, "correct": correct} | long | shown | figures
    )


RESULT = {
    "canvas": 32,
    "block": 8,
    "variants": {
        "none": {"policy": "none", "given": {}, "one_block": False, "random_order": False},
        "window": {"policy": "window", "given": {"width": 3}, "one_block": True, "random_order": False},
    },
    "rows": [
        row("none", "copy", "slow", 10),
        row("none", "insert", "slow", 5),
        row("none", "lookup", "slow", 9),
        row("none", "lookup", "slow", 1, size=992, nfe=6.0, tokens_per_second=12.34),
        row("none", "copy", "fast", 10),
        row("none", "lookup", "fast", 3, size=992, nfe=6.0),
        row("window", "copy", "slow", 7),
        row("window", "lookup", "slow", 1, size=992, host_bytes=2048),
        {"policy": "window", "task": "copy", "size": None, "commit": "fast", "examples": 10, "why": "too fast for it"},
    ],
}
COST = {
    "positions": 2048,
    "width": 512,
    "layers": 8,
    "policies": {"window": {"over_full": 0.01234, "over_floor": 1.567, "overhead": 1.1}},
}


def test_the_tables_say_what_the_rows_say(script: Callable[[str], ModuleType]):
    page = script("compare_page")
    lines = page.tables(RESULT, COST).splitlines()
    assert "| | lists, 20 | sort, 0 | add, 0 | chain, 0 | lookup, 10 | fast: all, 20 | NFE | TPF |" in lines
    # 15 of 20 lists; the long lookup is none of the lookups, but one of all: 13 of 20, (2 + 6) / 2 forwards.
    assert "| `none` | 75 | - | - | - | 90 | 65 | 4.00 | 4.00 |" in lines
    assert "| `window` | 70 | - | - | - | - | - | - | - |" in lines
    notes = "`window` answers in one block, and so does one row of `none`. `window` has `width=3`."
    assert f"{notes} `window`, fast: too fast for it." in " ".join(lines)
    assert max(map(len, lines)) <= 120
    assert "| `none` | 12.3 | 2.0 | 0.500 | 1.00 KiB | 0 | 1.00 KiB | - | - | - |" in lines
    assert "| `window` | 1.0 | 2.0 | 0.500 | 1.00 KiB | 2.00 KiB | 1.00 KiB | 0.0123 | 1.57 | 1.10 |" in lines
    without = page.tables(RESULT, None).splitlines()
    assert "| `window` | 1.0 | 2.0 | 0.500 | 1.00 KiB | 2.00 KiB | 1.00 KiB |" in without


def test_the_tables_are_put_between_the_marks(compare: ModuleType, script, tmp_path: Path, monkeypatch):
    module, page, file = script("compare_page"), tmp_path / "PAGE.md", tmp_path / "compare.json"
    file.write_text(json.dumps(RESULT))
    page.write_text("before\n\n<!-- compare -->\nold\n<!-- /compare -->\n\nbehind\n")
    monkeypatch.setattr(compare, "COSTS", tmp_path / "none.json")
    monkeypatch.setattr(sys, "argv", ["compare.py", "--out", str(file), "--table", str(page)])
    for _ in range(2):
        compare.main()
        text = page.read_text()
        assert text.startswith("before\n\n<!-- compare -->\n") and text.endswith("\n<!-- /compare -->\n\nbehind\n")
        assert module.between_marks(text, "compare") == module.tables(RESULT, None)
    page.write_text("no marks")
    with pytest.raises(ValueError, match="compare"):
        compare.main()


def test_the_readme_shows_what_was_measured(script: Callable[[str], ModuleType]):
    page = script("compare_page")
    shown = page.between_marks((ROOT / "README.md").read_text(), "compare")
    if not RESULTS.exists():
        assert not shown, "README.md has figures that no file holds"
        return
    cost = RESULTS.with_name("policy_cost.json")
    assert shown == page.tables(
        json.loads(RESULTS.read_text()), json.loads(cost.read_text()) if cost.exists() else None
    )


def test_the_noise_table_says_what_the_rows_say(script: Callable[[str], ModuleType]):
    page = script("compare_page")
    uniform = {"rows": [row("none", "copy", "slow", 6), {**RESULT["rows"][-1], "commit": "slow", "why": "no masks"}]}
    lines = page.noise_table({"masks": RESULT, "uniform": uniform}).splitlines()
    assert lines[0] == (
        "| | masks, slow: right, 40 | NFE | masks, fast: right, 20 | NFE | uniform, slow: right, 10 | NFE |"
    )
    # 25 of 40, forwards (2 + 2 + 2 + 6) / 4; 13 of 20, (2 + 6) / 2.
    assert "| `none` | 62.5 | 3.00 | 65 | 4.00 | 60 | 2.00 |" in lines
    assert "| `window` | 40 | 2.00 | - | - | - | - |" in lines
    assert lines[-1] == "`window`, uniform: no masks."


def test_a_window_that_slides_over_masks_is_the_block_where_there_are_none(script: Callable[[str], ModuleType]):
    sliding, whole = (
        {variant.name: variant for variant in script("variants").all_variants(slides=slides)}
        for slides in (True, False)
    )
    assert sliding["elastic_cache"].make().logit_rows(32, 64) < 32 == whole["elastic_cache"].make().logit_rows(32, 64)
    assert all(sliding[name] == whole[name] for name in sliding if name != "elastic_cache")


def test_the_policies_page_shows_what_was_measured(script: Callable[[str], ModuleType]):
    page = script("compare_page")
    files = {noise: each.results for noise, each in script("compare").NOISES.items()}
    results = {noise: json.loads(path.read_text()) for noise, path in files.items()}
    shown = page.between_marks((ROOT / "docs" / "policies.md").read_text(), "noise")
    assert shown == page.noise_table(results)
