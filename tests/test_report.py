"""bench/report.py: pictures of rows, gaps of missing ones, and its page in a browser."""

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import report
import report_inputs as made
from charts import frontier as report_frontier
from charts import knobs, pareto, picture, regimes, rows, theme, timeline
from measuring.statistics import merged
from studies import frontier

PICTURES = {each.name: each for each in report.PICTURES}
TIMED = ("tokens_per_second", "seconds")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OFFLINE = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000", "--window-size=1280,900", "--dump-dom"),
)


def rows_of(*studies: str) -> list[dict[str, Any]]:
    """As the report reads them."""
    found = []
    for study in studies:
        own = merged(made.STUDIES[study](), of=made.OF[study], timed=TIMED)
        found += [row | {"study": study} for row in own]
    return found


def drawn(name: str, width: int = theme.WIDE) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The spec of a picture, which altair has checked, and all the rows in it."""
    each = PICTURES[name]
    table = getattr(each.module, "table", rows.good)(rows_of(*each.studies))
    spec = each.module.chart(table, width, **each.of).to_dict()
    texts = [part["values"] for part in parts(spec) if isinstance(part.get("values"), str)]
    texts += spec.get("datasets", {}).values()
    return spec, [row for text in texts for row in json.loads(text)]


def parts(spec: Any) -> Iterator[dict[str, Any]]:
    """Every mapping within a spec."""
    if isinstance(spec, dict):
        yield spec
    for each in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from parts(each)


@pytest.mark.parametrize(
    ("name", "marks", "fields", "row"),
    [
        ("fastest", {"rect", "text", "rule"}, {"context", "blocks", "policy"}, {"policy": "polestar", "context": 1024}),
        ("smallest", {"rect", "text", "rule"}, {"context", "blocks", "policy"}, {"policy": "none", "context": 1024}),
        ("pareto", {"point", "line", "rule", "text"}, {"size", "speed"}, {"policy": "dllm_cache", "fill": "#ffffff"}),
        ("right_by_rows", {"point"}, {"cost", "right"}, {"policy": "polestar", "cost": 300.0, "right": 75.0}),
        ("right_by_seconds", {"point"}, {"cost", "right"}, {"policy": "none", "cost": 4.0, "near": True}),
        ("accuracy", {"rect", "text"}, {"update_threshold", "C"}, {"C": "auto", "accuracy": 0.9, "told": "90.0 %"}),
        ("speed", {"rect", "text"}, {"update_threshold", "C"}, {"C": "4", "told": "67.5"}),
        ("device_bytes", {"rect", "text"}, {"update_threshold", "C"}, {"C": "4", "told": "23"}),
        ("bytes_over_steps", {"area", "rule"}, {"forward", "held"}, {"account": "key", "forward": 1, "held": 2.0}),
        ("copies", {"bar"}, {"ms", "layer", "part"}, {"layer": 2, "part": "hidden", "ms": 39.0}),
        ("drift", {"rect", "text"}, {"forward", "layer"}, {"forward": 2, "layer": 1, "mean": 0.1}),
        ("operations", {"bar"}, {"ms", "policy", "op"}, {"policy": "polestar", "op": "all others", "ms": 3.0}),
        ("throughput", {"line", "rule"}, {"context", "tokens_per_second"}, {"tokens_per_second": 90.5, "high": 90.8}),
    ],
)  # fmt: skip
def test_a_picture_has_the_marks_the_fields_and_the_figures_of_its_rows(
    name: str, marks: set[str], fields: set[str], row: dict[str, Any]
):
    spec, data = drawn(name)
    used = {part["mark"]["type"] for part in parts(spec) if "type" in part.get("mark", {})}
    assert used == marks and fields <= {part.get("field") for part in parts(spec)}
    assert any(row.items() <= each.items() for each in data), [each for each in data if row.keys() <= each.keys()]
    # Narrow it has the same rows.
    assert drawn(name, theme.NARROW)[1] == data


def test_of_like_policies_the_simplest_wins_and_a_link_slows_only_policies_that_move_bytes():
    cells = regimes.winners(rows_of("regimes"), "seconds")
    found = {(cell["context"], cell["blocks"], cell["link"]): (cell["policy"], cell["told"]) for cell in cells}
    assert found == {
        (256, 1, None): ("none", "2.0×"),  # noqa: RUF001
        (1024, 1, None): ("fast_dllm_dual", "1.5×"),  # noqa: RUF001
        (4096, 1, None): (None, "refused"),
        # Half a per cent apart; `none` measured twice differs by up to two.
        **{(context, 2, None): ("none", "≈") for context in (256, 1024)},
        # `polestar` moves, the others are as they were.
        (256, 1, 10): ("none", "1.5×"),  # noqa: RUF001
        (1024, 1, 10): ("polestar", "1.3×"),  # noqa: RUF001
    }
    at = {(cell["context"], cell["blocks"]): (cell["right"], cell["up"]) for cell in cells if cell["link"] is None}
    assert at == {(256, 1): (True, False), (1024, 1): (True, True), (4096, 1): (False, False)} | {
        (context, 2): (False, False) for context in (256, 1024)
    }
    told = regimes.says(rows_of("regimes"), "seconds")
    assert told.startswith("The fastest policy is `none` in 4 of 6 calls; `fast_dllm_dual` in 1, from 1024 tokens on")


def test_the_frontier_is_of_right_policies_whose_bytes_a_ledger_has_booked():
    found = {row["policy"]: row for row in pareto.table(rows_of("compare"))}
    assert {name for name, row in found.items() if row["frontier"]} == {"none", "polestar"}
    assert {name for name, row in found.items() if row["right"]} == {"none", "polestar", "transformers, cache"}
    # That of the lookups, whose prompts are the longest.
    assert found["polestar"]["tokens_per_second"] == 9.5
    labels = pareto.names(list(found.values()), 50.0)
    places = sorted(row["place"] for row in labels)
    assert all(high - low >= 0.99 * pareto.LINE * 50 / pareto.HEIGHT for low, high in pairwise(places))
    assert "≥ transformers, cache" in {row["name"] for row in labels}


def test_near_policies_are_compared_by_their_cheapest_settings():
    rows = rows_of("frontier")
    last = frontier.last_line(rows)
    ratios = {"polestar_over_next_rows": 0.4, "polestar_over_next_time": 0.5, "polestar_below_none_points": 1.0}
    found = {"cells": 1, "cells_with_polestar_near": 1, "cells_with_attended_near": 0}
    assert {name: value for name, value in last.items() if value is not None} == ratios | found
    # A setting that was asked more often has its longest row, and is compared on the prompts of both.
    fewer = {"point": "less", "examples": 20, "correct": 20, "right": "1" * 20}
    less, faster = rows[0] | fewer, rows[4] | fewer | {"seconds": 20 * 0.75}
    assert frontier.last_line([less, *rows]) == last
    quick = last | {"polestar_over_next_time": 0.25}  # a time of an answer is that of the faster row
    assert frontier.last_line([faster, *rows]) == frontier.last_line([*rows, faster]) == quick
    table = frontier.tables(rows)["frontier"]
    assert "`polestar` | update_threshold 0, top_m 4 | 89 (" in table and "| prompt_interval 2 | 89.5 (" in table
    without = [row for row in rows if row["policy"] != "dllm_cache"]
    assert frontier.last_line(without)["polestar_over_next_rows"] is None
    assert frontier.last_line([row for row in rows if row["policy"] != "none"])["cells"] == 0
    assert report_frontier.says(report_frontier.table(rows), "rows").startswith(
        "As right as without a cache: `polestar`"
    )


def test_refused_and_failed_points_are_cells_and_rows_with_reasons():
    raw = rows_of("sweep")
    cells = [row for row in drawn("accuracy")[1] if not row["shade"]]
    assert sorted(row["told"] for row in cells) == ["failed", "refused"]
    lost = {row["status"]: row for row in picture.lost(raw, knobs.COLUMNS)}
    assert (lost["refused"]["why"], lost["refused"]["which"]) == (made.REFUSED, "polestar, C 4, M 1, T 0")
    assert lost["failed"]["points"] == 1
    assert timeline.says(timeline.table(rows_of("memory"))).endswith("ledger and allocators agree in 1 of 2 checks")


def test_a_policy_has_one_colour_everywhere_and_text_on_it_can_be_read():
    assert len(set(theme.LIGHT.values())) == len(theme.VARIABLES), "two names share a light colour"
    alone, among = theme.policy_colours(["polestar"]), theme.policy_colours(["none", "polestar", "none, again", "peer"])
    assert alone["polestar"] == among["polestar"] and among["none"] == among["none, again"] != among["peer"]

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(first: str, second: str) -> float:
        darker, brighter = sorted((luminance(first), luminance(second)))
        return (brighter + 0.05) / (darker + 0.05)

    inks = {light: pair for pair in theme.BASE.values() for light in pair[:1]}
    pairs = [(pair, inks[theme.ink_on(pair[0])], 4.5) for pair in theme.POLICIES.values()]
    pairs += [
        (pair, theme.BASE["on-high" if number > 3 else "on-low"], 4.5)
        for number, pair in enumerate(theme.RAMP.values())
    ]
    pairs += [
        (theme.BASE[ground], theme.BASE[ink], 4.5)
        for ground, ink in product(("page", "card"), ("ink", "soft", "accent"))
    ]
    for ground, ink, least in pairs:
        assert all(contrast(ground[side], ink[side]) >= least for side in (0, 1)), (ground, ink)


def run(folder: Path, capsys: pytest.CaptureFixture[str] | None = None) -> SimpleNamespace:
    """Runs the script on the tables in `folder`; its page, its Markdown, its last line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture, "study_named", lambda name: SimpleNamespace(OF=made.OF[name], TIMED=TIMED))
        report.main(["--results", str(folder)])
    out = folder / "report"
    last = json.loads(capsys.readouterr().out.splitlines()[-1]) if capsys else {}
    return SimpleNamespace(
        page=(out / "report.html").read_text(), text=(out / "report.md").read_text(), last=last, out=out
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The report of all studies."""
    folder = tmp_path_factory.mktemp("results")
    for study, make in made.STUDIES.items():
        made.write(folder, study, make())
    return run(folder)


def test_the_page_has_every_picture_with_words_a_table_and_the_command(whole: SimpleNamespace):
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', whole.page, re.S))
    assert [name for name in sections if name != "made"] == list(PICTURES) and "Missing:" not in whole.page
    for name, each in PICTURES.items():
        assert len(re.findall(r'<svg role="img" aria-label="[^"]{20,}"', sections[name])) == 2, name
        assert sections[name].count("<tbody>") >= 1 and "<figcaption" not in sections[name]
        assert all(f"<code>python bench/measure.py {study}</code>" in sections[name] for study in each.studies)
    # Values of rows are text, and mean nothing in HTML or Markdown.
    assert "polestar &amp; &lt;co&gt;" in whole.page and "<co>" not in whole.page and "<b>4" not in whole.page
    assert "weights take 7 MiB \\| the budget is \\<b>4" in whole.text
    assert "refused</td>" in sections["accuracy"] and "died" in sections["accuracy"]
    assert "test processor" in sections["made"]
    # Colours are variables, and each id occurs once.
    assert not set(re.findall(r'"#[0-9a-f]{6}"', "".join(sections.values()))) & set(
        map('"{}"'.format, theme.LIGHT.values())
    )
    names = re.findall(r'\bid="([^"]+)"', whole.page)
    assert len(names) == len(set(names))


def test_the_main_pictures_have_files_for_other_pages(whole: SimpleNamespace):
    for name in report.MAIN:
        assert (whole.out / f"{name}.svg").read_text().startswith("<svg") and f"]({name}.svg)" in whole.text
        assert (whole.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "var(--" not in (whole.out / "pareto.svg").read_text()


def test_the_page_names_missing_and_unusable_tables_as_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "rows.parquet").write_bytes(b"no table")
    made.write(tmp_path, "ops", [each | {"status": "refused", "why": made.REFUSED} for each in made.ops()])
    shutil.copytree(tmp_path / "ops", tmp_path / "memory")
    found = run(tmp_path, capsys)
    gaps = " ".join(found.last["gaps"])
    assert found.last["figures"] == [] and found.last["files"] == ["report.html", "report.md"]
    assert "`regimes/rows.parquet` is not there; `python bench/measure.py regimes` makes it" in gaps
    assert "sweep/rows.parquet is no table of measurements" in gaps and "its rows are of the study ops" in gaps
    assert "no row of ops has a figure for it" in gaps
    assert all(gap in found.text for gap in found.last["gaps"])
    assert found.page.count('class="gap"') >= len(PICTURES) and "Refused or failed, and why: 2" in found.page


PROBE = """<!DOCTYPE html><title>probe</title><iframe style="width: 390px; height: 800px; border: 0"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, seen = [...page.querySelectorAll("figure svg")].filter((svg) => svg.clientWidth);
  const found = { wide: page.documentElement.scrollWidth, seen: seen.length, dark: [] };
  found.least = Math.min(...seen.map((svg) => svg.clientWidth / svg.viewBox.baseVal.width));
  found.out = [...page.querySelectorAll("section > *, figure svg")].filter(
    (each) => each.clientWidth && each.getBoundingClientRect().right > 390).length;
  document.title = JSON.stringify(found);
};
frame.srcdoc = PAGE;
</script>"""


@pytest.mark.slow
def test_a_browser_shows_it_offline_without_complaint_and_a_phone_cuts_nothing_off(
    whole: SimpleNamespace, tmp_path: Path
):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        missing = pytest.fail if os.environ.get("TIERED_REQUIRE_BROWSER") else pytest.skip
        missing(f"needs one of {', '.join(BROWSERS)}")
    assert "default-src 'none'" in whole.page and "<script" not in whole.page
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)", whole.page)
    # The page's own policy would let nothing look into it.
    within = json.dumps(re.sub(r"<meta http-equiv[^>]*>", "", whole.page)).replace("</", "<\\/")
    (tmp_path / "probe.html").write_text(PROBE.replace("PAGE", within))
    (tmp_path / "page.html").write_text(whole.page)
    titles = []
    for name in ("page", "probe"):
        log = tmp_path / f"{name}.json"
        places = [
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--log-net-log={log}",
            (tmp_path / f"{name}.html").as_uri(),
        ]
        done = subprocess.run([browser, *OFFLINE, *places], capture_output=True, text=True, timeout=120, check=True)
        assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        asked = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
        # Requests of the browser itself have "not an origin" there, or nothing.
        assert not [each for each in asked if each.get("initiator") == "null" and each["url"].startswith("http")]
        titles.append(re.search(r"<title>(.*?)</title>", done.stdout))
    found = json.loads(titles[1][1])
    assert found["wide"] <= 390 and found["out"] == 0 and found["seen"] == len(PICTURES)
    assert found["least"] > 0.85, "letters are too small to read"


def test_a_package_that_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "altair", None)
    monkeypatch.delitem(__import__("sys").modules, "charts.theme")
    with pytest.raises(ModuleNotFoundError, match=r"is not installed: pip install .*\[bench\]'"):
        importlib.import_module("charts.theme")
