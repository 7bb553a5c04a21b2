"""An open policy, or an open refresh: the prompt and the budget decide."""

import json
import time
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from measuring.statistics import merged
from measuring.store import read_rows
from measuring.winners import contests, over_least
from studies import regimes
from workloads.calls import BLOCK, budget_of
from workloads.models import random_model
from workloads.staleness import StalenessInspector

import tiered
from tiered.cli.main import main
from tiered.core.budget import MemoryBudget
from tiered.forward.sizes import CallShape, Gpu
from tiered.planning.choice import AUTO, Choice, choose
from tiered.planning.workload import Workload
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import Auto, make_policy, policies_for
from tiered.policies.row_schedule import LEAST_STALE_PROMPT, REFRESH_EVERY_4

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


NONE, DUAL = make_policy("none"), make_policy("fast_dllm_dual")
SELDOM_DUAL = make_policy("fast_dllm_dual", refresh_blocks=REFRESH_EVERY_4)


@cache
def model(width: int = 64) -> Any:
    return random_model(width, 4, 16384)


def sizes(context: int, *, answer: int | None = 128, block: int = BLOCK, width: int = 64, **more: Any) -> CallShape:
    """Of a call with so many positions."""
    of = {"batch": 1, "dtype": "float32"} | more
    return CallShape(shape=model(width).shape, context=context, block_length=block, answer=answer, **of)


def chosen(policy: str = "auto", **given: Any) -> Choice:
    call = {"context": 2176} | given
    others: dict[str, Any] = {"budget": MemoryBudget()}
    others |= {name: call.pop(name) for name in ("budget", "prompt") if name in call}
    return choose(make_policy(policy), sizes(**call), **others)


class TestChoice:
    """By prompt and fit."""

    def test_every_policy_without_an_open_option_is_its_own_choice(self):
        for name in {*policies_for("canvas")} - {"auto"}:
            policy = make_policy(name)
            assert choose(policy, sizes(2176), MemoryBudget()) == Choice(policy)

    @pytest.mark.parametrize(
        ("given", "policy", "why"),
        [
            ({}, AUTO, "measured to answer as `none`, for 4 blocks after a prompt of 2048 tokens"),
            (
                {"context": LEAST_STALE_PROMPT + 32, "answer": 32},
                AUTO,
                "measured to answer as `none`, for 1 block after a prompt of 256 tokens",
            ),
            (
                {"batch": 2, "prompt": 40},
                NONE,
                "the prompt has 40 tokens; caches lose answers below 256",
            ),
            (
                {"context": LEAST_STALE_PROMPT - 1 + 128},
                NONE,
                "the prompt has 255 tokens; caches lose answers below 256",
            ),
        ],
    )
    def test_the_prompt_decides(self, given: dict[str, Any], policy: Policy, why: str):
        assert chosen(**given) == Choice(policy, why)

    @pytest.mark.parametrize("short", [1, 0])
    def test_the_choice_is_none_if_nothing_else_fits(self, short: int):
        needed = Workload(NONE, sizes(2176)).total()
        found = chosen(budget=MemoryBudget(device=needed - short, host=0))
        assert found == Choice(NONE, "nothing fits the budget" if short else "nothing else fits the budget")

    def test_the_kind_of_machine_plays_no_part(self):
        gpus = [None, *(Gpu(workspace_bytes=0, multiprocessors=8, name=name) for name in ("NVIDIA L4", "NVIDIA H100"))]
        assert len({chosen(gpu=gpu) for gpu in gpus}) == 1

    @pytest.mark.alone
    @pytest.mark.parametrize("budget", [MemoryBudget(), MemoryBudget(device="1GiB")])
    def test_a_choice_takes_less_than_a_millisecond(self, budget: MemoryBudget):
        of, seconds = sizes(2176), []
        for _ in range(50):
            begin = time.perf_counter()
            choose(Auto(), of, budget)
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 1e-3, seconds

    @pytest.mark.parametrize("prompt", [LEAST_STALE_PROMPT - 1, LEAST_STALE_PROMPT])
    @pytest.mark.parametrize(
        ("policy", "plain", "seldom"),
        [
            (Polestar(refresh="auto", top_m=2), Polestar(top_m=2), Polestar(refresh="drift", top_m=2)),
            (make_policy("fast_dllm_dual", refresh_blocks="auto"), DUAL, SELDOM_DUAL),
            (
                make_policy("fast_dllm_prefix", refresh_blocks="auto"),
                make_policy("fast_dllm_prefix"),
                make_policy("fast_dllm_prefix", refresh_blocks=REFRESH_EVERY_4),
            ),
        ],
    )
    def test_an_open_refresh(self, prompt: int, policy: Any, plain: Any, seldom: Any):
        found = choose(policy, sizes(prompt + 128), MemoryBudget())
        assert found.policy == (seldom if prompt == LEAST_STALE_PROMPT else plain)
        assert found.why == f"4 blocks after a prompt of {prompt} tokens"
        assert choose(policy, sizes(2080, answer=32), MemoryBudget()).policy == plain

    def test_an_open_policy_does_not_start(self):
        with pytest.raises(TypeError, match="policy 'auto' cannot run"):
            Auto().start()
        with pytest.raises(ValueError, match="option 'top_m': policy 'auto' has no options"):
            make_policy("auto", top_m=2)


class TestAlike:
    """`generate`, `choose`, `plan` and the command line."""

    @pytest.mark.covering(1)
    @pytest.mark.parametrize("options", [{}, {"steps": 16}, {"block_length": 64}])
    @pytest.mark.parametrize("prompt", [40, 300])
    def test_they_choose_alike(self, prompt: int, options: dict[str, Any], capsys: pytest.CaptureFixture[str]):
        ids, call = torch.full((1, prompt), 7), dict[str, Any]({"max_new_tokens": 64, **options})
        runtime = tiered.from_pretrained("embedded", device="cpu")
        assert runtime.policy == make_policy(DEFAULT_POLICY) == Auto()
        out = runtime.generate(ids, stop_at_eos=False, **call)
        assert out.choice == runtime.choose(ids, **call) and out.choice.why
        again = runtime.with_policy(out.choice.policy).generate(ids, stop_at_eos=False, **call)
        assert torch.equal(again.sequences, out.sequences) and again.choice == Choice(out.choice.policy)
        assert json.loads(json.dumps(out.as_dict()))["choice"]["policy"] == out.choice.policy.name

        flags = f"--context {prompt + 64} --max-new-tokens 64 --block-length {options.get('block_length', 32)}"
        assert main(["plan", "embedded", *flags.split(), "--device", "cpu", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {name: told[name] for name in ("policy", "policy_options", "why")} == out.choice.as_dict()

    @pytest.mark.parametrize(
        "options", [{"trailing_noise": 37}, {"correction_steps": 2}, {"tokens_per_step": 3}, {"block_length": 64}]
    )
    def test_calls_of_uniform_noise(self, options: dict[str, Any]):
        runtime = tiered.from_pretrained("embedded-uniform", device="cpu")
        found = runtime.choose(torch.full((2, 300), 7), **dict[str, Any]({"max_new_tokens": 64}) | options)
        assert found.policy.name != "none" and str(found) == f"{found.policy}: {found.why}"
        assert repr(Choice(NONE)) == "<Choice none>"

    def test_a_card_has_the_reason(self):
        made = tiered.plan("embedded", context=1024)
        assert made.why and f"chosen: {made.why[:40]}" in str(made)
        assert "chosen" not in str(tiered.plan("embedded", context=1024, policy="none"))

    def test_an_inspector_changes_no_choice(self):
        # The call just fits the budget: with an inspector it is refused, and gets no other policy.
        ids = torch.full((1, 300), 7)
        runtime = tiered.from_pretrained("embedded", device="cpu")
        out = runtime.generate(ids, max_new_tokens=32)
        assert out.memory.budget is not None
        tight = tiered.from_pretrained("embedded", device="cpu", memory=replace(out.memory.budget, host=0))
        assert tight.generate(ids, max_new_tokens=32).choice.policy == out.choice.policy
        with pytest.raises(tiered.TierCapacityError):
            tight.generate(ids, max_new_tokens=32, inspector=StalenessInspector())


class TestRegimes:
    """The map of measured calls (`bench/measure.py regimes`) holds the table."""

    NAMES: ClassVar[dict[Policy, str]] = {
        NONE: "none",
        AUTO: "attended",
        DUAL: "fast_dllm_dual",
        SELDOM_DUAL: regimes.FOURTH,
        Polestar(): "polestar",
        Polestar(refresh="drift"): "polestar-drift",
    }
    TIE = 1.1

    def ratios(self, policy: Policy, rivals: Collection[str] | None = None) -> dict[tuple[Any, ...], float]:
        """By point, the seconds of the policy chosen by `policy` over the least of `rivals`, or of all policies."""
        rows, _ = read_rows(RESULTS / "regimes")
        found = {}
        for point, contest in contests(
            merged(rows, timed=regimes.TIMED), ("context", "blocks", *regimes.SIDES)
        ).items():
            context, blocks, steps, width, budget, _ = point
            answer = blocks * BLOCK
            of = sizes(context + answer, answer=answer, width=width)
            settings = {"context": context, "blocks": blocks, "steps": steps, "budget": budget, "device": "cpu"}
            name = self.NAMES[choose(policy, of, budget_of(settings, model(width).shape)).policy]
            among = {each: contest[each] for each in contest if rivals is None or each in rivals}
            if (ratio := over_least(among, "seconds").get(name)) is not None:
                found[point] = ratio
        return found

    def test_the_choice_is_faster_than_none(self):
        found = self.ratios(Auto(), {"none", "attended"})
        slower = {point: ratio for point, ratio in found.items() if ratio > self.TIE}
        # Half of the cache goes over a slow link.
        assert len(found) == 30 and slower == {(512, 4, 4, 256, 0.5, 100): pytest.approx(1.24, abs=0.01)}

    def test_the_choice_is_the_fastest_that_looks_at_the_prompt_again(self):
        """The others freeze it, and answer no fresh task (docs/fresh-prompts.md)."""
        assert max(self.ratios(Auto()).values()) < 2
        looking = {"attended", "polestar", "polestar-drift"}
        assert max(self.ratios(Auto(), looking).values()) == 1

    @pytest.mark.parametrize(
        ("policy", "values"),
        [
            (Polestar(refresh="auto"), ("polestar", "polestar-drift")),
            (make_policy("fast_dllm_dual", refresh_blocks="auto"), ("fast_dllm_dual", regimes.FOURTH)),
        ],
    )
    def test_an_open_refresh_is_within_a_tenth_of_the_faster(self, policy: Policy, values: tuple[str, str]):
        found = self.ratios(policy, values)
        assert len(found) >= 20 and max(found.values()) <= self.TIE, found
