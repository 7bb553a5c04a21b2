"""The names of a sweep's points, the columns of its rows, and files that cannot be believed."""

import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
FIGURES: dict[str, Any] = {
    "examples": 4,
    "correct": 3,
    "exact_match": 0.75,
    "nfe": 2.5,
    "tokens_per_forward": 8.0,
    "tokens_per_second": 100.0,
    "ms_per_forward": 10.0,
    "first_block_ms": 20.0,
    "updates": 1,
    "device_bytes": 1024,
    "host_bytes": 0,
    "to_device_bytes": 3,
    "to_host_bytes": 4,
    "copy_ms": 1.0,
    "hidden_ms": 0.5,
    "exposed_ms": 0.5,
    "seconds": 1.5,
}


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a part of the sweep."""
    monkeypatch.syspath_prepend(BENCH)
    return lambda name: importlib.import_module(f"sweeping.{name}")


@pytest.fixture
def point(part: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """A point of two tasks, with further settings of its own or of the sweep."""
    module = part("point")

    def make(**given: Any) -> Any:
        common = {"model": "embedded", "weights_sha256": "ab" * 32, "device": "cpu", "tasks": {"sort": 4, "lookup": 4}}
        own: dict[str, Any] = {
            "policy": "polestar",
            "options": {"clusters": 8, "top_m": 2, "update_threshold": 4, "codec": "nvfp4"},
            "context": 512,
            "batch": 8,
            "budget": "12MiB",
            "confidence": 0.9,
        }
        common |= {name: value for name, value in given.items() if name not in own}
        own |= {name: value for name, value in given.items() if name in own}
        return module.Point(**own, common=module.Common(**common))

    return make


@pytest.fixture
def kept(part: Callable[[str], ModuleType], point: Callable[..., Any], tmp_path: Path) -> SimpleNamespace:
    """A folder with a measurement of two points, as files and as a table; `read` takes in what is there now."""
    store, measurement = part("store"), part("measurement")
    points = [point(), point(policy="none", options={}, confidence=None)]
    (tmp_path / "points").mkdir()
    first = store.Store(folder=tmp_path, common=points[0].common)
    for each in points:
        figures = [{"status": "ok", "task": task} | FIGURES for task in ("lookup", "sort")]
        first.add(each, measurement.Measurement.of(each, 0, figures, 2.0, {"processor": "abacus"}))
    first.merge({}, {"command": "test"})

    def read(common: Any = points[0].common) -> Any:
        made = store.Store(folder=tmp_path, common=common)
        made.read()
        return made

    files = [tmp_path / "points" / f"{each.key}-0.json" for each in points]
    return SimpleNamespace(points=points, files=files, folder=tmp_path, table=tmp_path / "rows.parquet", read=read)


def test_a_point_keeps_its_name(point: Callable[..., Any]):
    # Rows that people have measured hang on it: a change here is a new SCHEMA.
    text = (
        '{"batch":8,"block_length":32,"budget_bytes":12582912,"confidence":0.9,"context":512,"device":"cpu",'
        '"max_new_tokens":32,"model":"embedded","policy":"polestar","policy_options":{"clusters":8,"codec":"nvfp4",'
        '"top_m":2,"update_threshold":4},"schema":"tiered sweep 1","seed":0,"tasks":{"lookup":4,"sort":4},"threads":1,'
        f'"weights_sha256":"{32 * "ab"}"}}'
    )
    assert point().key == hashlib.sha256(text.encode()).hexdigest()[:16] == "7697f80c8b625d20"
    again = point(options={"codec": "nvfp4", "update_threshold": 4, "top_m": 2, "clusters": 8}, budget="12288 KiB")
    assert again.key == point().key


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "other"},
        {"weights_sha256": "cd" * 32},
        {"device": "cuda"},
        {"tasks": {"sort": 4}},
        {"tasks": {"sort": 4, "lookup": 5}},
        {"max_new_tokens": 64},
        {"block_length": 16},
        {"seed": 1},
        {"threads": 2},
        {"policy": "polestar-paper"},
        {"options": {}},
        {"context": 511},
        {"batch": 7},
        {"budget": None},
        {"budget": "13MiB"},
        {"confidence": None},
        {"confidence": 0.91},
    ],
    ids=str,
)
def test_every_setting_is_part_of_the_name(point: Callable[..., Any], changed: dict[str, Any]):
    assert point(**changed).key != point().key


def test_axes_that_a_policy_does_not_have_are_dropped(part: Callable[[str], ModuleType], point: Callable[..., Any]):
    axes: dict[str, list[Any]] = {
        "policy": ["none", "polestar", "polestar-paper", "composed"],
        "clusters": [4, "auto"],
        "top_m": [1, 2],
        "update_threshold": [0, 8],
        "codec": ["raw", "nvfp4"],
        "context": [64, 128],
        "batch": [1],
        "budget": [None, "1MiB", "1024KiB"],
        "confidence": [0.9],
    }
    grid = part("grid").Grid(axes=axes, options={"seed": 3}, common=point().common)
    points = grid.points()
    count = {name: sum(each.policy == name for each in points) for name in axes["policy"]}
    # Two contexts and two budgets, one of which is written in two ways.
    assert count == {"none": 4, "polestar": 4 * 16, "polestar-paper": 4 * 2, "composed": 4}
    assert len({each.key for each in points}) == len(points)
    rows = [each.columns() for each in points]
    axes_of = ("clusters", "top_m", "update_threshold", "codec")
    paper = {tuple(row[axis] for axis in axes_of) for row in rows if row["policy"] == "polestar-paper"}
    assert paper == {(8, 2, 4, "raw"), (8, 2, 4, "nvfp4")}
    options = [json.loads(row["policy_options"]) for row in rows if row["policy"] == "polestar"]
    assert {row["clusters"] for row in rows if row["policy"] == "polestar"} == {4, None}
    assert {each["clusters"] for each in options} == {4, "auto"} and {each["seed"] for each in options} == {3}
    assert all(row["clusters"] is row["codec"] is None for row in rows if row["policy"] in ("none", "composed"))


def test_the_table_has_the_columns_and_types_of_its_readers(kept: SimpleNamespace):
    text, whole, number = pa.string(), pa.int64(), pa.float64()
    expected = {
        "point": text,
        "run": whole,
        "status": text,
        "why": text,
        "model": text,
        "policy": text,
        "policy_options": text,
        "clusters": whole,
        "top_m": whole,
        "update_threshold": whole,
        "codec": text,
        "context": whole,
        "batch": whole,
        "budget": text,
        "budget_bytes": whole,
        "confidence": number,
        "task": text,
        "examples": whole,
        "correct": whole,
        "exact_match": number,
        "nfe": number,
        "tokens_per_forward": number,
        "tokens_per_second": number,
        "ms_per_forward": number,
        "first_block_ms": number,
        "updates": whole,
        "device_bytes": whole,
        "host_bytes": whole,
        "to_device_bytes": whole,
        "to_host_bytes": whole,
        "copy_ms": number,
        "hidden_ms": number,
        "exposed_ms": number,
        "seconds": number,
    }
    schema = pq.read_schema(kept.table)
    assert dict(zip(schema.names, schema.types, strict=True)) == expected and schema.names == list(expected)
    never = ["point", "run", "status", "model", "policy", "policy_options", "context", "batch", "task"]
    assert [field.name for field in schema if not field.nullable] == never
    rows = pq.read_table(kept.table).to_pylist()
    assert [(row["policy"], row["task"]) for row in rows] == [
        (policy, task) for policy in ("none", "polestar") for task in ("sort", "lookup")
    ]
    assert rows[2] | FIGURES == rows[2]
    assert (rows[2]["budget"], rows[2]["budget_bytes"], rows[2]["clusters"]) == ("12MiB", 12 * 2**20, 8)
    assert (rows[0]["confidence"], rows[0]["clusters"], rows[0]["why"]) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"exact_match": 1.2}, "exact_match = 1.2, but 3 of 4"),
        ({"correct": 5, "exact_match": 1.0}, "5 of 4 examples"),
        ({"examples": 0, "correct": 0, "exact_match": 0.0}, "0 of 0"),
        ({"device_bytes": -1}, "device_bytes = -1"),
        ({"nfe": float("nan")}, "nfe = nan"),
        ({"seconds": float("inf")}, "seconds = inf"),
        ({"host_bytes": 2**63}, "host_bytes = 9223372036854775808"),
        ({"status": "refused", "why": "\ud800"}, "is no text"),
        ({"updates": 1.5}, "updates = 1.5 is no int"),
        ({"updates": True}, "updates = True is no int"),
        ({"nfe": 2}, "nfe = 2 is no float"),
        ({"host_bytes": None}, "host_bytes is null"),
        ({"status": "fine"}, "status = 'fine'"),
        ({"status": "failed"}, "failed, yet it has"),
        ({"color": "red"}, "unknown column color"),
        ({"task": "sort"}, "rows of sort, sort"),
        ({"examples": 8, "correct": 6}, "8 examples of lookup, not 4"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_figures_that_cannot_be_are_refused(part, point, change: dict[str, Any], why: str):
    rows = [{"status": "ok", "task": task} | FIGURES for task in ("sort", "lookup")]
    part("measurement").Measurement.of(point(), 0, rows, 1.0, {})
    rows[1] |= change
    with pytest.raises(ValueError, match=why.replace("(", "\\(")):
        part("measurement").Measurement.of(point(), 0, rows, 1.0, {})


@pytest.mark.parametrize("rows", [None, [], "rows", [None], [{"task": "sort", "status": "ok"}]], ids=str)
def test_rows_that_are_none_are_refused(part, point, rows: Any):
    with pytest.raises(ValueError):
        part("measurement").Measurement.of(point(), 0, rows, 1.0, {})


def edited(**changes: Any) -> Callable[[str], str]:
    """The file's text with other values in its head."""
    return lambda text: json.dumps(json.loads(text) | changes)


def row_edited(**changes: Any) -> Callable[[str], str]:
    """The file's text with other values in its first row."""

    def edit(text: str) -> str:
        saved = json.loads(text)
        saved["rows"][0] |= changes
        return json.dumps(saved)

    return edit


def setting_edited(**changes: Any) -> Callable[[str], str]:
    return lambda text: edited(settings=json.loads(text)["settings"] | changes)(text)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda text: "", "cut off"),
        (lambda text: text[:-40], "cut off"),
        (lambda text: "[1, 2]", "cut off, or no measurement"),
        (lambda text: '{"a": 1}', "no measurement"),
        (edited(schema="another tool 3"), "no measurement"),
        (edited(run=1), "its name is not that of its settings"),
        (setting_edited(batch=9), "its name is not that of its settings"),
        (edited(rows=[]), "without rows"),
        (edited(wall=None), "without its machine"),
        (row_edited(correct=9), "9 of 4 examples"),
        (row_edited(batch=9), "of other weights or settings|batch = 9"),
        (row_edited(model="other"), "of the model 'other'"),
        (row_edited(policy="nobody"), "unknown policy 'nobody'"),
        (row_edited(policy_options="[]"), "policy_options = '[]', no JSON object"),
        (row_edited(policy_options=100_000 * "["), "no JSON object"),
        (lambda text: 100_000 * "[", "cut off"),
        (row_edited(clusters=4), "clusters = 4, where its point has 8"),
        (row_edited(task="lookup"), "rows of lookup, lookup"),
    ],
)
def test_a_file_that_cannot_be_believed_is_skipped_and_measured_again(
    kept: SimpleNamespace, edit: Callable[[str], str], why: str
):
    kept.table.unlink()
    kept.files[0].write_text(edit(kept.files[0].read_text()))
    read = kept.read()
    assert [key for key, _ in read.measurements] == [kept.points[1].key]
    (skipped,) = read.skipped
    assert skipped.file == f"points/{kept.files[0].name}" and any(part in skipped.why for part in why.split("|"))


def test_foreign_files_are_skipped_by_name(kept: SimpleNamespace, point: Callable[..., Any]):
    kept.table.unlink()
    (kept.folder / "points" / "notes.txt").write_bytes(b"\xff\xfe not text")
    (kept.folder / "points" / "folder").mkdir()
    (kept.folder / "points" / ".lock").touch()
    read = kept.read()
    assert len(read.measurements) == 2
    assert {each.file for each in read.skipped} == {"points/notes.txt", "points/folder"}
    read = kept.read(point(weights_sha256="cd" * 32).common)
    assert read.measurements == {} and len(read.skipped) == 4
    assert sum("weights_sha256 " + "ab" * 32 in each.why for each in read.skipped) == 2


def rows_edited(number: int, **changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[number].update(changes)


@pytest.mark.parametrize(
    ("edit", "left", "why"),
    [
        (rows_edited(0, device_bytes=-5), 1, {"row 0": "device_bytes = -5", "row 1": "rows of lookup"}),
        (rows_edited(3, exact_match=7.0), 1, {"row 2": "rows of sort", "row 3": "exact_match"}),
        (rows_edited(1, model="gpt"), 1, {"row 0": "of the model 'gpt'|rows", "row 1": "model"}),
        (rows_edited(2, point="0" * 16), 1, {"row 2": "other weights", "row 3": "rows of lookup"}),
        (rows_edited(2, context=4), 1, {"row 2": "other weights", "row 3": "other weights"}),
        (lambda rows: rows.pop(), 1, {"row 2": "rows of sort"}),
        (lambda rows: rows.append(dict(rows[0])), 1, {"row 0": "sort, lookup, sort", "row 1": "", "row 4": ""}),
    ],
)
def test_rows_of_a_table_that_cannot_be_believed_are_skipped(
    kept: SimpleNamespace, edit: Callable[[list[dict[str, Any]]], None], left: int, why: dict[str, str]
):
    rows = pq.read_table(kept.table).to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(kept.table)), kept.table)
    for path in kept.files:
        path.unlink()
    read = kept.read()
    assert len(read.measurements) == left
    skipped = {each.file.removeprefix("rows.parquet "): each.why for each in read.skipped}
    assert skipped.keys() == why.keys()
    assert all(any(part in skipped[row] for part in text.split("|")) for row, text in why.items())
    # The old table is put aside when the new one is written.
    read.merge({}, {})
    assert pq.read_table(kept.folder / "rows.skipped.parquet").num_rows == len(rows)
    assert pq.read_table(kept.table).num_rows == 2 * left
    assert len(json.loads((kept.folder / "run.json").read_text())["skipped"]) == len(why)


def garbage(path: Path) -> None:
    path.write_bytes(b"PAR1 and nothing else")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def mistyped(path: Path) -> None:
    table = pq.read_table(path)
    place = table.schema.get_field_index("nfe")
    pq.write_table(table.set_column(place, "nfe", table.column("nfe").cast(pa.float32())), path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (garbage, "no Parquet"),
        (cut, "no Parquet"),
        (lambda path: path.write_bytes(b""), "no Parquet"),
        (mistyped, "column nfe is float, not double"),
        (lambda path: pq.write_table(pq.read_table(path).drop_columns(["updates"]), path), "no column updates"),
    ],
)
def test_a_table_that_is_none_is_skipped_and_made_again(kept: SimpleNamespace, spoil: Callable[[Path], Any], why: str):
    rows = pq.read_table(kept.table).to_pylist()
    spoil(kept.table)
    read = kept.read()
    assert [(each.file, why in each.why) for each in read.skipped] == [("rows.parquet", True)]
    read.merge({}, {})
    assert pq.read_table(kept.table).to_pylist() == rows and kept.read().skipped == []


def test_a_record_that_is_none_is_named(kept: SimpleNamespace):
    (kept.folder / "run.json").write_text("{")
    read = kept.read()
    assert [each.file for each in read.skipped] == ["run.json"] and len(read.measurements) == 2
    read.merge({}, {})
    assert json.loads((kept.folder / "run.json").read_text())["rows"] == 4


def test_what_a_killed_sweep_left_half_written_is_swept_away(kept: SimpleNamespace, part: Callable[[str], ModuleType]):
    parts = [kept.folder / ".rows.parquet.part", kept.folder / "points" / f".{kept.files[0].name}.part"]
    for path in parts:
        path.write_text("half")
    assert len(kept.read().measurements) == 2 and kept.read().skipped == []
    with part("store").locked(kept.folder):
        assert not any(path.exists() for path in parts)
