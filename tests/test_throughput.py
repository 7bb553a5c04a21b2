"""The study `throughput`: its points, its rows against the runtime asked directly, and its table."""

from typing import Any

import pytest
from measuring.study import points_of, study_named
from measuring.worker import RefusedError
from training import tasks
from workloads.subjects import local

import tiered

throughput = study_named("throughput")
COMMON = {"device": "cpu", "threads": 1, "seed": 0}
RANDOM = {"model": ["random"], "width": [64], "layers": [1], "answer": [8], "block": [8], "context": [16], "batch": [3]}


def rows_of(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Measured rows, as a table has them."""
    whole, rows = {**throughput.AXES, **axes}, []
    for point in points_of(throughput, whole, COMMON):
        (row,) = throughput.measure(point.settings, **local(whole))
        rows.append({"point": point.key, "run": 0, "status": "ok"} | dict(point.settings) | row)
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_policies_stand_next_to_each_other_in_the_same_call():
    settings = [point.settings for point in points_of(throughput, throughput.AXES, COMMON)]
    assert [each["policy"] for each in settings] == 12 * ["none", "fast_dllm_dual", "polestar"]
    assert len({(each["context"], each["batch"], each["confidence"]) for each in settings}) == 12
    for axis, value, said in (("policy", "polstar", "did you mean 'polestar'"), ("model", "nowhere", "nowhere")):
        with pytest.raises(ValueError, match=said):
            points_of(throughput, {**throughput.AXES, axis: [value]}, COMMON)
    with pytest.raises(ValueError, match="width = 100"):
        points_of(throughput, {**throughput.AXES, **RANDOM, "width": [100]}, COMMON)


def test_a_row_has_the_figures_of_the_runtime():
    (row,) = rows_of({"context": [96], "batch": [1], "policy": ["polestar"], "confidence": [None]})
    chat = [{"role": "user", "content": tasks.sample("lookup", "test", 0, size=96).prompt}]
    out = tiered.from_pretrained("embedded", policy="polestar", device="cpu").generate(
        chat, max_new_tokens=32, block_length=8
    )
    assert row["nfe"] == sum(out.forwards) and row["tokens_per_forward"] == pytest.approx(out.tokens_per_forward.item())
    assert (row["device_bytes"], row["host_bytes"]) == (out.memory.peak_device_bytes, out.memory.peak_host_bytes)


def test_a_random_model_is_never_confident_and_a_bad_fit_is_refused():
    rows = rows_of(RANDOM | {"policy": ["none"], "confidence": [0.9, None]})
    assert [row["nfe"] for row in rows] == [8, 8], "a token a forward, whatever the rule"
    again = [row | {"run": 1, "tokens_per_second": 3 * row["tokens_per_second"]} for row in rows]
    head, _, *lines = throughput.tables(rows + again)["throughput"].splitlines()
    assert len(lines) == 2 and "threshold 0.9: `none`" in lines[0] and "one a step: `none`" in lines[1]
    assert head.count("|") == lines[0].count("|") and f"{2 * rows[0]['tokens_per_second']:.1f}" in lines[0]
    with pytest.raises(RefusedError, match="remasking"):
        rows_of(RANDOM | {"policy": ["dkv_greedy"], "confidence": [0.9]})
