"""The table of docs/analysis.md says what was measured of both kinds of noise."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = [json.loads((ROOT / "bench" / "results" / f"regions{noise}.json").read_text()) for noise in ("", "_uniform")]
PLACES = [name for name in RESULTS[0]["masses"] if name not in ("trailing", "sinks")]


def row(name: str) -> str:
    number, cells = RESULTS[0]["masses"].index(name), []
    for result in RESULTS:
        for feature in ("keys", "values"):
            distance = result[feature]["overall"][number]
            cells.append(f"{distance:.2e}" if distance else "0")
        cells.append(f"{100 * result['attention']['overall'][number]:.1f} %")
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize("name", PLACES)
def test_the_page_has_the_row(name: str):
    assert row(name) in (ROOT / "docs" / "analysis.md").read_text().splitlines()


def test_both_answered_the_same_prompts_uncached():
    masks, uniform = RESULTS
    assert (masks["model"], uniform["model"]) == ("embedded", "embedded-uniform")
    assert masks["prompts"] == uniform["prompts"] and masks["policy"] == uniform["policy"] == "none"
    for result in RESULTS:
        assert sum(result["attention"]["overall"]) == pytest.approx(1)
    # The noise mask: what is final does not move within a block.
    final = [uniform["masses"].index(name) for name in ("prompt", "past", "previous")]
    assert all(uniform[feature]["overall"][number] == 0 for feature in ("keys", "values") for number in final)
