"""report.html in a browser: it shows the rows' figures, asks the network for nothing, and the console is silent."""

import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EVIL = "<script>alert(1)</script>"
OFFLINE = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000", "--dump-dom"),
)
NOTHING = -1.0  # no figure is negative
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> str:
    """Where one is."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        if os.environ.get("TIERED_REQUIRE_BROWSER"):
            pytest.fail(f"there is none of {', '.join(BROWSERS)}")
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    return found


@pytest.fixture(scope="module")
def opened(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[str]]]:
    """Opens a page; returns its document after its scripts ran, and what the console and the network said."""

    def once(page: str, *options: str) -> tuple[str, list[str]]:
        folder = tmp_path_factory.mktemp("browser")
        (folder / "page.html").write_text(page)
        log = folder / "net.json"
        places = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", (folder / "page.html").as_uri()]
        command = [browser, *OFFLINE, *options, *places]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        asked = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
        # Requests of the browser itself have "not an origin" there, or nothing.
        said += [each["url"] for each in asked if each.get("initiator") == "null" and each["url"].startswith("http")]
        return done.stdout, said

    return once


@pytest.fixture(scope="module")
def made() -> Iterator[ModuleType]:
    """The inputs' module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests")
        yield importlib.import_module("report_inputs")


@pytest.fixture(scope="module")
def page(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of all inputs."""
    return written(made, tmp_path_factory.mktemp("report"))


def written(made: ModuleType, folder: Path, change: Callable[[Path], object] | None = None) -> str:
    """The page that the script writes of all inputs, after a change to them."""
    made.write_all(folder)
    if change is not None:
        change(folder)
    inputs = [part for name in made.FILES for part in (f"--{name}", str(folder / f"{name}.json"))]
    report = importlib.import_module("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["report.py", str(folder / "sweep"), *inputs, "--out", str(folder / "out")])
        patch.setattr(report, "images", lambda figure: {})  # which no page shows
        report.main()
    return (folder / "out" / "report.html").read_text()


@pytest.fixture(scope="module")
def desk(opened: Callable[..., tuple[str, list[str]]], page: str) -> "Opened":
    """The page on a wide screen of a light desktop."""
    return Opened(opened, page, "--window-size=1280,900", "--blink-settings=preferredColorScheme=1")


@pytest.fixture(scope="module")
def document(desk: "Opened") -> "Document":
    """What the browser made of the page."""
    return Document(desk.text)


class Document(HTMLParser):
    """Tables by caption and section, marks with their data, and all addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[tuple[str, str], list[list[tuple[str, str | None]]]] = {}
        self.heads: dict[tuple[str, str], list[str]] = {}
        self.marks: list[tuple[str, dict[str, str | None]]] = []
        self.addresses: list[str] = []
        self.drawn: set[str] = set()
        self.labels: list[str | None] = []
        self.section, self._key, self._inside, self._words = "", ("", ""), "", ""
        self._value: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            given[name] or "" for name in ("src", "href", "xlink:href", "action", "data") if name in given
        ]
        if tag == "section":
            self.section = given.get("id") or ""
        if tag == "svg" and given.get("role") == "img":
            self.labels.append(given.get("aria-label"))
        if "data-tip" in given:
            self.marks.append((self.section, given))
        if tag == "table":
            self._key = (self.section, given["data-name"] or "")
            self.tables[self._key], self.heads[self._key] = [], []
        if tag == "tr" and self._inside == "tbody":
            self.tables[self._key].append([])
        if tag in ("thead", "tbody"):
            self._inside = tag
        if tag in ("th", "td"):
            self._words, self._value = "", given.get("data-value")

    def handle_data(self, data: str) -> None:
        self._words += data
        self.drawn.add(data.replace("\xa0", " "))

    def handle_endtag(self, tag: str) -> None:
        if tag == "th":
            self.heads[self._key].append(self._words.strip())
        if tag == "td":
            self.tables[self._key][-1].append((self._words.replace("\xa0", " "), self._value))

    def figures(self, section: str, name: str, column: str) -> list[float | None]:
        """A column of a table, unrounded."""
        place = self.heads[section, name].index(column)
        values = [row[place][1] for row in self.tables[section, name]]
        return [None if value is None else float(value) for value in values]

    def words(self, section: str, name: str, column: str) -> list[str]:
        """A column of a table, as it is shown."""
        place = self.heads[section, name].index(column)
        return [row[place][0] for row in self.tables[section, name]]


def test_an_error_and_a_warning_and_a_request_would_be_seen(opened: Callable[..., tuple[str, list[str]]]):
    scripts = ("throw new Error('thrown')", "console.warn('warned')", "console.error('told')")
    page = "".join(f"<script>{script}</script>" for script in scripts)
    said = opened(f"<title>x</title>{page}<img src='https://example.org/broken.png'>")[1]
    assert all(any(word in line for line in said) for word in ("thrown", "warned", "told")), said
    assert "https://example.org/broken.png" in said


def test_the_page_has_nothing_to_complain_of(desk: "Opened"):
    assert desk.said == [] and "</html>" in desk.text


def test_the_page_asks_for_nothing(document: Document, page: str):
    assert document.addresses and all(address.startswith(("#", "data:")) for address in document.addresses)
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)", page)
    assert "Content-Security-Policy" in page and "default-src 'none'" in page
    # Each place that a link goes to is there, once.
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert {address[1:] for address in document.addresses if address.startswith("#")} <= set(names)


def points(made: ModuleType) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    """Rows of the sweep by C, M and T."""
    found: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for row in made.sweep_rows():
        if row["clusters"] is not None:
            found.setdefault((row["clusters"], row["top_m"], row["update_threshold"]), []).append(row)
    return found


def by_hand(metric: str, rows: list[dict[str, Any]]) -> float:
    """A figure of a point; `NOTHING` where it has none, from the rows of both runs."""
    if rows[0]["status"] != "ok":
        return NOTHING
    runs = [[row for row in rows if row["run"] == run] for run in (0, 1)]
    if metric == "accuracy":
        return sum(row["correct"] for row in rows) / sum(row["examples"] for row in rows)
    if metric == "device_bytes":
        return max(row["device_bytes"] for row in rows)
    if metric == "moved":
        return sum(r["to_device_bytes"] for r in runs[0]) / sum(r["nfe"] * r["examples"] for r in runs[0])
    speeds = [sum(r["tokens_per_second"] * r["seconds"] for r in run) / sum(r["seconds"] for r in run) for run in runs]
    return sum(speeds) / 2


@pytest.mark.parametrize("metric", ["accuracy", "tokens_per_second", "device_bytes", "moved"])
def test_grids_and_tables_have_the_sweeps_figures(document: Document, made: ModuleType, metric: str):
    name = next(name for section, name in document.tables if section == metric)
    expected = {knobs: by_hand(metric, rows) for knobs, rows in points(made).items()}
    knobs = zip(*(document.figures(metric, name, knob) for knob in "CMT"), strict=True)
    columns = {"accuracy": "right answers", "tokens_per_second": "tokens/s", "device_bytes": "peak on the device"}
    shown = document.figures(metric, name, columns.get(metric, "a forward"))
    # A point without figures says why in place of one.
    shown = [NOTHING if figure is None else figure for figure in shown]
    assert dict(zip(knobs, shown, strict=True)) == pytest.approx(expected, rel=1e-9)
    marks = [given for section, given in document.marks if section == metric]
    drawn = {}
    for given in marks[:8]:
        label = (given["data-tip"] or "").splitlines()[0]
        place = tuple(int(re.search(rf"{knob} (\d+)", label)[1]) for knob in "CMT")  # pyright: ignore[reportOptionalSubscript]
        value = given.get("data-value")
        drawn[place] = NOTHING if value is None else float(value)
    assert drawn == pytest.approx(expected, rel=1e-9)


def test_refused_and_failed_points_are_no_zeros(document: Document, made: ModuleType):
    tips = [given["data-tip"] or "" for section, given in document.marks if section == "accuracy"]
    for status, why in made.WHY.items():
        assert any(f"\n{status}: {why}" in tip for tip in tips)
    lost = document.tables["lost", "Without figures"]
    assert {(row[2][0], row[3][0]) for row in lost} == {
        *made.WHY.items(),
        ("refused", "goes with random order | alone"),
    }


def test_speed_against_bytes_has_the_rows_of_both_files(document: Document, made: ModuleType):
    marks = {given["data-name"]: given for section, given in document.marks if section == "pareto"}
    expected = {
        row["policy"]: (row["tokens_per_second"], row["device_bytes"])
        for row in made.compare()["rows"]
        if row.get("size")
    }
    for (clusters, top_m, threshold), rows in points(made).items():
        if rows[0]["status"] == "ok":
            lookups = [row for row in rows if row["task"] == "lookup"]
            speed = sum(row["tokens_per_second"] for row in lookups) / 2
            expected[f"polestar · C {clusters} M {top_m} T {threshold}"] = (speed, lookups[0]["device_bytes"])
    expected["none"] = (28.5, 28 * 2**20)
    assert {name: (float(g["data-speed"] or 0), float(g["data-bytes"] or 0)) for name, g in marks.items()} == expected
    shares = {row["policy"]: 0 for row in made.compare()["rows"] if "why" not in row}
    for row in made.compare()["rows"]:
        if "why" not in row:
            shares[row["policy"]] += row["correct"]
    assert {name: float(marks[name]["data-accuracy"] or 0) for name in shares} == pytest.approx(
        {name: correct / 50 for name, correct in shares.items()}
    )


def test_memory_tables_have_every_sample(document: Document, made: ModuleType):
    call = made.memory()["calls"][0]
    where = ("bytes_over_steps", call["name"])
    for tier, account in (("device", "weights"), ("device", "key"), ("device", "centroids"), ("host", "hidden")):
        sizes = [sample["tiers"][tier].get(account, 0) for sample in call["timeline"]]
        assert document.figures(*where, f"{tier}: {account}") == sizes
    assert document.words(*where, "kind") == ["\N{EN DASH}", "refresh", "step", "step", "update", "step", "step"]
    assert document.words("bytes_over_steps", "Ledger and allocators", "") == ["agrees", "agrees", "differs"]
    assert "cap 12 MiB" in document.drawn


def test_copies_drift_operations_and_speed_have_their_rows(document: Document, made: ModuleType):
    call = made.memory()["calls"][0]
    assert document.figures("copies", call["name"], "exposed") == [1.0, 2.0]
    assert document.figures("copies", call["name"], "bytes") == [300, 600]
    assert document.figures("copies", "slow link, no prefetch", "hidden") == [32.0, 58.0]
    assert document.figures("copies", "slow link, prefetch 1 ahead", "share exposed") == pytest.approx([2 / 40, 2 / 60])
    assert document.figures("drift", call["name"], "mean KL") == [row["mean"] for row in call["drift"]]
    drawn = [float(given["data-value"] or 0) for section, given in document.marks if section == "drift"]
    # Drawn twice: for screens and for phones.
    assert drawn == 2 * [row["mean"] for row in call["drift"]]
    timed = made.ops()["calls"][0]
    assert document.figures("operations", timed["name"], "time") == [op["ms"] for op in timed["ops"]] + [
        timed["wall_ms"]
    ]
    rows = made.throughput()["rows"]
    name = "one sequence a call, one token a step"
    for column, field in (("tokens/s", "tokens_per_second"), ("20th", "low"), ("80th percentile", "high")):
        assert document.figures("throughput", name, column) == [row[field] for row in rows]


def test_every_drawing_is_told_in_words_and_every_file_named(document: Document, page: str, made: ModuleType):
    assert len(document.labels) > 15 and all(document.labels)
    assert page.count(made.MADE["command"]) == 6 and "0123456789abcdef" in page and "test processor" in page


PROBE = """<script>
const found = {};
const cell = (table, row, column) => table.tBodies[0].rows[row].cells[column].dataset.value;
const table = document.querySelector("#tokens_per_second table");
const head = [...table.tHead.rows[0].cells].findIndex((each) => each.textContent.trim() === "tokens/s");
const column = () => [...table.tBodies[0].rows].map((row) => row.cells[head].dataset.value ?? null);
table.tHead.rows[0].cells[head].querySelector("button").click();
found.up = column();
table.tHead.rows[0].cells[head].querySelector("button").click();
found.down = column();
const mark = document.querySelector("#accuracy .mark");
mark.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 9, clientY: 9 }));
found.tip = document.getElementById("tip").hidden ? null : document.getElementById("tip").textContent;
found.wanted = mark.dataset.tip;
document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
found.gone = document.getElementById("tip").hidden;
found.page = getComputedStyle(document.body).backgroundColor;
found.beyond = document.documentElement.scrollWidth - innerWidth;
found.inner = innerWidth;
const shown = (kind) => getComputedStyle(document.querySelector(`.panels.${kind}`)).display;
[found.wide, found.narrow] = ["wide", "narrow"].map(shown);
dispatchEvent(new Event("beforeprint"));
found.closed = document.querySelectorAll("details.group:not([open])").length;
const note = document.createElement("div");
note.id = "found";
note.textContent = JSON.stringify(found);
document.body.append(note);
</script></body>"""


class Opened:
    """A page in the browser: its document, what the browser said of it, and what a script that is put into it finds."""

    def __init__(self, opened: Callable[..., tuple[str, list[str]]], page: str, *options: str) -> None:
        text, self.said = opened(page.replace("</body>", PROBE), *options)
        self.text, _, found = text.partition('<div id="found">')
        found = found.partition("</div>")
        self.text += found[2]
        self.found = json.loads(found[0].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_tables_sort_and_marks_speak(desk: Opened):
    found = desk.found
    figures = [float(value) for value in found["up"] if value is not None]
    assert len(figures) == 6 and figures == sorted(figures) and found["up"][-2:] == [None, None]
    assert [float(value) for value in found["down"][:6]] == sorted(figures, reverse=True) and found["down"][-2:] == [
        None,
        None,
    ]
    assert found["tip"] == found["wanted"] and "polestar" in found["tip"] and found["gone"]
    assert found["closed"] == 0
    assert found["beyond"] <= 0 and (found["wide"], found["narrow"]) == ("flex", "none")


def test_a_phone_gets_figures_of_its_own_and_a_dark_page_is_dark(
    opened: Callable[..., tuple[str, list[str]]], page: str, desk: Opened
):
    phone = Opened(opened, page, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    found = phone.found
    assert phone.said == [] and "</html>" in phone.text
    assert found["inner"] <= 760 and found["beyond"] <= 0 and (found["wide"], found["narrow"]) == ("none", "flex")
    red, green, blue = map(int, re.findall(r"\d+", found["page"])[:3])
    assert max(red, green, blue) < 60
    assert min(map(int, re.findall(r"\d+", desk.found["page"])[:3])) > 200


def test_names_that_look_like_tags_are_text(
    opened: Callable[..., tuple[str, list[str]]], made: ModuleType, tmp_path: Path
):
    def change(folder: Path) -> None:
        made.write_sweep(folder / "sweep", made.sweep_rows(policy=EVIL))
        (folder / "memory.json").write_text(json.dumps(made.memory(name=EVIL)))
        rows = [row | {"policy": EVIL} for row in made.throughput()["rows"]]
        (folder / "throughput.json").write_text(json.dumps(made.throughput() | {"rows": rows}))

    document, said = opened(written(made, tmp_path, change))
    assert said == [] and EVIL not in document
    read = Document(document)
    assert ("bytes_over_steps", EVIL) in read.tables
    assert read.words("throughput", "one sequence a call, one token a step", "policy") == 4 * [EVIL]
    assert (
        sum((given["data-tip"] or "").startswith(EVIL) for section, given in read.marks if section == "accuracy") >= 8
    )


def test_a_page_of_gaps_opens(opened: Callable[..., tuple[str, list[str]]], made: ModuleType, tmp_path: Path):
    def change(folder: Path) -> None:
        for path in itertools.chain(folder.glob("*.json"), folder.glob("sweep/*")):
            path.unlink()

    document, said = opened(written(made, tmp_path, change))
    assert said == [] and document.count('class="gap"') == 10
