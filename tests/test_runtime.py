"""Promises of the runtime: early stop, budget, interruption, repetition, and fields of the output."""

import copy
import gc
import pickle
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training import tasks

import tiered
from tiered.core.byte_size import format_bytes
from tiered.core.features import Account, Tier
from tiered.policies.registry import make_policy, policies_for
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 8, "confidence_threshold": 0.8}


@pytest.fixture(scope="module")
def embedded() -> Runtime:
    return tiered.from_pretrained("embedded", policy="polestar")


@pytest.fixture(scope="module")
def examples() -> list[tasks.Example]:
    """Answers of 20, 5, 13 and 4 tokens, so that sequences end in different blocks; the first has a long prompt."""
    return [tasks.sample(task, "test", seed) for task, seed in (("lookup", 0), ("copy", 1), ("remove", 2), ("add", 0))]


def chats(examples: list[tasks.Example]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": example.prompt}] for example in examples]


def rule_for(policy: str) -> dict[str, Any]:
    """The plainest options under which `policy` runs."""
    return {"remasking": "random", "seed": 0, "confidence_threshold": None} if make_policy(policy).needs_order() else {}


@pytest.mark.parametrize(
    ("policy", "guidance"),
    [*((policy, 0.0) for policy in policies_for("canvas")), *((policy, 0.3) for policy in ("none", "polestar"))],
)
def test_stopping_at_the_end_changes_no_text(
    embedded: Runtime, examples: list[tasks.Example], policy: str, guidance: float
):
    runtime = embedded.with_policy(policy)
    prompts = chats(examples if policy == "polestar" and not guidance else examples[1:])  # enough rows for clusters
    stopped, whole = (
        runtime.generate(prompts, stop_at_eos=stop, cfg_scale=guidance, **SIZES | rule_for(policy))
        for stop in (True, False)
    )
    assert stopped.text == whole.text
    assert stopped.num_forwards < whole.num_forwards
    # Sequences leave one by one, each when it has ended.
    assert len(set(stopped.forwards)) > 1 and max(stopped.forwards) == stopped.num_forwards
    eos, pad = embedded.model.eos_token_id, embedded.model.pad_token_id
    for row in stopped.sequences[:, -SIZES["max_new_tokens"] :]:
        assert (row[(row == eos).cumsum(0) > 0] == pad).all()


def test_answers_are_right(embedded: Runtime, examples: list[tasks.Example]):
    out = embedded.generate(chats(examples), max_new_tokens=32)
    assert out.text is not None
    assert all(tasks.score(example, text) for example, text in zip(examples, out.text, strict=True))


def test_figures_of_the_output(embedded: Runtime):
    example = tasks.sample("add", "test", 0)
    prompt = chats([example])
    dual = embedded.with_policy("fast_dllm_dual")
    out = dual.generate(prompt, max_new_tokens=32, output_history=True, stop_at_eos=False)
    assert out.num_forwards == out.forwards[0] == len(out.timings.steps) == sum(out.steps_by_kind.values()) == 32
    assert out.steps_by_kind == {"refresh": 1, "step": 31}
    prompt_length = out.sequences.shape[1] - 32
    assert out.rows_per_step == [prompt_length + 32] + [32] * 31
    # Four digits; the end-of-sequence tokens behind them do not count.
    assert out.tokens_per_forward.tolist() == [4 / 32]
    assert out.timings.tokens == 4
    assert out.timings.tokens_per_second == pytest.approx(4 / out.timings.total)
    assert out.timings.total >= sum(out.timings.steps) > 0
    assert out.history is not None and len(out.history) == 33
    assert (out.history[0][:, prompt_length:] == embedded.model.mask_token_id).all()
    assert torch.equal(out.history[-1], out.sequences)
    assert (out.history[0][:, :prompt_length] == out.sequences[:, :prompt_length]).all()


def test_books_of_a_call(embedded: Runtime):
    prompt = chats([tasks.sample("copy", "test", 0)])
    device = embedded.generate(prompt, max_new_tokens=32).memory.tiers[Tier.DEVICE]
    shape = embedded.model.shape
    context = embedded.generate(prompt, max_new_tokens=32).sequences.shape[1]
    assert device.at_peak[Account.WEIGHTS] == device.current == 4 * shape.parameters
    assert device.at_peak[Account.KEY] == device.at_peak[Account.VALUE] == 4 * shape.layers * context * shape.kv_width
    assert device.peak == sum(device.at_peak.values())
    assert embedded.ledger.held(Tier.DEVICE) == device.current
    embedded.ledger.check_integrity()


def test_the_budget_is_hard_and_exact():
    ids = torch.randint(0, 480, (2, 40))
    # Whose bytes are known before it runs; of `polestar`, only how many they are at most (tests/test_call_bytes.py).
    options: dict[str, Any] = {"dtype": "float32", "policy": "fast_dllm_dual"}
    needed = (
        tiered.from_pretrained(GOLDENS / "llada_tiny", **options).generate(ids, max_new_tokens=32).memory
    ).peak_device_bytes
    enough = tiered.from_pretrained(GOLDENS / "llada_tiny", **options, memory=needed)
    assert enough.generate(ids, max_new_tokens=32).memory.peak_device_bytes == needed
    # With host memory allowed, layers would be streamed (tests/test_streamed_features.py).
    memory = tiered.MemoryBudget(device=needed - 1, host=0)
    short = tiered.from_pretrained(GOLDENS / "llada_tiny", **options, memory=memory)
    held = short.ledger.held(Tier.DEVICE)
    with pytest.raises(tiered.TierCapacityError) as raised:
        short.generate(ids, max_new_tokens=32)
    assert raised.value.tier == Tier.DEVICE
    assert raised.value.needed == needed - held and raised.value.available == needed - 1 - held
    assert raised.value.total == needed
    assert short.ledger.held(Tier.DEVICE) == held
    assert short.generate(ids[:1], max_new_tokens=32).num_forwards > 0


@pytest.mark.parametrize(
    ("policy", "guidance"),
    [
        *((policy, 0.0) for policy in (*policies_for("canvas"), "polestar-window")),
        ("dllm_cache", 0.5),
        ("polestar", 0.5),
    ],
)
def test_the_required_bytes_of_a_call_are_a_budget_for_it(policy: str, guidance: float):
    """Of device and host, to the byte: a byte less of either is refused."""
    ids = torch.randint(0, 480, (2, 70))
    call: dict[str, Any] = {"max_new_tokens": 12, "block_length": 6, "cfg_scale": guidance} | rule_for(policy)
    load = partial(tiered.from_pretrained, GOLDENS / "llada_tiny_gqa", dtype="float32", policy=policy)
    free = load().generate(ids, **call)
    budget = free.memory.budget
    device, host = (free.memory.tiers[tier].required for tier in (Tier.DEVICE, Tier.HOST))
    assert (budget.device, budget.host, budget.disk) == (device, host, None)
    assert free.memory.peak_device_bytes <= device and free.memory.peak_host_bytes <= host
    capped = load(memory=budget).generate(ids, **call)
    assert torch.equal(capped.sequences, free.sequences)
    assert capped.memory.budget == budget and capped.memory.moved.keys() == free.memory.moved.keys()
    if host:
        with pytest.raises(tiered.TierCapacityError) as raised:
            load(memory=replace(budget, host=host - 1)).generate(ids, **call)
        assert (raised.value.tier, raised.value.total) == (Tier.HOST, host)
    with pytest.raises(tiered.TierCapacityError) as raised:
        load(memory=replace(budget, device=device - 1)).generate(ids, **call)
    assert (raised.value.tier, raised.value.total) == (Tier.DEVICE, device)


def test_the_plan_is_what_the_call_books():
    runtime = tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")
    for policy in policies_for("canvas"):
        variants: tuple[dict[str, Any], ...] = ({}, {"cfg_scale": 1.0}, {"temperature": 0.7})
        for options in variants:
            ids = torch.randint(0, 480, (2, 64))
            out = runtime.with_policy(policy).generate(ids, max_new_tokens=64, steps=8, **options | rule_for(policy))
            planned = tiered.plan(
                GOLDENS / "llada_tiny_gqa",
                context=128,
                batch=2,
                max_new_tokens=64,
                policy=policy,
                dtype="float32",
                cfg="cfg_scale" in options,
                sampled="temperature" in options,
            )
            assert planned.tiers[Tier.DEVICE].total == out.memory.peak_device_bytes
            device = out.memory.tiers[Tier.DEVICE].at_peak
            assert {name: size for name, size in planned.tiers[Tier.DEVICE].accounts.items() if size} == device


def test_one_runtime_serves_calls_in_turn_without_a_trace(embedded: Runtime, examples: list[tasks.Example]):
    embedded.generate(chats(examples), **SIZES)  # host memory that calls share is there from now on
    first = embedded.generate(chats(examples[1:2]), **SIZES)
    embedded.generate(chats(examples), **SIZES, temperature=1.0)
    again = embedded.generate(chats(examples[1:2]), **SIZES)
    assert torch.equal(first.sequences, again.sequences)
    assert first.memory == again.memory


def test_seeds():
    runtime = tiered.from_pretrained(GOLDENS / "llada_tiny", dtype="float32")
    ids = torch.randint(0, 480, (1, 12), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.5, "stop_at_eos": False}

    def answer(seed: int | None) -> list[int]:
        return runtime.generate(ids, seed=seed, **options).sequences[0].tolist()

    assert answer(1) == answer(1) != answer(2)
    torch.manual_seed(7)
    first = answer(None)
    assert answer(None) != first
    torch.manual_seed(7)
    assert answer(None) == first


@pytest.mark.parametrize("policy", policies_for("canvas"))
def test_an_interrupted_call_leaves_the_runtime_usable(embedded: Runtime, policy: str):
    runtime = embedded.with_policy(policy)
    prompt = chats([tasks.sample("sort", "test", 1)])
    call: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8} | rule_for(policy)
    expected = runtime.generate(prompt, **call).text
    held = runtime.ledger.held(Tier.DEVICE)

    class Interrupting:
        drafts = ends = 0

        def put(self, value: torch.Tensor) -> None:
            pass

        def put_draft(self, value: torch.Tensor) -> None:
            self.drafts += 1
            if self.drafts == 3:
                # A real Ctrl-C, in the middle of a call.
                signal.raise_signal(signal.SIGINT)

        def end(self) -> None:
            self.ends += 1

    assert threading.current_thread() is threading.main_thread()
    # A shell starts what runs in the background with the signal ignored.
    before, streamer = signal.signal(signal.SIGINT, signal.default_int_handler), Interrupting()
    try:
        with pytest.raises(KeyboardInterrupt):
            runtime.generate(prompt, streamer=streamer, **call)
    finally:
        signal.signal(signal.SIGINT, before)
    assert streamer.ends == 1
    assert runtime.ledger.held(Tier.DEVICE) == held
    assert runtime.generate(prompt, **call).text == expected


def test_a_policy_is_changed_without_loading_again(embedded: Runtime):
    other = embedded.with_policy("none")
    assert other.model is embedded.model and other.ledger is embedded.ledger
    assert embedded.policy.name == "polestar"
    assert tiered.from_pretrained("embedded", policy="fast_dllm_dual", refresh_interval=4).policy.refresh_interval == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_neither_copied_nor_pickled(embedded: Runtime, way: Callable[[object], object]):
    with pytest.raises(
        TypeError, match=r"<Runtime 'embedded': .* cannot be copied or pickled.*`with_policy`.*another process"
    ):
        way(embedded)


def test_closing_gives_the_weights_back():
    budget = tiered.MemoryBudget(device="64MiB", host="16MiB")
    with tiered.from_pretrained("embedded", memory=budget, policy="none") as runtime:
        other = runtime.with_policy("polestar", top_m=2)
        assert other.generate("copy: Ada Ben", max_new_tokens=32).text == ["Ada Ben"]
        weights = weakref.ref(next(runtime.model.parameters()))
        assert runtime.ledger.held(Tier.DEVICE) > 0
        host = format_bytes(runtime.ledger.held(Tier.HOST))
        told = [repr(runtime), repr(other)]
    gc.collect()
    assert weights() is None and not any(runtime.ledger.held(tier) for tier in Tier)
    runtime.ledger.check_integrity()
    held = f"float32 on cpu, device 7.23 MiB of 64.00 MiB, host {host} of 16.00 MiB>"
    assert told == [f"<Runtime 'embedded': none, {held}", f"<Runtime 'embedded': polestar(top_m=2), {held}"]
    ids = torch.tensor([[5, 6, 7]])
    for closed in (runtime, other, other.with_policy("none")):
        assert repr(closed) == "<Runtime 'embedded': closed>"
        closed.close()
        for use in (closed.generate, closed.logits):
            with pytest.raises(ValueError, match="the runtime is closed"):
                use(ids)


def test_options_come_from_a_config_too(embedded: Runtime):
    prompt = chats([tasks.sample("copy", "test", 3)])
    options = tiered.GenerationOptions(max_new_tokens=32, block_length=16)
    by_object = embedded.generate(prompt, generation_config=options, confidence_threshold=0.9)
    by_mapping = embedded.generate(prompt, generation_config={"gen_length": 32, "block_length": 16, "threshold": 0.9})
    assert torch.equal(by_object.sequences, by_mapping.sequences)
    assert by_object.num_forwards == by_mapping.num_forwards < 32


def test_results_may_be_written_by_the_caller(embedded: Runtime):
    logits = embedded.logits(torch.tensor([[5, 6, 7]]))
    logits[..., 0] = -torch.inf
    out = embedded.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8)
    out.sequences[:, 0] = 1


def test_a_call_that_draws_nothing_leaves_torchs_stream_alone(embedded: Runtime):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    embedded.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_of_some_columns(embedded: Runtime):
    ids = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    whole = embedded.logits(ids)
    for first, end in ((0, 20), (0, 1), (17, 20), (4, 9)):
        torch.testing.assert_close(embedded.logits(ids, columns=(first, end)), whole[:, first:end])
    for columns in ((4, 4), (-1, 3), (18, 21)):
        with pytest.raises(ValueError, match="0 <= first < end <= 20 is allowed"):
            embedded.logits(ids, columns=columns)
    for wrong in (5, (1, 2.5), (1, 2, 3), slice(1, 2)):
        with pytest.raises(TypeError, match="two ints are allowed"):
            embedded.logits(ids, columns=wrong)  # pyright: ignore[reportArgumentType]


def test_logits_of_more_positions_than_the_model_has():
    runtime = tiered.from_pretrained(GOLDENS / "llada_tiny", dtype="float32")
    with pytest.raises(ValueError, match="1025 positions; the model was made for 1024"):
        runtime.logits(torch.zeros(1, 1025, dtype=torch.long))
