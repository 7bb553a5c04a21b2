"""The studies of answers and of the tiers: their points, their tables, and pages with the measured figures."""

from pathlib import Path
from typing import Any

import measure
import pytest
from measuring.pages import between_marks
from measuring.store import read_rows
from measuring.study import parse_values, points_of, study_named
from measuring.worker import RefusedError
from workloads.attention_loads import by_width

ROOT = Path(__file__).resolve().parents[1]
COMMON = {"device": "cpu", "threads": 1, "seed": 0}
STUDIES = (
    *("sweep", "compare", "accuracy", "token_drift", "tiers", "drops", "stretch", "areas"),
    *("contexts", "weights", "blocks", "load", "selection", "frontier", "experts", "host"),
)
PAGES = {
    ("sweep", "sweep"): "docs/measurements/sweep.md",
    ("compare", "compare"): "docs/measurements/compare.md",
    ("compare", "short"): "docs/measurements/compare.md",
    ("compare", "noise"): "docs/measurements/noise.md",
    ("compare", "uniform"): "docs/embedded-model.md",
    ("accuracy", "accuracy"): "docs/embedded-model.md",
    ("accuracy", "early"): "docs/polestar.md",
    ("token_drift", "drift"): "docs/polestar.md",
    ("token_drift", "drift_floor"): "docs/polestar.md",
    ("drops", "drops"): "docs/measurements/drops.md",
    **{("drops", mark): "docs/measurements/codecs.md" for mark in ("kv", "kv_tasks", "kv_logits")},
    ("stretch", "stretch"): "docs/models.md",
    **{("areas", mark): "docs/analysis.md" for mark in ("areas_caches", "areas_steps")},
    ("blocks", "blocks"): "docs/policies.md",
    ("blocks", "blocks_answers"): "docs/embedded-model.md",
    **{("contexts", mark): "docs/measurements/contexts.md" for mark in ("contexts", "contexts_kv")},
    **{
        ("weights", mark): "docs/measurements/weights.md"
        for mark in ("weights", "weights_disk", "weights_load", "weights_logits")
    },
    **{
        ("experts", mark): "docs/measurements/experts.md"
        for mark in ("experts_picked", "experts_streamed", "experts_loaded")
    },
    ("drops", "weights_lost"): "docs/measurements/weights.md",
    **{("load", mark): "docs/measurements/load.md" for mark in ("load", "load_join", "load_blocks")},
    **{
        ("selection", mark): "docs/measurements/selection.md"
        for mark in ("selection", "selection_kl", "selection_renewed")
    },
    ("frontier", "frontier"): "docs/measurements/frontier.md",
    **{
        ("host", f"host_{part}"): "docs/measurements/host.md"
        for part in ("launches", "seconds", "waits", "loads", "copies")
    },
    **{("tiers", mark): "docs/measurements/codecs.md" for mark in ("codecs", "layers", "kv_scales", "pieces")},
}


def points(name: str, **axes: Any) -> list[dict[str, Any]]:
    """Settings of the study's points, with these values of its axes."""
    study = study_named(name)
    return [dict(point.settings) for point in points_of(study, dict(study.AXES) | axes, COMMON)]


@pytest.mark.parametrize("name", STUDIES)
def test_pages_show_the_measured_tables(name: str):
    """Fails with the command that updates the pages. A page shows nothing of a study without measurements."""
    folder = ROOT / "bench" / "results" / name
    tables = study_named(name).tables(read_rows(folder)[0]) if folder.exists() else {}
    for (study, mark), page in PAGES.items():
        if study == name:
            shown = between_marks((ROOT / page).read_text(encoding="utf-8"), mark)
            assert shown == tables.get(mark, "").strip(), f"python bench/measure.py {name} --show --into {page}"
    assert not folder.exists() or measure.main([name, "--show"]) == 0


@pytest.mark.parametrize("name", STUDIES)
def test_quick_is_little_and_of_the_study(name: str):
    study = study_named(name)
    assert set(study.QUICK) <= set(study.AXES)
    assert 0 < len(points(name, **study.QUICK)) <= min(20, len(points(name)))


@pytest.mark.parametrize("name", STUDIES)
def test_tables_of_points_that_failed_are_empty(name: str):
    row = {"run": 0, "stamp": "s", "status": "failed", "why": "exit status 9"}
    rows = [row | settings | {"point": str(number)} for number, settings in enumerate(points(name))]
    assert "|" in study_named(name).tables(rows)[next(mark for study, mark in PAGES if study == name)]


def quick_rows(name: str) -> list[dict[str, Any]]:
    """Rows of the study's quick points. A point that the library refuses has a row with the reason."""
    study, rows = study_named(name), []
    local = study.local({"model": ["embedded"], **study.QUICK}) if hasattr(study, "local") else {}
    for number, settings in enumerate(points(name, **study.QUICK)):
        head = {"point": str(number), "run": 0, "stamp": "s", "status": "ok"}
        try:
            found = [head | row for row in study.measure(settings, **local)]
        except RefusedError as error:
            found = [head | {"status": "refused", "why": str(error)}]
        rows += [{key: value for key, value in (settings | row).items() if value is not None} for row in found]
    return rows


def test_the_table_of_rotations_has_scalings_and_figures():
    tables = study_named("stretch").tables(quick_rows("stretch"))
    assert tables["stretch"].count("\n") >= 2 and "`ntk:2:2048`" in tables["stretch"] and "100" in tables["stretch"]


def test_drops_are_of_the_same_prompts_and_codecs_move_logits():
    study, rows = study_named("drops"), quick_rows("drops")
    tables = study.tables(rows)
    assert all(table.count("\n") >= 2 for table in tables.values())
    far = {row["kv"]: row["kl"] for row in rows if row["part"] == "logits"}
    assert far["raw"] == 0 < far["fp8"] < 1e-2
    assert {len(row["right"]) for row in rows if row.get("task") == "sort" and "right" in row} == {2}
    # One policy at its own prompts; another that is asked fewer cannot be paired.
    told = {"part": "long", "base": "x", "size": 960, "task": "long_lookup", "run": 0, "stamp": "s", "status": "ok"}
    sides = {("none", "raw"): "1110", ("none", "fp8"): "1100", ("polestar", "raw"): "1111", ("polestar", "fp8"): "0111"}
    sides |= {("polestar-drift", "raw"): "1111", ("polestar-auto", "raw"): "111"}
    rows = [
        told | {"point": str(number), "policy": name, "kv": kv, "right": right, "examples": len(right), "nfe": 1.0}
        | {"correct": right.count("1")}
        for number, ((name, kv), right) in enumerate(sides.items())
    ]  # fmt: skip
    last = study.last_line(rows)
    assert last["exact_match_drop_fp8"] == 25 and last["exact_match_drop_nvfp4"] is None
    assert last["exact_match_drops"]["long: polestar, raw"][0] == -25
    assert last["polestar_drift_over_full"][0] == 0 and last["polestar_auto_over_full"] is None
    assert last["exact_match_drop_weights_int8"] is None
    coded = rows[0] | {"point": "int8", "weights": "int8", "right": "0010", "correct": 1}
    assert study.last_line([*rows, coded])["exact_match_drop_weights_int8"] == 50
    assert study.tables([*rows, coded])["kv"] == study.tables(rows)["kv"]
    assert "| `none`, int8 | 50.00 (" in study.tables([*rows, coded])["weights_lost"]
    lines = study.tables(rows)
    assert "| `polestar`, fp8 | 25.00 (" in lines["kv"] and "| `polestar` | 100 (51–100) | -25.00 (" in lines["drops"]  # noqa: RUF001
    for axes, why in (
        ({"part": ["longer"]}, "'longer'"),
        ({"policy": ["polestar-drft"]}, "'polestar-drft'"),
        ({"weights": ["int3"]}, "'int3'"),
    ):
        with pytest.raises(ValueError, match=why):
            points("drops", **axes)


def test_coding_keys_moves_attention_less_the_more_bits_there_are():
    settings = {
        "model": "embedded",
        "call": study_named("token_drift").CALL | {"steps": 4},
        "tasks": [["sort", None, 1]],
    }
    fp8, nvfp4 = (
        next(study_named("token_drift").measure(COMMON | settings | {"kv": kv}, paths={"embedded": "embedded"}))
        for kv in ("fp8", "nvfp4")
    )
    assert fp8["step"] == nvfp4["step"] > 0 < fp8["noise"] < nvfp4["noise"]
    assert fp8["coded_step"] == pytest.approx(fp8["step"], rel=0.2) and 0 <= nvfp4["chosen"] <= fp8["chosen"] <= 1


def test_blocks_equal_the_recorded_ones_and_their_cost_is_over_a_floor():
    study, rows = study_named("blocks"), quick_rows("blocks")
    told, costs, answers = ([row for row in rows if row["part"] == part] for part in ("recorded", "cost", "answers"))
    assert len(told) > 10 and all(row["identical"] for row in told) and {row["off"] for row in told if "off" in row}
    (cost,) = costs
    assert cost["rows_fed"] == 96 + 2 * 2 * 8 + 8 and cost["over_floor"] == cost["seconds"] / cost["floor_seconds"]
    short, long = answers
    assert short["correct"] == 1 and long["tokens_per_forward"] > short["tokens_per_forward"] / 2
    last = {"families_identical": True, "exact_cache_over_row_floor": cost["over_floor"], "exact_match": None}
    assert study.last_line(rows) == last
    assert study.last_line([told[0] | {"identical": False}]) == {**dict.fromkeys(last), "families_identical": False}
    slow = study.last_line([short | {"rule": "one a step", "size": 96}])
    assert slow["exact_match"] == {"copy@96": 100.0}
    tables = study.tables(rows)
    assert "96 tokens, 2 blocks of 8 in 2 steps" in tables["blocks"] and "`long_copy`" in tables["blocks_answers"]


def test_experts_are_those_of_the_official_code_and_come_as_they_are_picked():
    study, rows = study_named("experts"), quick_rows("experts")
    told, picked, streamed = ([row for row in rows if row["part"] == part] for part in ("recorded", "picks", "stream"))
    assert len(told) == 7 and all(row["identical"] and row["routed"] for row in told)
    ((pick,), (stream,)) = picked, streamed
    assert 2 <= pick["of_step"] < pick["of_block"] <= 64 and pick["step_overlap"] <= pick["recall_both"] <= 1
    assert (
        0 < pick["recall_router"] <= pick["recall_both"] >= pick["recall_last"] and pick["misses_over_belady_30"] >= 1
    )
    assert stream["bound_ms"] < stream["streamed_ms"] and 0 < stream["hit_share"] < 1
    # All experts in every forward move more than those that are picked and missing.
    assert stream["bytes_over_misses"] >= 1 and stream["layers_ms"] > stream["bound_ms"]
    last, tables = study.last_line(rows), study.tables(rows)
    assert last["families_identical"] and last["router_identical"] and last["experts_over_bound"] > 1
    assert study.last_line([told[0] | {"routed": False}])["router_identical"] is False
    assert last["load_peak_over_plan"] <= 1.1 and "| 64 experts, weights int4 |" in tables["experts_loaded"]
    assert "| 2 of 64, branches 1.0 |" in tables["experts_picked"]
    assert "| 2 of 64, branches 1.0, 30% stay |" in tables["experts_streamed"]
    for axes, why in (({"part": ["pick"]}, "'pick'"), ({"share": [1]}, "share = 1"), ({"width": [100]}, "width = 100")):
        with pytest.raises(ValueError, match=why):
            points("experts", **axes)


def test_contexts_have_planned_and_held_bytes():
    study, rows = study_named("contexts"), quick_rows("contexts")
    dual, auto, raw, fp8 = rows
    assert auto["status"] in ("ok", "refused") and dual["plan_over_measured"] > 0
    assert dual["kv_held"] == 4 and dual["moved_bytes"] == 0
    # Of half of the raw ones the rest goes below, coded or not.
    assert raw["device_bytes"] < dual["device_bytes"] and raw["moved_bytes"] > 0
    assert fp8["kv_held"] < raw["kv_held"] and fp8["moved_bytes"] < raw["moved_bytes"]
    tables, last = study.tables(rows), study.last_line(rows)
    assert "| 96:2:4 `fast_dllm_dual`, fp8 |" in tables["contexts_kv"] and "1.000" in tables["contexts"]
    assert last["kv_bytes_per_element_fp8"] == fp8["kv_held"] and last["kv_bytes_per_element_nvfp4"] is None
    assert last["plan_over_measured_spread"] >= 1 and last["dkv_pd_over_dual_time"] is None
    made = points("contexts")
    assert [each["budget"] for each in made[:18]] == [None] * 18 and {each["context"] for each in made[18:]} == {8192}
    assert 0 < study.expected(made[-1] | {"context": 256, "width": 64, "layers": 2}) < 60
    for axes, why in (
        ({"size": ["8k"]}, "'8k'; PROMPT:BLOCKS:STEPS is allowed"),
        ({"policy": ["nne"]}, "did you mean"),
    ):
        with pytest.raises(ValueError, match=why):
            points("contexts", **axes)


@pytest.mark.long
def test_the_host_is_counted_and_timed():
    study, rows = study_named("host"), quick_rows("host")
    tables, last = study.tables(rows), study.last_line(rows)
    assert list(tables) == [f"host_{part}" for part in study.PARTS]
    assert all(table.count("\n") >= 2 for table in tables.values())
    assert {(row["family"], row["launches"]) for row in rows if row["part"] == "seconds"} == {("llada", 11)}
    assert last["plain_launches_per_layer"] == 11 and last["refresh_launches_per_layer"] is None
    assert last["host_us_per_layer"] > 0 and last["host_over_bare_launches"] > 1
    assert last["waits_per_served_round"] == 1 and last["served_launches_per_layer"] == 10
    # No byte of keys and values is read by itself, in any code, and a layer has 51 pieces.
    assert last["byte_loads_in_attention"] == 0
    assert 0 < last["small_copy_wait_over_whole"] < 0.5
    assert set(study.last_line([]).values()) == {None}
    for axes in ({"family": ["llama"]}, {"policy": ["polstar"]}, {"part": ["second"]}):
        with pytest.raises(ValueError, match="did you mean"):
            points("host", **axes)


def test_loads_of_a_kernel_are_counted_by_their_bytes():
    ptx = """
        @%p4 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd26 + 0 ];
        @%p4 ld.global.L1::evict_last.b8 { %rs17 }, [ %rd44 + 0 ];
        ld.global.u8 { %rs18 }, [ %rd45 + 0 ];
        ld.shared.b8 %rs19, [ %r5 ];
        cp.async.ca.shared.global [ %r6 + 0 ], [ %rd47 + 0 ], 0x4, %r7;
    """
    assert by_width(ptx) == {"load": {"1": 2, "16": 1}, "copy": {"4": 1}}


def test_a_scaling_is_written_as_kind_factor_and_trained_positions():
    with pytest.raises(ValueError, match="scaling = 'yarn:2'; default, or KIND:FACTOR:TRAINED"):
        points("stretch", scaling=["yarn:2"])


def test_an_axis_that_a_policy_has_not_is_no_axis_of_it():
    given = {"policy": ["polestar", "polestar-window", "none"], "codec": ["raw", "fp8"], "confidence": [None, 0.9]}
    made = points("sweep", clusters=[4, 8], top_m=[1], update_threshold=[0, 2], **given)
    counts = {policy: sum(each["policy"] == policy for each in made) for policy in given["policy"]}
    # A preset keeps its own options.
    assert counts == {"polestar": 16, "polestar-window": 2, "none": 2}
    assert {each["call"].get("confidence_threshold") for each in made} == {None, 0.9}
    assert all({"clusters", "codec"} <= each.keys() for each in made if each["policy"] == "polestar")


def test_other_options_go_to_the_policies_that_have_them():
    few: dict[str, Any] = {"clusters": [4], "top_m": [1], "update_threshold": [0], "policy": ["polestar", "none"]}
    option = parse_values("option", "none,cluster_layers=1 refresh=drift", [None])
    made = points("sweep", option=option, budget=["12MiB"], **few)
    own = [each["options"] for each in made if each["policy"] == "polestar"]
    assert [options.get("cluster_layers") for options in own] == [None, 1] and own[1]["refresh"] == "drift"
    assert [each["options"] for each in made if each["policy"] == "none"] == [{}]
    assert {each["budget"] for each in made} == {12 << 20}
    for wrong, why in ((["cluster_layer=1"], "cluster_layers"), (["refresh"], "NAME=VALUE")):
        with pytest.raises(ValueError, match=why):
            points("sweep", option=wrong, **few)


def row(policy: str, task: str, correct: int, **figures: Any) -> dict[str, Any]:
    """Of ten examples."""
    point = f"{policy} {figures.get('rule')} {figures.get('clusters')} {figures.get('update_threshold')}"
    of = {"point": point, "run": 0, "stamp": "s", "status": "ok", "policy": policy, "task": task, "examples": 10}
    costs = {"tokens_per_second": 1.0, "device_bytes": 1 << 20, "host_bytes": 0, "nfe": 2.0, "tokens_per_forward": 4.0}
    return of | costs | {"correct": correct} | figures


def test_a_cell_of_the_sweep_is_right_answers_and_the_median_speed():
    knobs = {"clusters": 8, "top_m": 4, "update_threshold": 0}
    rows = [
        *(
            row("polestar", "sort", 6, run=run, tokens_per_second=speed, **knobs)
            for run, speed in enumerate((30, 10, 20.4))
        ),
        row("polestar", "sort", 5, **knobs | {"update_threshold": 4, "device_bytes": 3 << 20, "host_bytes": 2048}),
        row("polestar", "sort", 4, **knobs | {"clusters": "auto", "update_threshold": 4}),
        row("polestar", "chain", 9, **knobs),
        row("none", "sort", 10),
        {"point": "refused", "run": 0, "status": "refused", "why": "too small", "policy": "polestar", **knobs},
    ]
    table = study_named("sweep").tables(rows)["sweep"].splitlines()
    assert table[2:6] == [
        "| C auto, M 4 |  | 4 (1) | 1.00 MiB | 0 |",
        "| C 8, M 4 | 6 (20) | 5 (1) | 3.00 MiB | 2.00 KiB |",
        "| `none` | 10 (1) |  | 1.00 MiB | 0 |",
        "",
    ]


def test_compared_points_stand_together_and_a_name_stands_for_several():
    made = points("compare", model=["embedded"], policy=["none", "elastic_cache", "transformers"])
    rules = [each["rule"] for each in made]
    assert rules == ["one a step"] * (len(rules) // 2) + ["threshold 0.9"] * (len(rules) // 2)
    names = [each["policy"] for each in made][: len(made) // 2]
    assert names[:5] == ["none", "none, again", "none, random order", "none, one block", "elastic_cache"]
    assert len(names) == 11 and names[5] == "transformers, no cache"
    assert [each["call"]["block_length"] for each in made[:5]] == [8, 8, 8, 32, 32]
    uniform = points("compare", model=["embedded-uniform"])
    assert not any(each["policy"].startswith("transformers") for each in uniform)
    assert {each["call"].get("tokens_per_step") for each in uniform} == {None, 3}
    with pytest.raises(ValueError, match="polestar"):
        points("compare", policy=["polesta"])


def test_tables_of_a_comparison_have_the_figures_of_its_rows():
    study, slow, fast = study_named("compare"), "one a step", "threshold 0.9"
    call, of = {"block_length": 8}, {"model": "embedded", "noise": "mask", "bytes": "booked"}
    costs = {"rows_per_forward": 2.0, "cache_ratio": 0.5, "passes": {"step": 4}}
    long = costs | {"to_device_bytes": 3072, "to_host_bytes": 1024, "size": 992, "nfe": 6.0}
    rows = [
        *(each | of | {"rule": rule, "call": call} for rule in (slow, fast) for each in (
            row("none", "copy", 10, rule=rule),
            row("none", "lookup", 9, rule=rule),
            row("transformers, cache", "copy", 7, rule=rule),
        )),
        # A machine that is half as fast in the second run: no ratio may cross runs.
        *(
            row(policy, "lookup", 1, rule=slow, run=run, tokens_per_second=speed, **long) | of | {"call": call}
            for policy, speeds in (("none", (10, 5)), ("none, again", (11, 5.5)), ("transformers, cache", (40, 20)))
            for run, speed in enumerate(speeds)
        ),
        {"point": "x", "run": 0, "stamp": "s", "status": "refused", "why": "too fast", "policy": "dkv_greedy", **of,
         "rule": fast, "call": call},
    ]  # fmt: skip
    tables = study.tables(rows)
    right, costs_table, floor, refused = tables["compare"].split("\n\n")
    assert right.splitlines()[0].startswith(
        "|  | lists, 10 | sort, 0 | add, 0 | chain, 0 | lookup, 10 | threshold 0.9: all, 20 |"
    )
    # The long lookup does not count as a lookup; a task that was not asked has an empty cell.
    assert "| `none` | 100 (72–100) |  |  |  | 90 (60–98) | 95 (76–99) | 2.00 | 4.00 |" in right  # noqa: RUF001
    assert "| `transformers, cache` | 30.0 | 4.00 (4.00–4.00) | 2.0 | 0.500 | 1.00 MiB | 0 | 1.00 KiB |" in costs_table  # noqa: RUF001
    assert "2 such pairs are apart by 10.0 % at the 80th percentile, by 10.0 % at most" in floor
    assert refused == "`dkv_greedy`, threshold 0.9: too fast."
    assert [line.partition("|")[2].partition("|")[0].strip() for line in tables["short"].splitlines()[2:]] == [
        "`none`",
        "`transformers, cache`",
    ]
    assert "transformers" not in tables["noise"] and "again" not in tables["noise"]


def test_accuracy_asks_all_policies_alike_and_early_commits_stand_in_a_table_of_their_own():
    made = points("accuracy", policy=["none", "fast_dllm_dual"])
    asked = [
        {(each["rule"], *task) for each in made if each["policy"] == policy for task in each["tasks"]}
        for policy in ("none", "fast_dllm_dual")
    ]
    assert asked[0] == asked[1] >= {("one a step", "lookup", 2048, 12), ("drift_aware 0.9", "long_copy", None, 60)}
    rows = [
        row("none", "sort", 10, rule="one a step", noise="mask"),
        row("none", "lookup", 5, rule="threshold 0.9", noise="mask", size=512),
        row("none", "add", 10, rule="drift_aware 0.9", noise="mask"),
    ]
    tables = study_named("accuracy").tables(rows)
    assert [line.partition("|")[2].partition("|")[0].strip() for line in tables["early"].splitlines()[2:]] == [
        "`lookup`, 512 tokens",
        "`add`",
    ]
    assert tables["accuracy"].splitlines()[2:] == [
        "| `sort` | 100 (72–100) of 10; 2.0 |  |",  # noqa: RUF001
        "| `lookup`, 512 tokens |  | 50 (24–76) of 10; 2.0 |",  # noqa: RUF001
    ]


def test_drift_is_nothing_without_a_cache_and_less_with_updates():
    study, found = study_named("token_drift"), {}
    asked = {"model": "embedded", "options": {}, "tasks": [["sort", None, 1]]}
    call = {"max_new_tokens": 16, "block_length": 16, "steps": 8, "stop_at_eos": False}
    for policy, options in (("fast_dllm_dual", {}), ("polestar, T 0", {"update_threshold": 0})):
        settings = COMMON | asked | {"policy": policy, "options": options, "call": call}
        [found[policy]] = study.measure(settings, paths={"embedded": "embedded"})
    dual, updated = found.values()
    assert 0 <= updated["values"] < dual["values"] and updated["moved_bytes"] > 0 == dual["moved_bytes"]


def test_parts_of_the_tiers():
    study = study_named("tiers")
    rows = list(study.measure({"part": "codecs", "clusters": 4}))
    assert {each["layer"] for each in rows} == set(range(5))
    errors = {
        name: [each["error"] for each in rows if each["codec"] == name] for name in ("raw", "nvfp4", "nvfp4_delta")
    }
    assert not any(errors["raw"]) and all(
        0 < a < b for a, b in zip(errors["nvfp4_delta"], errors["nvfp4"], strict=True)
    )
    coded = {(each["of"], each["codec"], each["layer"]): each["error"] for each in study.measure({"part": "kv"})}
    assert len(coded) == 2 * 2 * 2 * 5
    assert all(0.02 < error < 0.03 or not codec.startswith("fp8") for (_, codec, _), error in coded.items())
    with pytest.raises(ValueError, match="codecs"):
        points("tiers", part=["codes"])
