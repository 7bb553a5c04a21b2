"""What a call runs under where that is left open: one place decides, by measured answers, bytes and estimated time."""

import json
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

import tiered
from tiered.cli.main import main
from tiered.core.budget import MemoryBudget
from tiered.core.rates import DEVICES, NOMINAL_CPU, NOMINAL_GPU, Rates, nominal_rates
from tiered.forward.sizes import CallSizes
from tiered.options import CONFIDENT_TOKENS, GenerationOptions
from tiered.planning.choice import TIE, Choice, choose
from tiered.planning.plan import Plan
from tiered.planning.workload import Workload
from tiered.policies import DEFAULT_POLICY
from tiered.policies.auto import HELD, SELDOM_FROM, Auto
from tiered.policies.elastic_cache.policy import ElasticCache
from tiered.policies.polestar.policy import Polestar
from tiered.policies.registry import make_policy, policies_for
from tiered.policies.row_schedule import LEAST_STALE_PROMPT, SELDOM

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


@cache
def model(width: int = 64) -> Any:
    return random_model(width, 4, 16384)


def sizes(context: int, *, answer: int | None = 128, block: int = BLOCK, width: int = 64, **more: Any) -> CallSizes:
    """Of a call with so many positions."""
    of = {"batch": 1, "dtype": "float32"} | more
    return CallSizes(shape=model(width).shape, context=context, block_length=block, answer=answer, **of)


def chosen(policy: str = "auto", *, options: dict[str, Any] | None = None, **given: Any) -> Choice:
    call = {"context": 2176} | given
    others: dict[str, Any] = {"budget": MemoryBudget(), "tokens_per_forward": 8} | {
        name: call.pop(name) for name in ("budget", "tokens_per_forward", "rewrites", "prompt", "rates") if name in call
    }
    return choose(make_policy(policy, **(options or {})), sizes(**call), **others)


LONG = ["none", "fast_dllm_dual", "fast_dllm_dual(refresh_blocks=4)", "dkv_pd", "dllm_cache", "elastic_cache"]
LONG += ["polestar", "polestar(refresh='drift')"]


NONE, DUAL = make_policy("none"), make_policy("fast_dllm_dual")
SELDOM_DUAL = make_policy("fast_dllm_dual", refresh_blocks=SELDOM)


class TestCandidates:
    """What may be chosen at all."""

    def test_every_policy_but_those_that_leave_something_open_is_its_own_choice(self):
        for name in {*policies_for("canvas")} - {"auto"}:
            policy = make_policy(name)
            assert choose(policy, sizes(2176), MemoryBudget(), tokens_per_forward=1) == Choice(policy)

    @pytest.mark.parametrize(
        ("given", "names"),
        [
            ({}, [*LONG[:5], *LONG[6:]]),
            ({"answer": 32}, LONG),
            ({"context": SELDOM_FROM - 1 + 128}, ["none", "fast_dllm_dual", "dkv_pd", "dllm_cache", "polestar"]),
            ({"context": LEAST_STALE_PROMPT - 1 + 128}, ["none"]),
        ],
    )
    def test_auto_has_those_whose_answers_were_measured(self, given: dict[str, Any], names: list[str]):
        of = sizes(**{"context": 2176} | given)
        found = Auto().candidates(of, of.context - (of.answer or 0))
        assert [str(policy) for policy in found] == names
        assert all(each.candidates(of, 0) == (each,) for each in found)  # nothing is left open twice
        assert HELD[0].policy == NONE  # the yardstick is always there

    @pytest.mark.parametrize("prompt", [LEAST_STALE_PROMPT - 1, LEAST_STALE_PROMPT])
    @pytest.mark.parametrize(
        ("policy", "plain", "seldom"),
        [
            (Polestar(refresh="auto", top_m=2), Polestar(top_m=2), Polestar(refresh="drift", top_m=2)),
            (
                make_policy("fast_dllm_dual", refresh_blocks="auto"),
                DUAL,
                SELDOM_DUAL,
            ),
            (
                make_policy("fast_dllm_prefix", refresh_blocks="auto"),
                make_policy("fast_dllm_prefix"),
                make_policy("fast_dllm_prefix", refresh_blocks=SELDOM),
            ),
        ],
    )
    def test_an_open_refresh(self, prompt: int, policy: Any, plain: Any, seldom: Any):
        expected = (plain, seldom) if prompt == LEAST_STALE_PROMPT else (plain,)
        assert policy.candidates(sizes(prompt + 128), prompt) == expected
        # A refresh over 2048 tokens at every block is most of such a call.
        assert choose(policy, sizes(2560, answer=512), MemoryBudget(), tokens_per_forward=8).policy == seldom
        assert choose(policy, sizes(2080, answer=32), MemoryBudget(), tokens_per_forward=8).policy == plain

    def test_what_was_not_decided_does_not_start(self):
        with pytest.raises(TypeError, match="policy 'auto' is decided before a call"):
            Auto().start()
        with pytest.raises(ValueError, match="option 'top_m': policy 'auto' has none; name the policy"):
            make_policy("auto", top_m=2)


class TestChoice:
    """The fastest that fits, or a plainer one that is as fast."""

    def test_short_prompts_have_no_cache(self):
        found = chosen(context=168)
        assert found == Choice(NONE, "caches lose answers to prompts below 256 tokens, as this one of 40")

    def test_the_shortest_prompt_of_a_batch_decides_whether_answers_hold(self):
        assert chosen(batch=2).policy != NONE == chosen(batch=2, prompt=40).policy

    def test_the_fastest_and_why(self):
        found = chosen(tokens_per_forward=1)
        assert found.policy in (
            DUAL,
            SELDOM_DUAL,
            make_policy("dkv_pd"),
        )
        assert "of the time of none where a forward commits 1" in found.why and NOMINAL_CPU.source in found.why
        assert chosen(tokens_per_forward=1) == found

    def test_of_those_that_are_about_as_fast_the_plainest(self):
        # All that is computed takes no time beside launches, of which a plain layer has the fewest.
        launches = Rates(flops_per_second=1e30, bytes_per_second=1e30, layer_seconds=1.0)
        assert chosen(rates=launches).policy == NONE
        assert "of the time of fast_dllm_dual" in chosen(rates=launches).why

    @pytest.mark.parametrize("short", [1, 0])
    def test_what_does_not_fit_is_none(self, short: int):
        needed = Workload(NONE, sizes(2176)).total()
        found = chosen(budget=MemoryBudget(device=needed - short, host=0))
        assert found == Choice(NONE, "nothing fits the budget" if short else "nothing else fits the budget")

    def test_a_window_that_hides_what_may_be_rewritten_is_none(self):
        # Nothing is read, and launches are as those of a plain layer: rows alone decide.
        rows = Rates(flops_per_second=1e9, bytes_per_second=1e30)
        of: dict[str, Any] = {"context": 8256, "answer": 64, "block": 64, "rates": rows, "tokens_per_forward": 1}
        assert isinstance(chosen(**of).policy, ElasticCache)
        assert not isinstance(chosen(**of, rewrites=True).policy, ElasticCache)


@pytest.mark.parametrize(
    ("gpu", "rates"),
    [
        (None, NOMINAL_CPU),
        ("NVIDIA GeForce RTX 4090", DEVICES["rtx4090"]),
        ("NVIDIA GeForce RTX 3090 Ti", DEVICES["rtx3090"]),
        ("NVIDIA H100 80GB HBM3", DEVICES["h100"]),
        ("NVIDIA A100-SXM4-80GB", DEVICES["a100"]),
        ("NVIDIA L40S", DEVICES["l40s"]),
        ("NVIDIA L40", DEVICES[NOMINAL_GPU]),
        ("", DEVICES[NOMINAL_GPU]),
    ],
)
def test_nominal_rates_are_those_of_the_device_by_its_name(gpu: str | None, rates: Rates):
    assert nominal_rates(gpu) is rates


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 1),
        ({"steps": 16}, 8),
        ({"block_steps": 5}, 7),  # 7, 7, 7, 7, 4
        ({"confidence_threshold": 0.9}, CONFIDENT_TOKENS),
        ({"factor": 1.0, "block_length": 2}, 2),
        ({"commit": "drift_aware"}, CONFIDENT_TOKENS),
        ({"commit": "timestep", "steps": 256}, 1),
    ],
)
def test_options_say_how_many_tokens_a_forward_commits(options: dict[str, Any], tokens: int):
    assert GenerationOptions(**options).tokens_per_forward == tokens


class TestAlike:
    """`generate`, `choose`, `plan` and the command line."""

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

        tokens, block = GenerationOptions(**call).tokens_per_forward, options.get("block_length", 32)
        flags = f"--context {prompt + 64} --max-new-tokens 64 --block-length {block} --tokens-per-forward {tokens}"
        assert main(["plan", "embedded", *flags.split(), "--device", "cpu", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        named = ("policy", "policy_options", "why", "kv")
        assert {name: told[name] for name in named} | {"kv_why": ""} == out.choice.as_dict()

    @pytest.mark.parametrize(
        "options", [{"trailing_noise": 37}, {"correction_steps": 2}, {"tokens_per_step": 3}, {"block_length": 64}]
    )
    def test_calls_of_uniform_noise(self, options: dict[str, Any]):
        runtime = tiered.from_pretrained("embedded-uniform", device="cpu")
        found = runtime.choose(torch.full((2, 300), 7), **dict[str, Any]({"max_new_tokens": 64}) | options)
        assert found.policy.name != "none" and str(found) == f"{found.policy}: {found.why}"
        assert repr(Choice(NONE)) == "<Choice none>"

    def test_a_card_says_why(self):
        made = tiered.plan("embedded", context=1024)
        assert made.why and f"chosen: {made.why[:40]}" in str(made)
        assert "chosen" not in str(tiered.plan("embedded", context=1024, policy="none"))

    def test_who_looks_on_changes_no_choice(self):
        # A budget that the call just fits: with what looks on it is refused, not answered otherwise.
        ids = torch.full((1, 300), 7)
        runtime = tiered.from_pretrained("embedded", device="cpu")
        out = runtime.generate(ids, max_new_tokens=32)
        assert out.memory.budget is not None
        tight = tiered.from_pretrained("embedded", device="cpu", memory=replace(out.memory.budget, host=0))
        assert tight.generate(ids, max_new_tokens=32).choice.policy == out.choice.policy
        from tiered.observe.analysis.token_drift import StalenessInspector

        with pytest.raises(tiered.TierCapacityError):
            tight.generate(ids, max_new_tokens=32, inspector=StalenessInspector())


class TestRegimes:
    """The map of measured calls (`bench/measure.py regimes`)."""

    def points(self) -> dict[tuple[Any, ...], Any]:
        rows, _ = read_rows(RESULTS / "regimes")
        return contests(merged(rows, timed=regimes.TIMED), ("context", "blocks", *regimes.SIDES))

    NAMES: ClassVar[dict[str, str]] = {
        "fast_dllm_dual(refresh_blocks=4)": regimes.FOURTH,
        "polestar(refresh='drift')": "polestar-drift",
    }

    def test_what_is_chosen_is_at_most_a_tenth_slower_than_the_best(self):
        for point, contest in self.points().items():
            context, blocks, steps, width, budget, link = point
            answer, rates = blocks * BLOCK, NOMINAL_CPU
            of = sizes(context + answer, answer=answer, width=width)
            settings = {"context": context, "blocks": blocks, "steps": steps, "budget": budget, "device": "cpu"}
            if link is not None:
                rates = replace(rates, link_bytes_per_second=1e6 * link)
            chosen = choose(
                Auto(), of, budget_of(settings, model(width).shape), tokens_per_forward=-(-BLOCK // steps), rates=rates
            ).policy
            found = self.NAMES.get(str(chosen), str(chosen))
            allowed = {self.NAMES.get(str(each), str(each)) for each in Auto().candidates(of, context)} & contest.keys()
            ratio = over_least({name: contest[name] for name in allowed}, "seconds")[found]
            assert ratio <= TIE, (point, found, ratio)


class TestFaster:
    """The plan's advice where a call fits."""

    LLADA: ClassVar[dict[str, Any]] = {"context": 4096, "max_new_tokens": 512, "device": "rtx4090"}

    def seconds(self, made: Plan) -> float:
        return next(time for time in made.times if time.tokens_per_forward == made.tokens_per_forward).seconds

    @pytest.mark.parametrize(
        ("given", "change"),
        [
            ({"policy": "none"}, "policy"),
            ({"policy": "fast_dllm_dual", "tokens_per_forward": 8}, "policy"),
            ({"policy": "dkv_pd", "context": 32768, "rope_scaling": "ntk:8", "memory": "24GiB"}, "kv"),
        ],
    )
    def test_one_change_with_its_factor(self, given: dict[str, Any], change: str):
        asked = self.LLADA | given
        made = tiered.plan("llada-8b", **asked)
        assert made.fits
        (advice,) = made.advice
        assert next(iter(advice.change)) == change
        changed = tiered.plan("llada-8b", **(asked | dict(advice.change)))
        ratio = self.seconds(changed) / self.seconds(made)
        assert changed.fits and ratio <= 1 / TIE and advice.text.endswith(f": {ratio:.2g} of the time")
        assert f"faster, by this estimate:\n  - {advice.text[:20]}" in str(made)

    def test_what_is_the_fastest_already_is_left_as_it_is(self):
        made = tiered.plan("llada-8b", **self.LLADA | {"max_new_tokens": 32, "policy": "fast_dllm_dual"})
        assert made.advice == ()

    def test_without_a_machine_there_is_none(self):
        assert tiered.plan("llada-8b", context=4096, policy="none").advice == ()
