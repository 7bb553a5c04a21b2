"""The study `weights`: tiny models over a slowed link, from files, in codes; and the drops that a warning names."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring.store import read_rows
from measuring.study import points_of, study_named
from measuring.worker import RefusedError
from workloads.weight_files import CODED, FILES, OFFLOADED, RESIDENT, SCRATCH, THEIRS
from workloads.weight_loading import anonymous_bytes, peak_of
from workloads.weight_streams import AS_LONG, LINKS, copy_over_forward, figures

from tiered.models.weight_form import DROPS
from tiered.tiers.stats import WayStats

weights = study_named("weights")
COMMON = {"device": "cpu", "threads": 1, "seed": 0}


def rows_of(part: str, **sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of the quick points of a part, with other `sizes`."""
    axes = dict(weights.AXES) | dict(weights.QUICK) | {"part": [part]} | sizes
    rows = []
    for point in points_of(weights, axes, COMMON):
        head = {"point": point.key, "run": 0, "stamp": "s", "status": "ok"} | dict(point.settings)
        rows += [head | row for row in weights.measure(point.settings, **weights.local(axes))]
    return rows


def test_a_call_over_a_slow_link_is_shown_beside_its_bounds():
    (row,) = rows = rows_of("stream")  # streamed layers answer as resident ones, or it raises
    assert row["resident_ms"] < row["bound_ms"] and row["synchronous_ms"] > row["copy_ms"] > 0
    assert row["over_bound"] == pytest.approx(row["streamed_ms"] / row["bound_ms"])
    assert 0 <= row["hidden_share"] <= 1 and row["forward_ratio"] == 1
    last = weights.last_line(rows)
    assert last["streamed_over_bound"] == round(row["over_bound"], 3) and last["load_peak_over_plan"] is None
    assert f"| {row['over_bound']:.3f} | {row['over_synchronous']:.3f} |" in weights.tables(rows)["weights"]


@pytest.mark.alone  # beside other tests the resident layers, whose times make the bound, may be the slower ones
def test_a_call_over_a_slow_link_takes_no_less_than_its_bound():
    (row,) = rows_of("stream")
    assert row["bound_ms"] <= row["streamed_ms"]


@pytest.mark.parametrize(
    ("copies", "busy", "exposed", "streamed", "hidden", "over_bound"),
    [
        ([1.0, 1.0], 1.0, 0.25, 2.25, 0.75, 1.125),  # of copies that are shorter than computing
        ([4.0, 4.0], 4.0, 2.0, 4.0, 1.0, 1.0),  # of longer ones, which computing covers for as long as it takes
        ([4.0, 4.0], 4.0, 3.0, 5.0, 0.5, 1.25),
        ([0.0, 4.0], 2.0, 1.0, 3.0, 1.0, 1.0),  # a forward without copies can hide none
    ],
)
def test_hidden_shares_are_of_time_that_can_be_hidden(
    copies: list[float], busy: float, exposed: float, streamed: float, hidden: float, over_bound: float
):
    way = WayStats(busy_ns=round(2e9 * busy), exposed_ns=round(2e9 * exposed))
    found = figures([2.0, 2.0], [streamed] * 2, [6.0, 6.0], copies, way)
    assert found["hidden_share"] == pytest.approx(hidden) and found["over_bound"] == pytest.approx(over_bound)
    assert found["over_synchronous"] == pytest.approx(streamed / 6) and found["resident_ms"] == 2000


def test_ratios_follow_from_data_sheets():
    ratios = {policy: [copy_over_forward(policy, link) for link in LINKS] for policy in ("none", "fast_dllm_dual")}
    assert ratios["none"][:2] == pytest.approx([1.06, 3.19], abs=0.01) and ratios["none"][2] == 1
    assert ratios["fast_dllm_dual"][:2] == pytest.approx([29.5, 21.3], abs=0.1) and AS_LONG in LINKS


def test_layers_come_from_the_checkpoint_and_from_the_scratch_file():
    rows = rows_of("disk")  # with the logits of resident ones, or it raises
    assert [row["way"] for row in rows] == [RESIDENT, FILES, CODED, SCRATCH, THEIRS, OFFLOADED]
    assert all(row["forward_ms"] > 0 for row in rows if row["status"] == "ok")
    last, table = rows[-1], weights.tables(rows)["weights_disk"]
    if last["status"] == "ok":
        assert last["over_disk_offload"] == 1 and weights.last_line(rows)["over_disk_offload"] > 0
    else:
        assert "| 32 rows, accelerate, disk_offload | accelerate is not installed: pip install" in table


def test_a_peak_is_seen_though_it_is_gone():
    with peak_of(os.getpid()) as looks:
        room = torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(0.05)
        del room
    assert looks[0] + (60 << 20) < max(looks) and anonymous_bytes(os.getpid()) < max(looks) - (32 << 20)


@pytest.mark.long
def test_the_peak_of_loading_is_that_of_another_process():
    # Larger than the memory that the process has freed by then, in which a small model would fit.
    (row,) = rows = rows_of("load", width=[512])
    assert row["plan_bytes"] == row["device_bytes"] + row["host_bytes"] + row["largest_bytes"]
    assert row["peak_bytes"] > 0 and weights.last_line(rows)["load_peak_over_plan"] == round(row["peak_over_plan"], 3)


def test_codes_move_logits_less_the_more_bits_there_are():
    settings = COMMON | {"part": "logits", "model": "random", "width": 64, "layers": 3, "examples": 1}
    int8, int4, whole = (
        next(iter(weights.measure(settings | {"form": form}, paths={}))) for form in ("int8", "int4", "int4+head")
    )
    assert 0 < int8["kl"] < int4["kl"] < whole["kl"] and int8["bytes_per_element"] > int4["bytes_per_element"] > 0.5
    assert int8["weight_bytes"] > int4["weight_bytes"] > whole["weight_bytes"]


def test_a_uniform_model_sees_noise_that_is_no_mask():
    settings = COMMON | {"part": "logits", "model": "embedded-uniform", "form": "int8", "examples": 1}
    (row,) = weights.measure(settings, paths={"embedded-uniform": "embedded-uniform"})
    assert 0 < row["kl"] < 1e-2


def test_a_bad_value_of_an_axis_is_named():
    for axes, why in (
        ({"part": ["streams"]}, "'streams'"),
        ({"link": ["PCIe 7"]}, "PCIe 7"),
        ({"form": ["int3"]}, "'int3'"),
        ({"width": [96]}, "width = 96"),
    ):
        with pytest.raises(ValueError, match=why):
            points_of(weights, dict(weights.AXES) | axes, COMMON)
    with pytest.raises(RefusedError, match="CPU alone"):
        weights.measure({"device": "cuda", "part": "stream"})


def test_the_drops_that_a_warning_names_are_the_measured_ones():
    """A code without a measurement has a drop of 0. Codes with the smallest drops come first."""
    last = study_named("drops").last_line(read_rows(Path(__file__).parents[1] / "bench" / "results" / "drops")[0])
    measured = {code: max(0.0, last[f"exact_match_drop_weights_{code}"] or 0.0) for code in DROPS}
    assert measured == dict(DROPS) and list(DROPS.values()) == sorted(DROPS.values())
