"""The study of selectors: rows that an update renews, exact limits, the oracle beside chance, and a run's figures."""

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jaxtyping import Bool, Int
from long_cases import and_long
from measuring.worker import RefusedError
from studies import selection as study
from torch import Tensor
from training import tasks
from workloads import selection_answers, selectors
from workloads.oracles import KEPT, Oracle
from workloads.selection import SELECTORS, Renewing, Selecting, renewed_rows
from workloads.selection_answers import ALONE, REFERENCES, Forced, check_arm, forced, forced_kl, measure, policy_of
from workloads.selectors import BlockLayer, Look, QuickKeys

import tiered
from tiered.core.canvas import Canvas
from tiered.decoding.observers import CallInspector
from tiered.forward.forward import Forward
from tiered.output import GenerationOutput
from tiered.policies.base import PolicyState, Step, StepKind
from tiered.policies.polestar.drift import LayerKeys
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

INTERVAL, BLOCK = 3, 8
# Two blocks: beside a block there are rows of the prompt, of the answer's masks, and of tokens that it fixed.
CALL: dict[str, Any] = {"max_new_tokens": 2 * BLOCK, "block_length": BLOCK, "stop_at_eos": False}
PROMPT, OUTSIDE = 16, 16 + BLOCK
# Attention in the first and in the last layer serves for all five.
LEFT_OUT = ("attention_layer_2", "attention_layer_3", "attention_layer_4")
EVERY = pytest.mark.parametrize("selector", [name for name in SELECTORS if name not in LEFT_OUT])


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained("embedded", policy="none")


def chat(seed: int = 0) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": tasks.sample("sort", "validation", seed, size=12).prompt}]]


def history(runtime: Runtime, policy: Any) -> list[list[int]]:
    out = runtime.with_policy(policy).generate(chat(), output_history=True, **CALL)
    assert out.history is not None
    return [canvas.tolist()[0] for canvas in out.history]


class Watched(CallInspector):
    """Of each forward behind the first: its kind, and the columns outside the block whose keys or values it changed, in
    any layer behind the first."""

    def __init__(self) -> None:
        self.kinds: list[StepKind] = []
        self.changed: list[set[int]] = []
        self._last: list[Tensor] = []

    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        assert isinstance(policy, Renewing)
        self.policy = policy

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        layers = range(1, forward.model.shape.layers)
        now = [forward.store.view(feature, layer).clone() for feature in KEPT for layer in layers]
        if self._last:
            pairs = zip(now, self._last, strict=True)
            moved = torch.stack([(new != old).any(dim=-1).any(dim=1)[0] for new, old in pairs]).any(dim=0)
            moved[step.first_row : step.stop] = False
            self.changed.append(set(moved.nonzero()[:, 0].tolist()))
            self.kinds.append(kind)
        self._last = now


def chosen(runtime: Runtime, *, seed: int = 0, **options: Any) -> tuple[Watched, GenerationOutput]:
    """A call that is watched, and its output."""
    watched, policy = Watched(), Selecting(interval=INTERVAL, seed=seed, **options)
    return watched, runtime.with_policy(policy).generate(chat(), inspector=watched, **CALL)


@pytest.fixture(scope="module")
def refreshed(runtime: Runtime) -> list[list[int]]:
    return history(runtime, make_policy("fast_dllm_dual", refresh_interval=INTERVAL))


@pytest.fixture(scope="module")
def frozen(runtime: Runtime) -> list[list[int]]:
    return history(runtime, make_policy("fast_dllm_dual"))


@pytest.fixture(scope="module")
def none(runtime: Runtime) -> list[Forced]:
    return forced(runtime, chat(), CALL)


@EVERY
def test_an_update_of_all_rows_is_a_refresh(runtime: Runtime, selector: str, refreshed: list[list[int]]):
    assert history(runtime, Selecting(selector=selector, share=1.0, interval=INTERVAL)) == refreshed


@EVERY
def test_no_update_is_a_frozen_prompt(runtime: Runtime, selector: str, frozen: list[list[int]]):
    assert history(runtime, Selecting(selector=selector, share=0.0)) == frozen


@EVERY
def test_an_update_of_all_rows_has_the_logits_of_none(runtime: Runtime, selector: str, none: list[Forced]):
    every = runtime.with_policy(Selecting(selector=selector, share=1.0, interval=1))
    for own, theirs in zip(forced(every, chat(), CALL, none), none, strict=True):
        assert torch.equal(own.none, theirs.logits)
        torch.testing.assert_close(own.logits, theirs.logits, rtol=1e-4, atol=1e-3)


@pytest.mark.covering(1)
@EVERY
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_an_update_renews_the_chosen_rows_and_no_others(runtime: Runtime, selector: str, share: float):
    watched, out = chosen(runtime, selector=selector, share=share)
    updates = iter(watched.policy.chosen)
    for number, kind, changed in zip(itertools.count(1), watched.kinds, watched.changed, strict=False):
        at = number % BLOCK  # forwards of the block so far
        assert kind is (StepKind.REFRESH if not at else StepKind.STEP if at % INTERVAL else StepKind.UPDATE)
        if kind is StepKind.STEP:
            assert not changed
        elif kind is StepKind.UPDATE:
            (columns,) = next(updates)
            assert columns == sorted({*columns}) and len(columns) == renewed_rows(share, OUTSIDE)
            block = range(PROMPT + number - at, PROMPT + number - at + BLOCK)
            assert not {*columns} & {*block} and changed == {*columns}
    assert next(updates, None) is None and len(watched.policy.chosen) == out.steps_by_kind["update"] == 4


@pytest.mark.parametrize("selector", ["round_robin", "oldest"])
def test_every_row_is_renewed_before_any_is_again(runtime: Runtime, selector: str):
    updates = chosen(runtime, selector=selector, share=0.5)[0].policy.chosen
    for first, second, block in (*updates[:2], 0), (*updates[2:], 1):
        start = PROMPT + block * BLOCK
        assert sorted(first[0] + second[0]) == [c for c in range(OUTSIDE + BLOCK) if not start <= c < start + BLOCK]


@EVERY
def test_the_same_seed_chooses_the_same_rows(runtime: Runtime, selector: str):
    first, again, other = (chosen(runtime, selector=selector, share=0.2, seed=n)[0].policy.chosen for n in (1, 1, 2))
    assert first == again and (first == other) == (selector not in ("random", "oldest"))


def test_oracles_are_nearer_to_none_than_chance(runtime: Runtime):
    means = dict.fromkeys(("oracle_output", "oracle", "random", "frozen"), 0.0)
    for seed in range(3):
        none = forced(runtime, chat(seed), CALL)
        assert forced_kl(forced(runtime, chat(seed), CALL, none)) == [0]
        for arm in means:
            policy = policy_of(arm, 0.0 if arm == "frozen" else 0.25, INTERVAL, seed=seed, areas=(PROMPT, BLOCK))
            means[arm] += sum(forced_kl(forced(runtime.with_policy(policy), chat(seed), CALL, none)))
    assert 0 < means["oracle"] < means["random"] < means["frozen"]
    assert 0 < means["oracle_output"] < means["random"]


def test_the_oracle_foresees_the_change_of_one_row(runtime: Runtime):
    # Attention over the store with one row's uncached keys and values in it, beside the oracle's figure for the row.
    figures: list[tuple[float, float]] = []

    class Probed(Oracle):
        def change(self, look: Look, of: BlockLayer, fresh: Forward) -> Tensor:
            scores, store, layer, column = super().change(look, of, fresh)[0], look.forward.store, of.layer, 5
            kept = {feature: store.view(feature, layer)[:, :, column].clone() for feature in KEPT}
            for feature in KEPT:
                store.view(feature, layer)[:, :, column] = fresh.store.view(feature, layer)[:, :, column]
            mixed = look.forward.attended(layer, look.block, of.queries)
            for feature, rows in kept.items():
                store.view(feature, layer)[:, :, column] = rows
            moved = look.forward.model.attention_out(layer, mixed - of.mixed)
            exact = (moved.square().sum(-1) / of.hidden.square().sum(-1))[look.pending].sum()
            figures.append((scores[column].item(), exact.item()))
            return scores[None]

    with patch.dict(SELECTORS, {"oracle": Probed}):
        chosen(runtime, selector="oracle", share=0.1)
    foreseen, exact = zip(*figures, strict=True)
    assert foreseen == pytest.approx(exact, rel=1e-2, abs=1e-9) and max(exact) > 1e-6


@pytest.mark.parametrize(
    ("arm", "share", "expected"),
    [
        ("polestar-auto", 0.5, {"clusters": "auto", "top_m": 2}),
        ("polestar-8", 0.25, {"clusters": 8, "top_m": 2}),
        ("polestar-8", 0.01, {"clusters": 8, "top_m": 1}),
        ("polestar-rows", 0.1, {"clusters": "rows", "top_m": 26, "drift": "weights"}),
        ("fresh-rows", 0.1, {"clusters": "rows", "top_m": 26, "drift": "output", "from_below": "beside"}),
        ("polestar-1000", 0.1, {"clusters": 256, "top_m": 26}),
        ("oracle", 0.1, {"selector": "oracle", "share": 0.1, "seed": 7}),
        ("all", 1.0, {"selector": "random", "share": 1.0}),
        ("none", 1.0, {}),
    ],
)
def test_arms_are_policies_with_the_share_asked(arm: str, share: float, expected: dict[str, Any]):
    options = policy_of(arm, share, INTERVAL, seed=7, areas=(160, 96)).options
    assert {name: options[name] for name in expected} == expected
    assert options.get("update_threshold", INTERVAL - 1) == INTERVAL - 1


def settings(arm: str, shares: list[int | None], **more: Any) -> dict[str, Any]:
    of = {"model": "embedded", "device": "cpu", "seed": 0, "task": "sort", "size": 16, "split": "validation"}
    of |= {"prompts": 3, "kl_prompts": 2, "interval": INTERVAL, "call": CALL}
    return of | {"selector": arm, "shares": shares} | more


def rows_of(arm: str, shares: list[int | None], **more: Any) -> list[dict[str, Any]]:
    return list(measure(settings(arm, shares, **more), paths={"embedded": "embedded"}))


def test_a_run_counts_renewed_rows():
    found = {arm: rows_of(arm, [None]) for arm in REFERENCES}
    found |= {arm: rows_of(arm, [10, 50]) for arm in ("random", "polestar-rows")}
    renewed = {arm: [row.get("renewed") for row in rows] for arm, rows in found.items()}
    assert renewed["none"] == renewed["frozen"] == [None]
    assert renewed["all"] == pytest.approx([1.0])
    # Of 20 tokens and a block 3 rows, and 14. A cluster of one row is one row.
    assert renewed["random"] == renewed["polestar-rows"] == pytest.approx([3 / 28, 14 / 28])
    assert "kl" not in found["none"][0] and found["frozen"][0]["kl"] > found["all"][0]["kl"] > 0
    assert [row["share"] for row in found["random"]] == [10, 50]
    assert all(len(row["right"]) == row["examples"] == 3 for rows in found.values() for row in rows)
    assert found["random"] == rows_of("random", [10, 50])


def test_a_share_is_asked_until_its_interval_is_narrow():
    asked = {"prompts": 3, "kl_prompts": 0, "seed": 6}
    with patch.multiple(selection_answers, LOOK=2, NARROW=0.67):  # two alike are enough, one of two is not
        rows = [*rows_of("none", [None], **asked), *rows_of("all", [None], **asked), *rows_of("random", [1], **asked)]
        together = rows_of("random", [1, 100], **asked)
    assert [row["right"] for row in rows] == ["11", "011", "00"]
    assert [row["right"] for row in together] == ["00", "011"]


def test_shares_are_of_the_oracles_gain_in_common_cells():
    def row(arm: str, share: int | None, right: str, kl: float | None = None, task: str = "sort") -> dict[str, Any]:
        of = {"selector": arm, "share": share, "task": task, "right": right, "correct": right.count("1")}
        of |= {"point": f"{arm} {task}", "run": 0, "stamp": "s", "status": "ok", "examples": len(right)}
        return {name: value for name, value in (of | {"kl": kl}).items() if value is not None}

    rows = [row("none", None, "1111"), row("frozen", None, "1000", 0.5), row("all", None, "1111", 0.0)]
    rows += [row("oracle", 10, "1110", 0.1), row("oracle", 50, "1111", 0.0), row("drift", 10, "1100", 0.3)]
    rows += [row("random", 10, "1000", 0.6), row("random", 50, "1110", 0.2), row("random", 50, "1111", task="other")]
    last = study.last_line(rows)
    assert last["frozen_loses_points"] == 75 and last["frozen_loses_interval"][0] < 75
    assert last["drift_share_of_oracle"] == 0.5 and last["random_share_of_oracle"] == 0.4
    assert last["share_of_oracle"] == {"all": 1.2, "oracle": 1.0, "drift": 0.5, "random": 0.4}
    assert last["share_of_oracle_kl"] == {"all": 1.111, "oracle": 1.0, "drift": 0.5, "random": 0.222}
    nothing = study.last_line([row("none", None, "1"), row("drift", 10, "1")])
    assert nothing["frozen_loses_points"] is None and nothing["drift_share_of_oracle"] is None


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"selector": ["drft"]}, "selector 'drft'.*'drift'"),
        ({"selector": ["polestar-0"]}, "selector 'polestar-0'"),
        ({"task": ["srt"]}, "task 'srt'.*'sort'"),
        ({"share": [0]}, "share = 0"),
    ],
)
def test_a_value_that_is_not_in_the_study_is_named(axes: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        list(study.points(study.AXES | axes))


@pytest.mark.parametrize("selector", and_long(["attention_pending", "oracle"], ["oldest", "drift_attention"]))
def test_prompts_asked_together_choose_as_they_do_alone(
    runtime: Runtime, selector: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selectors, "FEW", 1.0)
    # Answers end in different blocks, so that some sequences wait, and some leave before the others.
    asked = [("copy", 16), ("remove", 15), ("sort", 16)]
    examples = [tasks.sample(task, "validation", seed, size=size) for seed, (task, size) in enumerate(asked)]
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    call: dict[str, Any] = {"max_new_tokens": 3 * BLOCK, "block_length": BLOCK}

    def answered(own: list[Any], seed: int) -> tuple[list[str], list[int], list[float]]:
        policy = Selecting(selector=selector, share=0.2, interval=INTERVAL, seed=seed)
        out = runtime.with_policy(policy).generate(own, **call)
        none = forced(runtime, own, call)
        assert out.text is not None
        return out.text, out.forwards, forced_kl(forced(runtime.with_policy(policy), own, call, none))

    alone = [answered([each], seed) for seed, each in enumerate(chats)]
    texts, forwards, kl = answered(chats, 0)
    assert texts == [text for (text,), _, _ in alone] and forwards == [count for _, (count,), _ in alone]
    assert kl == pytest.approx([value for _, _, (value,) in alone], rel=1e-3)
    assert len({*forwards}) > 1


def test_calls_that_a_selector_refuses_are_named(runtime: Runtime):
    with pytest.raises(ValueError, match="selector 'newest'"):
        Selecting(selector="newest", share=0.1)
    for selector, other, told in (
        (ALONE, chat(), "2 sequences"),
        ("random", [[{"role": "user", "content": "a"}]], "pads"),
    ):
        with pytest.raises(ValueError, match=told):
            runtime.with_policy(Selecting(selector=selector, share=0.1)).generate(chat() + other, **CALL)
    with pytest.raises(RefusedError):
        list(measure(settings("drift", [10], call={"max_new_tokens": 0}), paths={"embedded": "embedded"}))
    check_arm("polestar-rows")


@pytest.mark.parametrize("selector", ["drift", "drift_output", "drift_attention"])
def test_drift_from_changed_columns_chooses_the_same_rows(
    runtime: Runtime, selector: str, monkeypatch: pytest.MonkeyPatch
):
    updates = []
    for few in (0.0, 1.0):
        monkeypatch.setattr(selectors, "FEW", few)
        updates.append(chosen(runtime, selector=selector, share=0.2)[0].policy.chosen)
    assert updates[0] == updates[1]


def test_drift_takes_its_log_sum_exps_from_attention_of_torch():
    generator = torch.Generator().manual_seed(0)
    queries, keys = (3 * torch.randn(2, heads, rows, 16, generator=generator) for heads, rows in ((4, 70), (2, 90)))
    ours, theirs = (kind(keys).log_sums(queries) for kind in (QuickKeys, LayerKeys))
    found, expected = (sums.peak + sums.mass.log() for sums in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
