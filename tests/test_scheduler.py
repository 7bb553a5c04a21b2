"""Continuous batching: in any batch, a request is answered as it would be alone; budget, turns and ends."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import Allocations
from drift_rules import EAGER
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.errors import NonFiniteError, TierCapacityError
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.decoding.asking import read_together
from tiered.forward.together import shared_bytes
from tiered.models.base import DiffusionModel
from tiered.output import GenerationOutput
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from tiered.serving import scheduler as scheduler_module
from tiered.serving.counts import Work
from tiered.serving.request import BusyError, CancelledRequest, ClosedError, Request, RequestState, RequestTimeout
from tiered.serving.scheduler import Scheduler

GOLDENS = Path(__file__).parent / "goldens"
CHECKPOINTS = {
    "llada": "llada/llada_tiny_gqa",
    "dream": "dream/dream_tiny",
    "gidd": "gidd/gidd_tiny_unif",
    "llada-moe": "llada_moe/lladamoe_tiny",
    "sdar": "sdar/sdar_tiny",
    "llada2": "llada2/llada2_tiny",
    "diffusion-gemma": "diffusion_gemma/dgemma_tiny",
}
# Options of requests, by the noise of the model. Steps of 8, 16 or more rows are shared; not those of 6.
MASKS: list[dict[str, Any]] = [
    {"max_new_tokens": 32, "block_length": 16, "steps": 8},
    {"max_new_tokens": 48, "block_length": 16, "confidence_threshold": 0.3},
    {"max_new_tokens": 32, "block_length": 32, "factor": 1.0},
    {"max_new_tokens": 16, "temperature": 0.8, "top_k": 20, "steps": 4},
    {"max_new_tokens": 32, "block_length": 16, "remasking": "random", "steps": 8},
    {"max_new_tokens": 16, "cfg_scale": 0.7, "steps": 4},
    {"max_new_tokens": 12, "block_length": 6, "steps": 4},
]
UNIFORM: list[dict[str, Any]] = [
    {"max_new_tokens": 32, "block_length": 16, "tokens_per_step": 4, "block_steps": 4},
    {"max_new_tokens": 32, "block_length": 16, "commit": "ancestral", "block_steps": 3},
    {"max_new_tokens": 16, "tokens_per_step": 4, "block_steps": 2, "correction_steps": 2},
]
BLOCKS: list[dict[str, Any]] = [
    {"max_new_tokens": 32, "block_length": 16, "steps": 8},
    {"max_new_tokens": 48, "block_length": 32, "confidence_threshold": 0.3, "block_steps": 3},
    {"max_new_tokens": 16, "block_length": 8, "temperature": 0.8, "top_k": 20, "block_steps": 3},
]
RANDOM: list[dict[str, Any]] = [
    {"max_new_tokens": 32, "block_steps": 3},
    {"max_new_tokens": 20, "block_length": 8, "entropy_bound": 4.0, "t_max": 0.3, "t_min": 0.1, "block_steps": 4},
]
# A policy is one row: a family whose requests run under it, and whether several requests share its steps.
POLICIES: list[tuple[str, str, dict[str, Any], bool]] = [
    ("llada", "none", {}, True),
    ("llada", "fast_dllm_dual", {}, True),
    ("llada", "attended", {"attended_rows": 6}, True),
    ("llada", "fast_dllm_prefix", {"refresh_interval": 3}, True),
    ("llada", "polestar", {"clusters": 4, "top_m": 2, "update_threshold": 8}, True),
    ("llada", "dkv_decode", {}, True),
    ("llada", "dllm_cache", {}, False),
    ("llada", "elastic_cache", {}, False),
    ("dream", "fast_dllm_dual", {}, True),
    ("gidd", "fast_dllm_dual", {}, True),
    ("llada-moe", "fast_dllm_dual", {}, True),
    ("sdar", "block_causal", {}, True),
    ("llada2", "block_causal", {}, True),
    ("diffusion-gemma", "block_causal", {}, False),
]
_LOADED: dict[str, Runtime] = {}


def runtime_of(family: str, policy: str, options: Mapping[str, Any]) -> Runtime:
    if family not in _LOADED:
        _LOADED[family] = tiered.from_pretrained(GOLDENS / CHECKPOINTS[family], dtype="float32")
    return _LOADED[family].with_policy(policy, **options)


def asking(runtime: Runtime, generator: random.Random) -> dict[str, Any]:
    """Arguments of a request, at random."""
    noise, blocks = runtime.model.shape.noise, runtime.model.shape.block_causal
    uniform, of_noise = noise == "uniform", {"uniform": UNIFORM, "random": RANDOM}
    options = dict(generator.choice(of_noise.get(noise, BLOCKS if blocks else MASKS)))
    if not uniform and not blocks and generator.random() < 0.1:
        others = ("steps", "factor", "remasking", "confidence_threshold")
        options = {"commit": EAGER} | {name: value for name, value in options.items() if name not in others}
    ids = torch.tensor([[generator.randrange(480) for _ in range(generator.choice([3, 16, 33, 47]))]])
    return {"inputs": ids, "seed": generator.randrange(1000), **options}


def held(runtime: Runtime) -> dict[Tier, int]:
    return {tier: runtime.ledger.held(tier) - runtime.ledger.idle(tier) for tier in Tier}


def check_arrivals(runtime: Runtime, *, requests: int, max_prefill_rows: int, shares: bool) -> None:
    """Requests come and are cancelled at random; those that end are each as alone, and nothing is left behind."""
    generator, before = random.Random(requests), held(runtime)
    scheduler = Scheduler(runtime, max_running=6, max_prefill_rows=max_prefill_rows)
    sent: list[tuple[dict[str, Any], Request]] = []
    while len(sent) < requests or scheduler.running or scheduler.waiting:
        if len(sent) < requests and generator.random() < 0.7:
            wanted = asking(runtime, generator)
            sent.append((wanted, scheduler.submit(runtime.prepare(**wanted))))
        if sent and generator.random() < 0.03:
            generator.choice(sent)[1].cancel()
        scheduler.step()
    done = [(wanted, request.output) for wanted, request in sent if request.output is not None]
    for wanted, output in done:
        alone = runtime.generate(**wanted)
        assert output is not None
        assert torch.equal(output.sequences, alone.sequences), wanted
        assert (output.num_forwards, output.steps_by_kind) == (alone.num_forwards, alone.steps_by_kind)
    assert len(done) > requests / 2
    assert all(isinstance(request.error, CancelledRequest) for _, request in sent if request.output is None)
    assert held(runtime) == before
    runtime.ledger.check_integrity()
    assert (scheduler.counts.forwards < scheduler.counts.taken) == shares


@pytest.mark.parametrize(("family", "policy", "options", "shares"), POLICIES)
def test_a_request_is_answered_as_it_would_be_alone(family: str, policy: str, options: dict[str, Any], shares: bool):
    check_arrivals(runtime_of(family, policy, options), requests=6, max_prefill_rows=512, shares=shares)


@pytest.mark.long
@pytest.mark.parametrize(("family", "policy", "options", "shares"), POLICIES)
def test_two_hundred_requests_are_each_answered_as_alone(
    family: str, policy: str, options: dict[str, Any], shares: bool
):
    check_arrivals(runtime_of(family, policy, options), requests=200, max_prefill_rows=64, shares=shares)


class Heard:
    """A streamer that keeps its tokens and counts forwards."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.forwards = self.ends = 0
        self.each: Callable[[], None] | None = None

    def put(self, value: Tensor) -> None:
        self.parts.append(value)

    def put_open(self, value: Tensor, still: Tensor) -> None:
        assert value.shape == still.shape
        self.forwards += 1
        if self.each is not None:
            self.each()

    def end(self) -> None:
        self.ends += 1


def ids_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 480, (1, length), generator=torch.Generator().manual_seed(seed))


def test_running_requests_have_steps_while_a_long_prompt_has_its_first_pass():
    runtime = runtime_of("llada", "fast_dllm_dual", {})
    prompt = {"inputs": ids_of(180), "max_new_tokens": 32}
    short = {"inputs": ids_of(8, 1), "max_new_tokens": 64, "block_length": 32}
    alone = [runtime.generate(**each) for each in (short, prompt)]
    scheduler, heard, late = Scheduler(runtime, max_prefill_rows=40), Heard(), Heard()
    first = scheduler.submit(runtime.prepare(**short), streamer=heard)
    scheduler.step()
    second = scheduler.submit(runtime.prepare(**prompt), streamer=late)
    before = heard.forwards
    scheduler.step()
    # In the round one step, and one whenever 40 rows times three layers have passed: 212 rows pass each but the last,
    # which has queries of the block alone.
    assert (heard.forwards - before, late.forwards) == (1 + 3, 1)
    scheduler.run()
    for request, expected in zip((first, second), alone, strict=True):
        assert request.output is not None and torch.equal(request.output.sequences, expected.sequences)
    assert torch.equal(torch.cat(heard.parts, dim=1), alone[0].sequences) and heard.ends == 1


def test_requests_of_a_round_are_read_together(monkeypatch: pytest.MonkeyPatch):
    runtime, made = runtime_of("sdar", "block_causal", {}), list[int]()
    calls = [
        {"inputs": ids_of(length, length), "max_new_tokens": new, "block_length": 8, "block_steps": 4}
        for length, new in ((8, 16), (11, 16), (21, 32))
    ]
    alone = [runtime.generate(**call) for call in calls]

    def noted(asked: list[Tensor]) -> list[Tensor]:
        made.append(len(asked))
        return read_together(asked)

    monkeypatch.setattr(scheduler_module, "read_together", noted)
    scheduler, heard = Scheduler(runtime), [Heard() for _ in calls]
    requests = [
        scheduler.submit(runtime.prepare(**call), streamer=each) for call, each in zip(calls, heard, strict=True)
    ]
    rounds = list[list[int]]()
    while scheduler.step():
        rounds.append([*made])
        made.clear()
    # Prompts are written, then blocks with 8, 5 and 3 open tokens take steps of two. A block that ends is streamed, and
    # written by the next one's first step.
    assert rounds[:4] == [[], [3], [3, 1], [3, 1]] and max(map(len, rounds)) <= 3
    for request, each, expected in zip(requests, heard, alone, strict=True):
        assert request.output is not None and torch.equal(request.output.sequences, expected.sequences)
        assert request.output.tokens_per_forward.equal(expected.tokens_per_forward)
        # The streamer has the prompt first.
        assert torch.equal(torch.cat(each.parts, dim=1), expected.sequences) and each.ends == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_can_leave_before_it_is_read(leaves: bool):
    runtime = runtime_of("llada", "fast_dllm_dual", {})
    before = held(runtime)
    scheduler = Scheduler(runtime)
    request = scheduler.submit(runtime.prepare(ids_of(20), max_new_tokens=32))
    scheduler.step()
    assert isinstance(request.asked, tuple)
    forward, pass_ = request.asked
    with torch.inference_mode():
        request.advance(runtime, forward.answer(pass_))
    assert isinstance(request.asked, Tensor) and request.asked.shape == (3, 1)
    if leaves:
        request.leave(CancelledRequest())
    else:
        request.cancel()
    scheduler.step()
    assert request.state is RequestState.CANCELLED and request.asked is None
    assert held(runtime) == before and not scheduler.running


def test_long_requests_take_turns():
    runtime = runtime_of("llada", "none", {})
    scheduler, heard = Scheduler(runtime, max_prefill_rows=64), [Heard() for _ in range(3)]
    for number, each in enumerate(heard):
        scheduler.submit(runtime.prepare(ids_of(100, number), max_new_tokens=16), streamer=each)
    for _ in range(6):
        scheduler.step()
    assert [each.forwards for each in heard] == [2, 2, 2]
    scheduler.close(cancel=True)


def budgeted(model: DiffusionModel, calls: float) -> Runtime:
    """A runtime of `model` with room for so many calls of 16 tokens behind 20."""
    free = Runtime(model, policy=make_policy("none"))
    peak = free.generate(ids_of(20) % 120, max_new_tokens=16).memory.tiers[Tier.DEVICE].peak
    return Runtime(model, policy=make_policy("none"), ledger=Ledger(MemoryBudget(device=int(calls * peak))))


def test_the_budget_admits(tiny_model: DiffusionModel):
    runtime = budgeted(tiny_model, 2.5)
    scheduler, asked = Scheduler(runtime), runtime.prepare(ids_of(20) % 120, max_new_tokens=16)
    requests = [scheduler.submit(asked) for _ in range(5)]
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (2, 3)
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2 + [RequestState.WAITING] * 3
    with pytest.raises(TierCapacityError) as refused:
        scheduler.submit(runtime.prepare(ids_of(150) % 120, max_new_tokens=96))
    assert (
        refused.value.tier is Tier.DEVICE
        and refused.value.needed > refused.value.available == runtime.ledger.budget.device
    )
    scheduler.run()
    assert all(request.state is RequestState.DONE for request in requests) and not any(held(runtime).values())


@pytest.mark.parametrize(("requests", "least", "most"), [(5, 0.5, 1.0), (16, 0.25, 0.5)])
def test_requests_together_take_no_more_than_they_have_booked(
    requests: int, least: float, most: float, random_model: Any, tiny_config: dict[str, Any]
):
    """Sixteen have two forwards in a round: the logits of one are gone when the other begins."""
    model = random_model(tiny_config | {"d_model": 64, "mlp_hidden_size": 1024, "vocab_size": 4096})
    runtime = Runtime(model, policy=make_policy("fast_dllm_dual"))
    scheduler = Scheduler(runtime)
    asked = [runtime.prepare(ids_of(16, seed) % 120, max_new_tokens=32) for seed in range(requests)]
    runtime.ledger.restart_peaks()
    with Allocations() as allocated:
        for each in asked:
            scheduler.submit(each)
        scheduler.run()
    booked = runtime.ledger.report().tiers[Tier.DEVICE].peak
    assert least * booked < allocated.peak <= most * booked
    assert scheduler.counts.forwards < scheduler.counts.taken


def test_requests_whose_layers_are_streamed_are_answered_the_same():
    free = tiered.from_pretrained(GOLDENS / CHECKPOINTS["llada"], dtype="float32", policy="fast_dllm_dual")
    calls = [{"inputs": ids_of(120, seed), "max_new_tokens": 32, "steps": 4} for seed in range(4)]
    alone = [free.generate(**call) for call in calls]
    device = alone[0].memory.tiers[Tier.DEVICE]
    weights = device.at_peak[Account.WEIGHTS]
    # A whole call, and one of which layers are streamed, but no two whole ones.
    cap = weights + int(1.85 * (device.peak - weights)) + 2 * shared_bytes(free.prepare(**calls[0]).sizes)
    budget = MemoryBudget(device=cap)
    runtime = tiered.from_pretrained(
        GOLDENS / CHECKPOINTS["llada"], dtype="float32", policy="fast_dllm_dual", memory=budget
    )
    before = held(runtime)
    scheduler = Scheduler(runtime)
    requests = [scheduler.submit(runtime.prepare(**call)) for call in calls]
    scheduler.step()
    assert scheduler.running == 2
    scheduler.run()
    for request, expected in zip(requests, alone, strict=True):
        assert request.output is not None and torch.equal(request.output.sequences, expected.sequences)
    assert any(request.output.tiers is not None for request in requests if request.output is not None)
    assert held(runtime) == before and runtime.ledger.report().tiers[Tier.DEVICE].peak <= cap


def test_a_full_or_a_closed_scheduler_takes_no_request(tiny_model: DiffusionModel):
    runtime = budgeted(tiny_model, 9)
    scheduler, asked = (
        Scheduler(runtime, max_running=1, max_waiting=2),
        runtime.prepare(ids_of(20) % 120, max_new_tokens=16),
    )
    first = scheduler.submit(asked)
    scheduler.step()
    ended: list[Request] = []
    waiting = [scheduler.submit(asked, on_end=ended.append) for _ in range(2)]
    with pytest.raises(BusyError, match="2 requests wait, the most allowed"):
        scheduler.submit(asked)
    scheduler.drain("going")
    assert ended == waiting and all(isinstance(request.error, ClosedError) for request in waiting)
    with pytest.raises(ClosedError, match="going"):
        scheduler.submit(asked)
    scheduler.close()
    assert first.state is RequestState.DONE and not any(held(runtime).values())


def test_closing_cancels_a_request_that_is_just_beginning(tiny_model: DiffusionModel):
    began, closing = threading.Event(), threading.Event()

    class Slow(Heard):
        def put(self, value: Tensor) -> None:
            began.set()
            assert closing.wait(60)

    scheduler = Scheduler(Runtime(tiny_model, policy=make_policy("none")))
    scheduler.start()
    request = scheduler.submit(
        scheduler.runtime.prepare(ids_of(20) % 120, max_new_tokens=64, stop_at_eos=False), streamer=Slow()
    )
    assert began.wait(60)
    closer = threading.Thread(target=scheduler.close, kwargs={"cancel": True})
    closer.start()
    while not scheduler.closed:
        time.sleep(0.001)
    time.sleep(0.05)  # `close` has looked at those that run
    closing.set()
    closer.join()
    assert request.state is RequestState.CANCELLED


def test_a_failed_request_fails_no_other(tiny_model: DiffusionModel):
    tiny_model.get_parameter("wte.weight")[100] = torch.inf
    runtime = Runtime(tiny_model, policy=make_policy("fast_dllm_dual"))
    good, bad = ids_of(20) % 99, torch.full((1, 20), 100)
    alone = runtime.generate(good, max_new_tokens=16)
    scheduler = Scheduler(runtime)

    def raises() -> None:
        raise ConnectionError("nobody listens")

    broken = Heard()
    broken.each = raises
    first, wrong, second, deaf = (
        scheduler.submit(runtime.prepare(ids, max_new_tokens=16), streamer=streamer)
        for ids, streamer in ((good, None), (bad, None), (good, None), (good, broken))
    )
    scheduler.run()
    assert isinstance(wrong.error, NonFiniteError) and isinstance(deaf.error, ConnectionError)
    for request in (first, second):
        assert request.output is not None and torch.equal(request.output.sequences, alone.sequences)
    assert not any(held(runtime).values())


@pytest.mark.parametrize(
    ("seconds", "state", "error"),
    [(None, RequestState.CANCELLED, CancelledRequest), (0.0, RequestState.LATE, RequestTimeout)],
)
def test_a_request_in_the_middle_of_its_first_pass_can_leave(
    seconds: float | None, state: RequestState, error: type[Exception]
):
    runtime = runtime_of("llada", "fast_dllm_dual", {})
    before, heard = held(runtime), Heard()
    scheduler = Scheduler(runtime, max_prefill_rows=48)
    scheduler.submit(runtime.prepare(ids_of(8), max_new_tokens=32), streamer=heard)
    scheduler.step()
    request = scheduler.submit(runtime.prepare(ids_of(180), max_new_tokens=32))
    request._seconds = seconds
    heard.each = request.cancel if seconds is None else None
    scheduler.step()
    assert request.state is state and isinstance(request.error, error) and request.output is None
    scheduler.run()
    assert held(runtime) == before


def test_a_prepared_or_waiting_request_touches_no_tensor_of_the_device():
    runtime = runtime_of("llada", "fast_dllm_dual", {}).with_policy("fast_dllm_dual")
    runtime.device = torch.device("meta")  # a tensor there has no value to be read
    ids = torch.nn.functional.pad(ids_of(20), (3, 0))
    asked = runtime.prepare(ids, attention_mask=(torch.arange(23) >= 3)[None], max_new_tokens=16)
    assert (asked.prompts.longest, asked.prompts.shortest, asked.sizes.context) == (20, 20, 36)
    request = Scheduler(runtime).submit(asked)
    assert asked.prompts.ids.device.type == asked.prompts.mask.device.type == "cpu" and request.asked is None


def test_threads_submit_and_the_scheduler_has_its_own():
    runtime = runtime_of("llada", "fast_dllm_dual", {})
    asked = [runtime.prepare(ids_of(20, seed), max_new_tokens=32) for seed in range(6)]
    outputs: dict[int, GenerationOutput | None] = {}
    with Scheduler(runtime) as scheduler:

        def send(number: int) -> None:
            over = threading.Event()
            request = scheduler.submit(asked[number], on_end=lambda _: over.set())
            assert over.wait(60)
            outputs[number] = request.output

        threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        own = scheduler.counts.clock.seconds
        assert own[Work.MODEL] > own[Work.OWN] > 0
    for number in range(6):
        output = outputs[number]
        assert output is not None
        assert torch.equal(output.sequences, runtime.generate(ids_of(20, number), max_new_tokens=32).sequences)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_running": 0}, ValueError, "max_running = 0; an int of at least 1"),
        ({"max_waiting": "many"}, TypeError, "max_waiting = 'many'"),
        ({"max_prefill_rows": 0}, ValueError, "max_prefill_rows = 0"),
        ({"seconds": -1.0}, ValueError, "seconds = -1.0"),
    ],
)
def test_bad_numbers_are_named(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        Scheduler(runtime_of("llada", "none", {}), **options)


def test_a_request_is_one_prompt():
    runtime = runtime_of("llada", "none", {})
    with pytest.raises(ValueError, match="the call has 2 prompts; one is allowed"):
        Scheduler(runtime).submit(runtime.prepare(ids_of(8).repeat(2, 1), max_new_tokens=16))
