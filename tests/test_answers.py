"""What a point of an answering study measures, against the runtime asked directly; what it refuses; its baselines."""

from typing import Any

import pytest
from measuring.worker import RefusedError
from training import tasks
from workloads.answers import measure, tasks_of
from workloads.scoring import score_examples
from workloads.variants import all_variants, noise_of

import tiered
from tiered.output import GenerationOutput
from tiered.policies.registry import PRESETS, policies_for

PATHS = {"embedded": "embedded"}
CALL: dict[str, Any] = {"max_new_tokens": 32, "block_length": 16, "confidence_threshold": 0.9}
OPTIONS: dict[str, Any] = {"clusters": 4, "top_m": 2, "update_threshold": 0, "codec": "raw", "cluster_layers": 1}


def point(policy: str, *asked: list[Any], **settings: Any) -> dict[str, Any]:
    """Settings of one."""
    common = {"model": "embedded", "device": "cpu", "threads": 1, "seed": 5, "options": {}, "call": CALL}
    return common | {"policy": policy, "tasks": list(asked)} | settings


def asked_directly(runtime: tiered.Runtime, task: str, size: int | None, count: int, batch: int) -> dict[str, Any]:
    """The figures that no clock gives, without any of the bench's own parts."""
    examples = [tasks.sample(task, "test", 5 + number, size=size) for number in range(count)]
    warm_up = [[{"role": "user", "content": examples[0].prompt}]]
    runtime.generate(warm_up, **CALL)  # host memory stays
    examples.sort(key=lambda example: len(example.prompt))
    outs: list[GenerationOutput] = []
    right: list[bool] = []
    for start in range(0, count, batch):
        own = examples[start : start + batch]
        outs.append(runtime.generate([[{"role": "user", "content": example.prompt}] for example in own], **CALL))
        assert outs[-1].text is not None
        right += [text == example.answer for text, example in zip(outs[-1].text, own, strict=True)]
    rows = [number for out in outs for number in out.rows_per_step]
    columns = [out.sequences.shape[1] for out in outs for _ in out.rows_per_step]
    ways = [way for out in outs if out.tiers is not None for way in out.tiers.ways.values()]
    assert sum(way.busy_ns for way in ways) > 0
    return {
        "correct": sum(right),
        "right": "".join(str(int(each)) for each in right),
        "nfe": sum(number for out in outs for number in out.forwards) / count,
        "rows_per_forward": pytest.approx(sum(rows) / len(rows)),
        "cache_ratio": pytest.approx(1 - sum(rows) / sum(columns)),
        "passes": {
            name: sum(out.steps_by_kind.get(name, 0) for out in outs) for out in outs for name in out.steps_by_kind
        },
        "device_bytes": max(out.memory.peak_device_bytes for out in outs),
        "host_bytes": max(out.memory.peak_host_bytes for out in outs),
        "to_device_bytes": sum(out.memory.moved.get("host->device", 0) for out in outs),
        "to_host_bytes": sum(out.memory.moved.get("device->host", 0) for out in outs),
    }


@pytest.mark.usefixtures("few_slots")
def test_a_row_says_what_the_runtime_does():
    asked = (["chain", None, 3], ["lookup", 96, 2])
    rows = list(measure(point("polestar, named", *asked, options=OPTIONS, batch=2), paths=PATHS))
    runtime = tiered.from_pretrained("embedded", policy="polestar", device="cpu", **OPTIONS)
    for row, (task, size, count) in zip(rows, asked, strict=True):
        expected = asked_directly(runtime, task, size, count, batch=2)
        assert {name: row[name] for name in expected} == expected
        assert (row["task"], row["size"], row["examples"], row["bytes"]) == (task, size, count, "booked")
        assert row["host_bytes"] > 0 and row["copy_ms"] > 0 and 0 <= row["hidden_ms"] <= row["copy_ms"]
        # An answer is part of the seconds, and its first block of two a part of it.
        assert row["ms_per_forward"] > 0 and row["tokens_per_second"] > 0
        assert 0 < row["first_block_ms"] < 1000 * row["seconds"]
    assert rows[0]["passes"]["update"] > 0 and rows[0]["to_device_bytes"] > 0


@pytest.mark.long
def test_rows_that_each_layer_adds_keep_what_a_frozen_prompt_loses():
    """Sorted names: the row of a name sees that it is printed, and the next name's row, a layer above, sees that."""
    settings = {"call": {"max_new_tokens": 32, "block_length": 32}, "split": "validation", "seed": 9000}
    options = {"clusters": 32, "top_m": 2, "update_threshold": 0, "cluster_layers": 1}
    rows = [
        next(measure(point(policy, ["sort", 16, 10], options=given, **settings), paths=PATHS))
        for policy, given in (
            ("none", {}),
            ("fast_dllm_dual", {}),
            ("polestar", options),
            ("polestar", options | {"from_below": "beside"}),
        )
    ]
    none, frozen, among, beside = (row["correct"] for row in rows)
    assert none >= 9 and frozen <= 1 and beside >= 8 and among <= beside - 2
    assert rows[3]["rows_per_forward"] < 1.3 * rows[1]["rows_per_forward"]


@pytest.mark.long
def test_a_prompt_that_is_frozen_loses_every_answer_of_a_fresh_task():
    """The few rows whose output moves at each commit keep them; those whose weights move do not."""
    settings = {"model": "embedded-fresh", "split": "validation", "call": {"max_new_tokens": 64, "block_length": 32}}
    paths = {"embedded-fresh": "embedded-fresh"}
    none, frozen, fresh, weights = (
        next(measure(point(policy, ["sort_numbers", 128, 3], options=options, **settings), paths=paths))
        for policy, options in (
            ("none", {}),
            ("fast_dllm_dual", {}),
            ("polestar-fresh", {}),
            ("polestar-fresh", {"drift": "weights"}),
        )
    )
    assert none["correct"] >= 2 and fresh["correct"] >= none["correct"] - 1
    assert frozen["correct"] == weights["correct"] == 0
    assert fresh["rows_per_forward"] < 0.5 * none["rows_per_forward"]


def test_what_the_library_refuses_is_told_task_by_task():
    asked, call = (["lookup", 9, 1], ["add", None, 1]), {"max_new_tokens": 8, "block_length": 8}
    lookup, add = measure(point("none", *asked, call=call), paths=PATHS)
    assert lookup["status"] == "refused" and "9 tokens hold" in lookup["why"] and "nfe" not in lookup
    assert add["nfe"] == 8.0 and add["copy_ms"] == add["to_host_bytes"] == 0
    with pytest.raises(RefusedError, match="device tier needs"):
        list(measure(point("none", asked[1], call=call, budget=4096), paths=PATHS))
    with pytest.raises(RefusedError, match="dkv_greedy"):
        list(measure(point("dkv_greedy", asked[1], options={"windw": 3}), paths=PATHS))


def test_a_baseline_is_a_row_or_says_why(monkeypatch: pytest.MonkeyPatch):
    import transformers.cache_utils

    asked = ["chain", None, 1]
    theirs, ours = (
        next(measure(point(policy, asked), paths=PATHS)) for policy in ("transformers, cache", "fast_dllm_prefix")
    )
    same = ("correct", "nfe", "tokens_per_forward", "rows_per_forward", "cache_ratio", "passes")
    assert {name: theirs[name] for name in same} == {name: ours[name] for name in same}
    assert (theirs["bytes"], ours["bytes"]) == ("counted", "booked") and theirs["cache_ratio"] > 0
    monkeypatch.setattr(transformers.cache_utils, "is_optimum_quanto_available", lambda: False)
    with pytest.raises(RefusedError, match=r"^not installed: pip install optimum-quanto$"):
        list(measure(point("transformers, quantized", asked), paths=PATHS))


def test_calls_have_as_many_examples_as_asked():
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    examples = [tasks.sample("add", "test", number) for number in range(5)]
    sizes: list[int] = []

    def scores(batch: int | None) -> Any:
        options: dict[str, Any] = {"max_new_tokens": 8, "confidence_threshold": 0.9, "batch": batch}
        return score_examples(runtime, examples, **options, watch=lambda out: sizes.append(out.sequences.shape[0]))

    assert scores(2) == scores(None) and sizes == [2, 2, 1, 5]
    with pytest.raises(ValueError, match="batch"):
        scores(0)


def test_answers_are_told_in_the_order_of_the_examples():
    """So that runs of unequal length are paired by what they have in common, their first examples."""
    runtime = tiered.from_pretrained("embedded", policy="none", device="cpu")
    examples = [tasks.sample("copy", "test", number, size=size) for number, size in enumerate((9, 3, 6, 4))]
    call: dict[str, Any] = {"max_new_tokens": 16, "block_length": 16, "confidence_threshold": 0.99}
    together, first = score_examples(runtime, examples, **call), score_examples(runtime, examples[:2], **call)
    alone = [score_examples(runtime, [example], **call) for example in examples]
    tokens = together.tokens_per_forward
    assert tokens == [of.tokens_per_forward[0] for of in alone] and tokens[:2] == first.tokens_per_forward
    assert tokens not in (sorted(tokens), sorted(tokens, reverse=True))
    assert together.right == [of.right[0] for of in alone] and together.forwards == [of.forwards[0] for of in alone]


def test_what_is_asked_is_written_as_tasks_and_counts():
    assert tasks_of(["sort:3", "lookup@64:2", "lookup:1"], context=96) == [
        ["sort", None, 3],
        ["lookup", 64, 2],
        ["lookup", 96, 1],
    ]
    for wrong, why in (("sorrt:3", "sort"), ("sort:0", "from 1"), ("sort", "sort"), ("lookup@x:1", "TASK@TOKENS")):
        with pytest.raises(ValueError, match=why):
            tasks_of([wrong])


def test_every_policy_and_preset_is_compared_beside_none_in_the_same_call():
    assert (noise_of("embedded"), noise_of("embedded-uniform")) == ("mask", "uniform")
    variants = {variant.name: variant for variant in all_variants()}
    assert {*policies_for("canvas"), *PRESETS} - {"auto"} <= set(variants)
    assert {each.policy for each in variants.values()} <= set(variants)
    calls = [variant.call(answer=32, block=8) for variant in variants.values() if variant.policy == "none"]
    assert all(variant.call(answer=32, block=8) in calls for variant in variants.values())
    # Its window slides over the whole answer; without masks there is nothing to slide over.
    elastic = variants["elastic_cache"]
    assert elastic.call(answer=32, block=8) == {"max_new_tokens": 32, "block_length": 32}
    [whole] = [variant for variant in all_variants(slides=False) if variant.name == "elastic_cache"]
    assert elastic.make().options["window"] < 32 == whole.make().options["window"]
    assert variants["dkv_greedy"].call(answer=32, block=8)["remasking"] == "random"
    # Two rows of one policy would be one measured twice, but for a preset that gives an old thing a new name.
    made = [variant.make() for variant in variants.values() if variant.policy not in ("none", "uniform_prefix")]
    assert len(set(map(str, made))) == len(made)
