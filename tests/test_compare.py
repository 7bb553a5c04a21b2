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


@pytest.fixture(scope="module")
def answered() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by what was asked. But for its times a row is the same every time: each is measured once."""
    return {}


@pytest.fixture
def compare(
    answered: dict[tuple[Any, ...], dict[str, Any]],
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> ModuleType:
    """bench/compare.py with two questions of two examples."""
    module = script("compare")
    measure = module.measure

    def once(runtime: Any, setting: Any, *given: Any) -> dict[str, Any]:
        key = (setting.variant.name, str(setting.question), setting.commit, str(given))
        if key not in answered:
            answered[key] = measure(runtime, setting, *given)
        return dict(answered[key])

    monkeypatch.setattr(module, "measure", once)
    asked = script("comparing.questions")
    questions = (asked.Question(task="sort", examples=1), asked.Question(task="lookup", size=64, examples=2))
    monkeypatch.setattr(asked, "QUESTIONS", questions)
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
        told = capsys.readouterr()
        last = json.loads(told.out.splitlines()[-1])
        return SimpleNamespace(path=path, saved=saved, rows=saved["rows"], last=last, measured=measured, err=told.err)

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
    assert {name for name, _ in run("fast_dllm_dual,dkv_greedy").measured} == {"fast_dllm_dual", "dkv_greedy"}
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


def test_rounds_are_interleaved_and_ratios_are_of_one_round(
    run: Callable[..., SimpleNamespace], compare: ModuleType, script: Callable[[str], ModuleType], monkeypatch
):
    # The longest question asked is the one whose speed is shown.
    monkeypatch.setattr(script("comparing.summary"), "LONG", ("lookup", 64))
    # Speeds of a machine that is half as fast in the second round: no ratio may cross rounds.
    pace = {"none": 10.0, "none, again": 11.0, "fast_dllm_dual": 40.0}
    measure, slow = compare.measure, {}

    def timed(runtime: Any, setting: Any, *given: Any) -> dict[str, Any]:
        key = (setting.variant.name, setting.question, setting.commit)
        slow[key] = slow.get(key, 0) + 1
        found = measure(runtime, setting, *given)
        return found | {"tokens_per_second": pace[setting.variant.name] / slow[key]}

    monkeypatch.setattr(compare, "measure", timed)
    out = run("none,none, again,fast_dllm_dual", "--rounds", "2")
    group = list(pace)
    commits = list(compare.NOISES["masks"].commits)
    assert out.measured == 2 * (2 * [(name, commit) for commit in commits for name in group])
    assert [(each["policy"], each["commit"]) for each in out.rows] == 2 * [
        (name, commit) for commit in commits for name in group
    ]
    by_policy = {each["policy"]: each for each in out.rows}
    dual = by_policy["fast_dllm_dual"]
    assert dual["rounds"] == 2 and len({sample["session"] for sample in dual["samples"]}) == 1
    assert dual["tokens_per_second"] == 30 and (dual["low"], dual["high"]) == (24, 36)
    assert (dual["speedup"], dual["speedup_low"], dual["speedup_high"]) == (4, 4, 4)
    assert by_policy["none, again"]["speedup"] == 1.1 and "speedup" not in by_policy["none"]
    # Two commit rules, two rounds, lookups alone.
    floor = {"pairs": 4, "p80": 0.1, "largest": 0.1}
    assert out.saved["noise_floor"] == out.last["noise_floor"] == floor
    assert out.last["fast_dllm_dual"]["one a step"]["speedup"] == 4

    # A third round is of another session, and has ratios of its own.
    slow.clear()
    pace["fast_dllm_dual"] = 60.0
    more = run("none,none, again,fast_dllm_dual", "--rounds", "3")
    assert len(more.measured) == len(out.measured) / 2
    dual = {each["policy"]: each for each in more.rows}["fast_dllm_dual"]
    assert [sample["round"] for sample in dual["samples"]] == [0, 1, 2]
    assert dual["speedup"] == 4 and dual["speedup_high"] == 4 + 0.6 * 2
    # What is measured alone later has no ratio; beside `none` it gets one, and `none` another sample.
    alone = run("fast_dllm_dual", "--fresh")
    assert "speedup" not in {each["policy"]: each for each in alone.rows}["fast_dllm_dual"]
    beside = run("none,fast_dllm_dual", "--rounds", "2")
    assert set(beside.measured) == {(name, commit) for name in ("none", "fast_dllm_dual") for commit in commits}
    rows = {each["policy"]: each for each in beside.rows}
    assert len(rows["none"]["samples"]) == 4 and rows["fast_dllm_dual"]["rounds"] == 2
    assert rows["fast_dllm_dual"]["speedup"] == rows["fast_dllm_dual"]["speedup_high"]


def test_rounds_that_answer_otherwise_are_an_error(
    run: Callable[..., SimpleNamespace], compare: ModuleType, monkeypatch, capsys
):
    first = run("none")
    measure = compare.measure
    monkeypatch.setattr(compare, "measure", lambda *given: measure(*given) | {"nfe": 1.5})
    with pytest.raises(SystemExit) as stopped:
        run("none", "--rounds", "2")
    assert stopped.value.code == 1
    told = capsys.readouterr().err
    assert f"none, sort, one a step: rounds disagree (nfe 1.5 after {first.rows[0]['nfe']}" in told
    assert json.loads(first.path.read_text())["rows"] == first.rows


def test_rows_from_before_there_were_rounds_are_still_good(run: Callable[..., SimpleNamespace]):
    out = run("none")
    new = ("samples", "low", "high", "rounds")
    old = [{name: value for name, value in each.items() if name not in new} for each in out.rows]
    out.path.write_text(json.dumps(out.saved | {"rows": old}))
    kept = run("none")
    assert kept.measured == [] and "noise_floor" not in kept.last
    # More rounds than one are measured as a whole.
    assert [each["rounds"] for each in run("none", "--rounds", "2").rows] == 4 * [2]


def test_damaged_rows_are_named_and_measured_again(run: Callable[..., SimpleNamespace], capsys):
    out = run("none")
    for number, damage in enumerate(
        ({"correct": 7}, {"exact_match": "all"}, {"device_bytes": -1}, {"policy": None}, {"samples": [{"round": 0}]})
    ):
        rows = [dict(each) for each in out.rows]
        rows[number % 4] |= damage
        out.path.write_text(json.dumps(out.saved | {"rows": rows}))
        again = run("none")
        assert len(again.measured) == 1 and [each["nfe"] for each in again.rows] == [each["nfe"] for each in out.rows]
    out.path.write_text(json.dumps(out.saved | {"rows": [*out.rows, "a line of another file"]}))
    more = run("none")
    assert more.measured == [] and "rows 5 are damaged" in more.err
    out.path.write_text(out.path.read_text()[:300])
    with pytest.raises(SystemExit):
        run("none")
    assert "compare.json is damaged" in capsys.readouterr().err
    assert out.path.stat().st_size == 300


def test_names_with_commas_are_names(compare: ModuleType, script: Callable[[str], ModuleType]):
    known = compare.compared("embedded")
    names = [variant.name for variant in known]
    assert names[:2] == ["none", "none, again"] and "transformers, quantized hqq" in names
    assert [variant.name for variant in compare.chosen("none,none, one block, polestar,none", known)] == [
        "none",
        "none, one block",
        "polestar",
    ]
    assert [variant.name for variant in compare.chosen(",".join(names), known)] == names
    assert not [variant for variant in compare.compared("embedded-uniform") if hasattr(variant, "kind")]
    with pytest.raises(ValueError, match="no policy 'pole'"):
        compare.chosen("none,pole", known)
    references = {variant.reference for variant in known}
    assert references <= set(names)


def test_the_spread_of_speeds(script: Callable[[str], ModuleType]):
    module = script("comparing.rounds")
    assert module.percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 3.5, 5.0)
    samples = [{"session": "a", "round": number, "tokens_per_second": 10.0 + number} for number in range(2)]
    other = [{"session": "b", "round": 0, "tokens_per_second": 99.0}]
    row = {"policy": "x", "samples": [*samples, *other]}
    elsewhere = {"session": "c", "round": 0, "tokens_per_second": 3.0}
    reference = {"policy": "none", "samples": [{**samples[1], "tokens_per_second": 5.5}, elsewhere]}
    assert module.paired_ratios(row, reference) == [2.0]
    assert module.paired_ratios(row, None) == [] == module.paired_ratios({"policy": "x"}, reference)
    idle = {"policy": "none", "samples": [{**samples[1], "tokens_per_second": 0.0}]}
    assert module.paired_ratios(row, idle) == []
    assert module.noise_floor([], lambda row: True) is None


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
    page = script("comparing.page")
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


def test_the_tables_show_ratios_noise_and_what_was_counted(script: Callable[[str], ModuleType]):
    page = script("comparing.page")
    spread = {"low": 1.0, "high": 2.0, "rounds": 3, "speedup": 5.0, "speedup_low": 4.5, "speedup_high": 5.25}
    rows = [
        row("none", "copy", "slow", 10),
        row("none", "lookup", "slow", 1, size=992, rounds=3, low=1.0, high=2.0),
        row("transformers, cache", "copy", "slow", 10),
        row("transformers, cache", "lookup", "slow", 1, size=992, bytes="counted", **spread),
        *(
            {"policy": "transformers, offloaded", "task": "copy", "size": None, "commit": commit, "examples": 10}
            | {"why": "no CUDA"}
            for commit in ("slow", "fast")
        ),
        row("none", "copy", "fast", 10),
    ]
    options = {"given": {}, "one_block": False, "random_order": False}
    baselines = {name: {"policy": "transformers", "baseline": True, **options} for name in ("transformers, cache",)}
    result = RESULT | {"rows": rows, "variants": {"none": RESULT["variants"]["none"], **baselines}}
    result |= {"noise_floor": {"pairs": 6, "p80": 0.0123, "largest": 0.05}}
    text = page.tables(result, None)
    lines, joined = text.splitlines(), " ".join(text.split())
    assert "| | tokens/s | over `none` | rows a step | from cache | device | host | moved a step |" in lines
    assert "| `none` | 1.0 | - | 2.0 | 0.500 | 1.00 KiB | 0 | 1.00 KiB |" in lines
    assert "| `transformers, cache` | 1.0 | 5.00 (4.50–5.25) | 2.0 | 0.500 | ≥ 1.00 KiB | 0 | 1.00 KiB |" in lines  # noqa: RUF001
    # Refused under every commit rule: one sentence, without the rule.
    assert "`transformers, offloaded`: no CUDA." in joined and "slow and fast: no CUDA" not in joined
    assert "Speed is the median of 3 rounds; over `none` in the same call and round, with the 20th to 80th" in joined
    assert "6 such pairs are apart by 1.2 % at the 80th percentile, by 5.0 % at most" in joined
    assert "Bytes after ≥ are counted" in joined
    assert "transformers" not in page.noise_table(
        {"masks": result | {"variants": baselines | {"transformers, offloaded": baselines["transformers, cache"]}}}
    )
    # No column and no word of what no row has.
    plain = page.tables(RESULT, None)
    assert "over `none`" not in plain and "Speed is" not in plain and "≥" not in plain


def test_the_tables_are_put_between_the_marks(compare: ModuleType, script, tmp_path: Path, monkeypatch, capsys):
    module, page, file = script("comparing.page"), tmp_path / "PAGE.md", tmp_path / "compare.json"
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
    with pytest.raises(SystemExit):
        compare.main()
    assert "has no <!-- compare -->" in capsys.readouterr().err
    page.write_text("<!-- compare -->\n<!-- /compare -->\n")
    shortened = {**RESULT, "rows": [*RESULT["rows"], {**row("none", "copy", "slow", 10), "correct": 11}]}
    for text, told in (
        ('{"rows": [', "compare.json is damaged"),
        ("[]", "holds no list of 'rows'"),
        (json.dumps(shortened), "rows 10 are damaged"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            compare.main()
        assert told in capsys.readouterr().err
        assert page.read_text() == "<!-- compare -->\n<!-- /compare -->\n"
    file.unlink()
    with pytest.raises(SystemExit):
        compare.main()
    assert "No such file" in capsys.readouterr().err


def test_the_pages_show_what_was_measured(script: Callable[[str], ModuleType]):
    page, cost = script("comparing.page"), json.loads(RESULTS.with_name("policy_cost.json").read_text())
    measured = json.loads(RESULTS.read_text())
    shown = page.between_marks((ROOT / "docs" / "benchmarks.md").read_text(), "compare")
    assert shown == page.tables(measured, cost)
    assert page.between_marks((ROOT / "README.md").read_text(), "short") == page.short_table(measured)


def test_the_noise_table_says_what_the_rows_say(script: Callable[[str], ModuleType]):
    page = script("comparing.page")
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
    page = script("comparing.page")
    files = {noise: each.results for noise, each in script("compare").NOISES.items()}
    results = {noise: json.loads(path.read_text()) for noise, path in files.items()}
    shown = page.between_marks((ROOT / "docs" / "policies.md").read_text(), "noise")
    assert shown == page.noise_table(results)
