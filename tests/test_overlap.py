"""The study `overlap`: a tiny model over a slowed link."""

import pytest
from measuring.study import points_of, study_named
from workloads.overlap import GPUS, copy_over_attention
from workloads.subjects import local

overlap = study_named("overlap")
COMMON = {"device": "cpu", "threads": 1, "seed": 0}
TINY = {"width": [64], "layers": [4], "positions": [512], "answer": [16], "steps": [6]}


@pytest.mark.usefixtures("few_slots")
def test_the_share_that_a_slow_link_hides():
    axes = {**overlap.AXES, **TINY}
    first, second = points_of(overlap, axes, COMMON)
    whole, *layers = rows = list(overlap.measure(first.settings, **local(axes)))
    assert whole["layer"] == -1 and layers and {row["layer"] for row in layers} <= {1, 2}
    assert whole["copy_ms"] == pytest.approx(sum(row["copy_ms"] for row in layers))
    assert 0 <= whole["hidden_share"] <= 1 and whole["attention_ms"] > 0 and whole["updates"] >= 1
    table = [
        {"point": p.key, "run": 0, "status": "ok"} | dict(p.settings) | row for p in (first, second) for row in rows
    ]
    lines = overlap.tables(table)["overlap"].splitlines()
    assert len(lines) == 4 and f"{100 * whole['hidden_share']:.1f} % (" in lines[2]


def test_ratios_follow_from_data_sheets():
    assert [round(copy_over_attention(4096, *rates), 2) for rates in GPUS.values()] == [0.35, 0.57]
    with pytest.raises(ValueError, match="link"):
        points_of(overlap, {**overlap.AXES, "link": ["PCIe 7"]}, COMMON)
