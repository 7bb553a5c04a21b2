"""bench/report.py: what it reads and leaves out, what it says of it, and what it writes."""

import importlib
import itertools
import json
import random
import re
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ("memory", "compare", "overlap", "ops", "throughput")
KNOB_FIGURES = ["accuracy", "tokens_per_second", "device_bytes", "moved"]
ALL = ["pareto", *KNOB_FIGURES, "bytes_over_steps", "copies", "drift", "operations", "throughput"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports from bench/ and from beside this file, whose folders are on the path when scripts run."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.syspath_prepend(ROOT / "tests")
    return importlib.import_module


@pytest.fixture
def made(load: Callable[[str], Any]) -> ModuleType:
    return load("report_inputs")


@pytest.fixture
def run(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Runs it on what lies in `tmp_path`; returns its last line, and the files as text."""

    def once(*arguments: str, images: bool = False) -> SimpleNamespace:
        given = [part for name in INPUTS for part in (f"--{name}", str(tmp_path / f"{name}.json"))]
        command = ["report.py", str(tmp_path / "sweep"), *given, "--out", str(tmp_path / "out"), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with monkeypatch.context() as patch:
            if not images:  # which take most of the time
                patch.setattr(
                    load("report"),
                    "images",
                    lambda figure: {f"{figure.name}.png": b"png", f"{figure.name}.svg": b"<svg/>"},
                )
            load("report").main()
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        out = tmp_path / "out"
        return SimpleNamespace(
            last=last, out=out, page=(out / "report.html").read_text(), text=(out / "report.md").read_text()
        )

    return once


def test_all_files_are_written_and_whole(run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path):
    made.write_all(tmp_path)
    done = run(images=True)
    images = [f"{name}.{kind}" for name in ("accuracy", "bytes_over_steps", "pareto") for kind in ("png", "svg")]
    assert done.last == {
        "files": sorted([*images, "report.html", "report.md"]),
        "figures": ALL,
        "gaps": [],
        "skipped": 0,
    }
    assert sorted(path.name for path in done.out.iterdir()) == done.last["files"]
    for name in images:
        data = (done.out / name).read_bytes()
        if name.endswith("png"):
            assert data.startswith(b"\x89PNG") and len(data) > 10_000
        else:
            drawing = xml.etree.ElementTree.fromstring(data)
            # Files stand alone: colours are there, not names of colours.
            assert drawing.tag.endswith("svg") and b"var(" not in data and b"#" in data
        assert (f"]({name})" in done.text) == name.endswith("svg")
    assert len(done.page) < 3_000_000


def test_no_input_at_all_is_a_page_of_gaps(run: Callable[..., SimpleNamespace]):
    done = run()
    assert done.last["figures"] == [] and done.last["files"] == ["report.html", "report.md"]
    missing = ["sweep/rows.parquet is not there", *(f"/{name}.json was not given" for name in INPUTS)]
    for words in missing:
        assert any(gap.endswith(words) for gap in done.last["gaps"]), words
        assert words in done.page and words in done.text
    assert len(done.last["gaps"]) == len(missing)
    assert "There is nothing to show yet." in done.page
    for name in ("sweep", "memory", "overlap", "ops", "throughput", "compare"):
        assert f"python bench/{name}.py" in done.page


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("memory", {"bytes_over_steps", "drift"}),
        ("ops", {"operations"}),
        ("throughput", {"throughput"}),
        ("compare", set()),
        ("overlap", set()),
    ],
)
def test_a_missing_input_takes_its_own_figures_alone(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, name: str, gone: set[str]
):
    made.write_all(tmp_path)
    (tmp_path / f"{name}.json").unlink()
    done = run()
    assert set(ALL) - set(done.last["figures"]) == gone
    assert [gap.rpartition("/")[2] for gap in done.last["gaps"]] == [f"{name}.json was not given"]


def test_an_empty_sweep_is_a_gap(run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path):
    made.write_all(tmp_path)
    made.write_sweep(tmp_path / "sweep", [])
    done = run()
    assert done.last["gaps"] == ["sweep/rows.parquet has no row that can be shown"]
    assert not set(KNOB_FIGURES) & set(done.last["figures"]) and "pareto" in done.last["figures"]


def test_a_sweep_of_refusals_alone_says_why(run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path):
    rows = [row for row in made.sweep_rows() if row["status"] == "refused"]
    others = [row | {"point": "f" * 16, "update_threshold": 4} for row in rows]
    made.write_sweep(tmp_path / "sweep", rows + others)
    done = run()
    assert set(done.last["figures"]) == set(KNOB_FIGURES)
    assert "too few points have a figure" in done.page and "needs 3 MiB of &lt;b&gt;device" in done.page
    assert "2 points of 2 without figures" in done.page


def changed(row: int, **values: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Changes a row of a list."""
    return lambda rows: rows[row].update(values)


@pytest.mark.parametrize(
    ("change", "place", "why"),
    [
        (changed(0, exact_match=1.7), "row 0", "exact_match"),
        (changed(1, device_bytes=-5), "row 1", "device_bytes = -5"),
        (changed(2, tokens_per_second=float("nan")), "row 2", "tokens_per_second = nan"),
        (changed(3, correct=99), "row 3", "99 of 10"),
        (changed(4, status="fine"), "row 4", "status = 'fine'"),
        (changed(5, model="stranger"), "row 5", "foreign: model is 'stranger', the sweep's is 'embedded'"),
        (changed(6, policy_options="{"), "row 6", "no JSON object"),
        (changed(7, clusters=99), "row 7", "other settings in an earlier row"),
        (lambda rows: rows.append(dict(rows[0])), "row 36", "the same point, run and task as row 0"),
    ],
)
def test_a_bad_row_of_a_sweep_is_left_out_and_named(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, change: Any, place: str, why: str
):
    rows = made.sweep_rows()
    change(rows)
    made.write_sweep(tmp_path / "sweep", rows)
    done = run()
    assert done.last["skipped"] == 1
    assert set(KNOB_FIGURES) <= set(done.last["figures"])
    line = next(line for line in done.text.splitlines() if line.startswith("| sweep/rows.parquet"))
    assert f"| {place} |" in line and why in re.sub(r"\\(.)", r"\1", line)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(b"no parquet"), "no Parquet"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "no Parquet"),
        (lambda path: path.write_bytes(b""), "no Parquet"),
    ],
)
def test_a_spoilt_table_is_a_gap(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, spoil: Any, why: str
):
    made.write_all(tmp_path)
    spoil(tmp_path / "sweep" / "rows.parquet")
    done = run()
    assert done.last["skipped"] == 1 and done.last["gaps"] == ["sweep/rows.parquet cannot be used"]
    assert why in done.text and str(tmp_path) not in done.text.replace(str(tmp_path / "out"), "").split("This page")[0]


@pytest.mark.parametrize("column", ["device_bytes", "task", "update_threshold"])
def test_a_table_with_a_column_missing_or_of_another_type_is_a_gap(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, column: str
):
    made.write_sweep(tmp_path / "sweep", made.sweep_rows())
    path = tmp_path / "sweep" / "rows.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns([column]), path)
    assert f"no column {column}".replace("_", r"\_") in run().text
    number = table.column_names.index(column)
    other = pyarrow.array(["1"] * table.num_rows) if column != "task" else pyarrow.array([1] * table.num_rows)
    pyarrow.parquet.write_table(table.set_column(number, column, other), path)
    assert f"column {column} is".replace("_", r"\_") in run().text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "is not there"),
        ("{", "cannot be read as JSON"),
        ("[]", "is not of the schema"),
        ('{"schema": "another 1"}', "is not of the schema"),
    ],
)
def test_a_bad_record_of_the_run_leaves_the_rows(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, text: str | None, why: str
):
    made.write_sweep(tmp_path / "sweep", made.sweep_rows())
    path = tmp_path / "sweep" / "run.json"
    path.unlink() if text is None else path.write_text(text)
    done = run()
    assert done.last["skipped"] == 1 and f"| sweep/run.json | all of it | {why}" in done.text
    assert set(KNOB_FIGURES) <= set(done.last["figures"])


def test_what_the_sweep_left_out_is_told(run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path):
    made.write_sweep(tmp_path / "sweep", made.sweep_rows())
    path = tmp_path / "sweep" / "run.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"skipped": [{"file": "points/x.json", "why": "cut off"}]})
    )
    assert "| points/x.json | all of it | by the sweep: cut off |" in run().text


def inside(*names: Any, **values: Any) -> Callable[[dict[str, Any]], None]:
    """Changes an object within nested lists and objects."""

    def change(content: Any) -> None:
        for name in names:
            content = content[name]
        content.update(values)

    return change


BAD_JSON: list[tuple[str, Callable[[dict[str, Any]], Any], str, str]] = [
    ("memory", inside("calls", 0, positions="many"), "call 0", "positions is 'many', not a whole number"),
    ("memory", inside("calls", 0, "timeline", 1, kind="nap"), "timeline 1", "kind is 'nap', none of refresh"),
    ("memory", inside("calls", 0, "timeline", 1, "tiers", "device", key=-1), "forward 0", "key is -1, less than 0"),
    ("memory", inside("calls", 0, "timeline", 1, "tiers", tape={}), "forward 0", "tier 'tape' is none of"),
    ("memory", inside("calls", 0, "timeline", 1, "tiers", device=[1]), "forward 0", "[1], not an object"),
    ("memory", inside("calls", 0, "checks", 0, ledger=None), "checks 0", "ledger is null"),
    ("memory", inside("calls", 0, "layers", one={}), "layer one", "no layer's number"),
    ("memory", inside("calls", 0, "drift", 2, mean=float("inf")), "drift 2", "mean is inf, not a finite number"),
    ("compare", inside("rows", 0, exact_match=1.2), "row 0", "exact_match is 1.2, more than 1"),
    ("compare", inside("rows", 1, correct=11), "row 1", "correct is 11 of 10 examples"),
    ("compare", inside("rows", 2, device_bytes=True), "row 2", "device_bytes is True, not a whole number"),
    ("overlap", inside("rows", 0, "layers", "1", exposed_ms=-1), "layer 1", "exposed_ms is -1, less than 0"),
    ("ops", inside("calls", 0, "ops", 1, ms="slow"), "operation 1", "ms is 'slow', not a number"),
    ("throughput", lambda content: content["rows"][0].pop("context"), "row 0", "has no context"),
    ("throughput", lambda content: content["rows"].append(7), "row 4", "7, not an object"),
    (
        "throughput",
        lambda content: content["rows"].append({"policy": "polestar", "context": 9, "why": "needs 9 MiB"}),
        "row 4",
        "polestar at 9 tokens has no figures: needs 9 MiB",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "place", "why"), BAD_JSON, ids=[f"{case[0]}, {case[3]}" for case in BAD_JSON]
)
def test_a_bad_row_of_a_file_is_left_out_and_named(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, name: str, change: Any, place: str, why: str
):
    made.write_all(tmp_path)
    content = made.FILES[name]()
    change(content)
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    done = run()
    assert done.last["skipped"] == 1
    lines = [re.sub(r"\\(.)", r"\1", line) for line in done.text.splitlines() if f"/{name}.json |" in line]
    assert len(lines) == 1 and place in lines[0] and why in lines[0]
    own = {"bytes_over_steps", "drift"} if name == "memory" and place == "call 0" else set()
    assert set(ALL) - set(done.last["figures"]) == own


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rows": 3, "calls": 3}', "[" * 100_000, "\x00"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_file_that_is_none_is_a_gap(run: Callable[..., SimpleNamespace], tmp_path: Path, name: str, text: str):
    (tmp_path / f"{name}.json").write_text(text)
    done = run()
    assert done.last["figures"] == [] and done.last["skipped"] == 1
    assert any(gap.endswith(f"/{name}.json has nothing that can be shown") for gap in done.last["gaps"])


@pytest.mark.parametrize("name", ["report.html", "report.md", "pareto.png"])
def test_a_full_disk_leaves_what_was_there(
    run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    made.write_all(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("before")
    (out / f".{name}.part").symlink_to("/dev/full")
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "No space left on device" in said and "--out" in said
    assert [path.name for path in out.iterdir()] == ["report.html"] and (out / "report.html").read_text() == "before"


def test_a_place_that_cannot_be_written_is_said_in_a_line(
    run: Callable[..., SimpleNamespace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "taken").write_text("a file")
    for place in ("taken", "taken/below"):
        with pytest.raises(SystemExit) as ended:
            run("--out", str(tmp_path / place))
        assert ended.value.code not in (0, None)
        assert "--out" in capsys.readouterr().err.strip().splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_names_are_text_everywhere(run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path):
    evil = '<script>alert(1)</script> | `x` & "y"'
    made.write_all(tmp_path)
    made.write_sweep(tmp_path / "sweep", made.sweep_rows(policy=evil))
    (tmp_path / "memory.json").write_text(json.dumps(made.memory(name=evil)))
    content = made.compare()
    content["rows"][0]["policy"] = content["rows"][1]["policy"] = evil
    (tmp_path / "compare.json").write_text(json.dumps(content))
    done = run(images=True)
    assert "<script>alert" not in done.page and "&lt;script&gt;alert(1)&lt;/script&gt;" in done.page
    assert "<b>device</b>" not in done.page
    for name in ("pareto", "accuracy", "bytes_over_steps"):
        xml.etree.ElementTree.parse(done.out / f"{name}.svg")
    # Every line of a table has as many cells as its head.
    for table in re.findall(r"(?:^\|.*\n)+", done.text, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table
    # Outside of code, no tag but those of the page.
    plain = re.sub(r"(`+)[^`].*?\1", "", done.text)
    assert set(re.findall(r"</?\w+", plain)) <= {"<details", "</details", "<summary", "</summary"}


def test_effects_are_means_over_what_all_levels_have(load: Callable[[str], Any], made: ModuleType):
    points = load("reporting.points").points_of(made.sweep_rows())
    slices, metrics = load("reporting.slices"), load("reporting.metrics")
    found = slices.slices_of(points)
    assert len(found) == 1 and len(found[0].points) == 8
    speed = metrics.METRICS[1]

    def figure(point: Any) -> float | None:
        spread = point.spread(speed.of)
        return None if spread is None else spread.value

    known = {}
    for number, knobs in enumerate(itertools.product(made.CLUSTERS, made.TOP_M, made.THRESHOLDS)):
        if knobs not in (made.REFUSED, made.FAILED):
            seconds = {"sort": 2 + number / 10, "lookup": 3 + number / 10}
            runs = [
                ((100 + 5 * number + run) * seconds["sort"] + (20 + number + run) * seconds["lookup"])
                / sum(seconds.values())
                for run in range(2)
            ]
            known[knobs] = sum(runs) / 2
    for effect in slices.effects(found[0], figure):
        place = "CMT".index(effect.knob)
        levels = (made.CLUSTERS, made.TOP_M, made.THRESHOLDS)[place]
        rests = [
            r
            for r in itertools.product((4, 8, 1, 2, 0), repeat=2)
            if all((*r[:place], level, *r[place:]) in known for level in levels)
        ]
        for level in levels:
            mean = sum(known[(*rest[:place], level, *rest[place:])] for rest in rests) / len(rests)
            assert effect.means[level] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("per_level", "noise", "starts"),
    [
        (
            {0: 100.0, 4: 50.0},
            0.0,
            "T moves speed most, 2\N{MULTIPLICATION SIGN}: 100 tokens/s at T 0, 50 tokens/s at T 4",
        ),
        ({0: 100.0, 4: 99.0}, 5.0, "T changes speed by no more than runs of the same point differ (5 tokens/s)"),
        ({0: 100.0, 4: 100.0}, 0.0, "T changes speed not at all"),
    ],
)
def test_a_sentence_calls_no_noise_a_finding(
    load: Callable[[str], Any], made: ModuleType, per_level: dict[int, float], noise: float, starts: str
):
    rows = [
        row
        | {
            "clusters": 4,
            "top_m": 1,
            "point": f"{row['update_threshold']}",
            "run": row["run"],
            "tokens_per_second": per_level[row["update_threshold"]] + (row["run"] - 0.5) * noise,
            "status": "ok",
        }
        for row in made.sweep_rows()
        if (row["clusters"], row["top_m"]) == (8, 1) and row["task"] == "sort"
    ]
    found = load("reporting.slices").slices_of(load("reporting.points").points_of(rows))
    sentence = load("reporting.knob_words").sentence(load("reporting.metrics").METRICS[1], found[0])
    assert sentence.replace("\xa0", " ").startswith(starts)


def test_the_frontier_is_who_is_beaten_by_nobody(load: Callable[[str], Any]):
    contenders, spread = load("reporting.contenders"), load("reporting.points").Spread
    rng = random.Random(0)
    for _ in range(50):
        pairs = [(rng.randint(1, 8), rng.randint(1, 8)) for _ in range(rng.randint(1, 12))]
        marks = [
            contenders.Contender(
                name=str(number),
                kind="sweep",
                settings="",
                nbytes=size,
                right={},
                speed=spread(value=speed, low=speed, high=speed, runs=1),
            )
            for number, (size, speed) in enumerate(pairs)
        ]
        line = {(who.nbytes, who.speed.value) for who in contenders.frontier(marks)}
        best = {
            (size, speed)
            for size, speed in pairs
            if not any((a <= size and b >= speed) and (a, b) != (size, speed) for a, b in pairs)
        }
        assert line == best


def test_only_the_same_calls_are_compared(load: Callable[[str], Any], made: ModuleType, tmp_path: Path):
    made.write_all(tmp_path)
    reading, sources = load("reporting.reading"), load("reporting.sweep_rows")
    contenders, points_of = load("reporting.contenders"), load("reporting.points").points_of

    def found(**head: Any) -> list[Any]:
        content = made.compare() | head
        (tmp_path / "compare.json").write_text(json.dumps(content))
        sweep = sources.read_sweep(tmp_path / "sweep")
        compare = reading.read_json(tmp_path / "compare.json", "", "rows", reading.compare_rows)
        return contenders.workloads(sweep, points_of(sweep.rows), compare)

    together = found()
    assert len(together) == 1 and together[0].tasks == ["sort", "lookup 992"]
    kinds = sorted(who.kind for who in together[0].contenders)
    assert kinds == ["baseline", "policy", "policy", *["sweep"] * 7]
    dual = next(who for who in together[0].contenders if who.name == "fast_dllm_dual")
    assert together[0].accuracy(dual) == 1.0
    for other in (
        {"weights_sha256": "cd" * 32},
        {"processor": "another"},
        {"threads": 2},
        {"block": 32},
        {"canvas": 64},
    ):
        assert [len(each.contenders) for each in found(**other)] == [3, 7], other


def test_bytes_that_are_counted_in_part_win_nothing(
    load: Callable[[str], Any], run: Callable[..., SimpleNamespace], made: ModuleType, tmp_path: Path
):
    made.write_all(tmp_path)
    content = made.compare()
    baseline = [row for row in content["rows"] if row["policy"].startswith("transformers")]
    for row in baseline:
        row.update(bytes="counted", device_bytes=1000, tokens_per_second=900.0, low=900.0, high=900.0)
    again = [dict(row, policy="none, again") for row in content["rows"] if row["policy"] == "fast_dllm_dual"]
    (tmp_path / "compare.json").write_text(json.dumps(content | {"rows": content["rows"] + again}))
    reading, contenders = load("reporting.reading"), load("reporting.contenders")
    source = reading.read_json(tmp_path / "compare.json", "", "rows", reading.compare_rows)
    (workload,) = contenders.workloads(load("reporting.skips").Source(file="", head={}), [], source)
    assert [who.name for who in workload.contenders] == ["fast_dllm_dual", "dllm_cache", "transformers offloaded"]
    assert [who.counted for who in workload.contenders] == [False, False, True]
    assert "transformers offloaded" not in {who.name for who in contenders.frontier(workload.contenders)}
    text = run().text
    assert "Bytes of baselines are counted" in text and "≥ 1000 B" in text


@pytest.mark.parametrize(
    ("correct", "asked", "low", "high"), [(5, 10, 0.2366, 0.7634), (0, 20, 0.0, 0.1611), (98, 100, 0.9300, 0.9945)]
)
def test_intervals_are_wilsons(load: Callable[[str], Any], correct: int, asked: int, low: float, high: float):
    assert load("reporting.points").wilson(correct, asked) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("of", "figure", "shown"),
    [
        ("plain", 0.0, "0"),
        ("plain", 1234.5, "1234"),
        ("plain", 12.345, "12.3"),
        ("plain", 0.01234, "0.012"),
        ("plain", -5.5, "\N{MINUS SIGN}5.5"),
        ("plain", 0.00012, "1.20·10⁻⁴"),
        ("plain", None, "\N{EN DASH}"),
        ("percent", 0.98765, "98.8\xa0%"),
        ("percent", 1.0, "100\xa0%"),
        ("nbytes", 1536, "1.5\xa0KiB"),
        ("nbytes", 0, "0\xa0B"),
        ("nbytes", 20 * 2**20, "20\xa0MiB"),
        ("nbytes", -6000000, "\N{MINUS SIGN}5.72\xa0MiB"),
        ("milliseconds", 2.5, "2.5\xa0ms"),
    ],
)
def test_figures_are_written_with_three_digits(load: Callable[[str], Any], of: str, figure: float | None, shown: str):
    assert getattr(load("reporting.wording"), of)(figure) == shown


def test_ink_is_read_on_every_shade_and_page(load: Callable[[str], Any]):
    colours = load("reporting.colours")

    def light(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(first: str, second: str) -> float:
        dark, bright = sorted((light(first), light(second)))
        return (bright + 0.05) / (dark + 0.05)

    for dark in (False, True):
        known = colours.variables(dark=dark)
        for name, colour in known.items():
            if name.startswith("ramp-"):
                assert contrast(colour, known[name.replace("ramp-", "on-", 1)]) >= 4.5, name
        for ink, ground in itertools.product(("ink", "soft", "accent", "warn"), ("page", "card")):
            assert contrast(known[ink], known[ground]) >= 4.5, (ink, ground, dark)
        for name in ("device", "host", "disk", *(f"policy-{number}" for number in range(10))):
            assert contrast(known[name], known["card"]) >= 3, (name, dark)
