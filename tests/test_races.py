"""Threads, two runtimes on one folder, Ctrl-C: a call answers as alone or says why not, and leaves nothing behind."""

import gc
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from long_cases import and_long
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier

CONFIG: dict[str, Any] = {
    "model_type": "llada", "d_model": 64, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 160,
    "max_sequence_length": 256, "vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125,
    "torch_dtype": "float32",
}  # fmt: skip
SIZES: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8, "block_steps": 2, "stop_at_eos": False}
PROMPTS = [torch.randint(0, 120, (1, length), generator=torch.Generator().manual_seed(length)) for length in (90, 61)]
POLICIES: dict[str, dict[str, Any]] = {
    "fast_dllm_dual": {},
    "polestar": {"clusters": 4, "top_m": 2, "update_threshold": 0},
}
LIBRARY = re.compile("/(tiered|kernels|offload|clustering)/[^/]+(/[^/]+)*.py$")
Load = Callable[[MemoryBudget | None], tiered.Runtime]


@pytest.fixture
def load(
    request: pytest.FixtureRequest,
    write_checkpoint: Callable[..., Path],
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
) -> Load:
    """Loads one model under the policy that the test is asked for."""
    path, policy = write_checkpoint(CONFIG, random_weights(CONFIG)), request.param
    return lambda memory: tiered.from_pretrained(path, policy=policy, weights="raw", memory=memory, **POLICIES[policy])


def answers(runtime: tiered.Runtime) -> list[Tensor]:
    return [runtime.generate(prompt, **SIZES).sequences for prompt in PROMPTS]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def least(load: Load, *, weights: bool) -> int:
    """Bytes of the device that the longest prompt takes with its features streamed, or its weights as well."""
    with load(None) as runtime:
        whole = runtime.generate(PROMPTS[0], **SIZES).memory.peak_device_bytes
    resident = sum(parameter.nbytes for parameter in runtime_weights(load))
    return whole - resident // 2 if weights else whole - 4096


def runtime_weights(load: Load) -> list[Tensor]:
    with load(None) as runtime:
        return list(runtime.model.parameters())


def held(runtime: tiered.Runtime) -> dict[Tier, int]:
    return {tier: runtime.ledger.held(tier) - runtime.ledger.idle(tier) for tier in Tier}


@pytest.mark.parametrize("load", POLICIES, indirect=True)
@pytest.mark.parametrize("weights", [False, True], ids=["features", "weights"])
def test_threads_under_one_small_budget(load: Load, weights: bool, tmp_path: Path):
    with load(None) as free:
        alone = answers(free)
    memory = MemoryBudget(device=least(load, weights=weights), host="900KiB", disk="4MiB", disk_path=tmp_path)
    got: list[bool | TierCapacityError] = []
    with load(memory) as runtime:
        assert same(answers(runtime), alone)
        before = held(runtime)

        def calls(first: int) -> None:
            for number in (first, 1 - first):
                try:
                    got.append(torch.equal(runtime.generate(PROMPTS[number], **SIZES).sequences, alone[number]))
                except TierCapacityError as error:  # the others have the room
                    got.append(error)

        threads = [threading.Thread(target=calls, args=(number % 2,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(got) == 6 and all(each is True or isinstance(each, TierCapacityError) for each in got), got
        assert True in got
        assert same(answers(runtime), alone)
        assert weights or held(runtime) == before
        runtime.ledger.check_integrity()


@pytest.mark.parametrize("load", ["polestar"], indirect=True)
def test_two_runtimes_on_one_folder(load: Load, tmp_path: Path):
    with load(None) as free:
        alone = answers(free)
    memory = MemoryBudget(device=least(load, weights=True), host="600KiB", disk="4MiB", disk_path=tmp_path)
    got: list[bool] = []
    with load(memory) as one, load(memory) as other:
        threads = [threading.Thread(target=lambda of=of: got.append(same(answers(of), alone))) for of in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert got == [True, True]
    assert not list(tmp_path.glob("[!c]*"))  # the checkpoint alone


@pytest.mark.parametrize("load", POLICIES, indirect=True)
@pytest.mark.parametrize("weights", [False, True], ids=["features", "weights"])
def test_a_runtime_that_is_dropped_without_close_raises_nothing(
    load: Load, weights: bool, monkeypatch: pytest.MonkeyPatch
):
    errors: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: errors.append(repr(told.exc_value)))
    runtime = load(MemoryBudget(device=least(load, weights=weights)))
    answers(runtime)
    del runtime
    gc.collect()
    assert not errors


def interrupted(call: Callable[[], object], at: int) -> int:
    """`call`, with Ctrl-C as it enters its function number `at` of the library, whether that computes or keeps books.
    Returns how many it entered."""
    entered, struck = 0, 0.0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal entered, struck
        if event == "call" and LIBRARY.search(frame.f_code.co_filename):
            entered += 1
            if entered == at:
                sys.setprofile(None)
                struck = time.process_time()
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        assert time.process_time() - struck < 2, at
    finally:
        sys.setprofile(None)
    return entered


@pytest.fixture
def sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("load", ["polestar"], indirect=True)
def test_closing_waits_for_a_call_whose_layers_are_streamed(load: Load):
    begun = threading.Event()

    class Begun:
        def put(self, value: Tensor) -> None:
            begun.set()

        def end(self) -> None:
            pass

    runtime = load(MemoryBudget(device=least(load, weights=True)))
    expected = runtime.generate(PROMPTS[1], **SIZES).sequences
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(runtime.generate, PROMPTS[1], **SIZES, streamer=Begun())
        assert begun.wait(60)
        runtime.close()
        assert torch.equal(call.result().sequences, expected)
    with pytest.raises(ValueError, match="the runtime is closed"):
        runtime.generate(PROMPTS[1], **SIZES)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("load", ["polestar"], indirect=True)
@pytest.mark.parametrize("moments", and_long([12], [50]))
def test_ctrl_c_at_any_moment(load: Load, moments: int):
    with load(None) as free:
        alone = answers(free)
    memory = MemoryBudget(device=least(load, weights=True))
    draw = random.Random(0)
    with load(memory) as runtime:
        assert same(answers(runtime), alone)
        before, threads = held(runtime), threading.active_count()
        call = lambda: runtime.generate(PROMPTS[1], **SIZES)  # noqa: E731
        most = interrupted(call, 0)
        for at in draw.sample(range(1, most), moments):
            interrupted(call, at)
            assert same(answers(runtime), alone), at
            gc.collect()
            assert (held(runtime), threading.active_count()) == (before, threads), at
            runtime.ledger.check_integrity()
    assert not any(runtime.ledger.held(tier) for tier in Tier)
    most = interrupted(lambda: load(memory).close(), 0)
    for at in draw.sample(range(1, most), moments // 3):
        interrupted(lambda: load(memory).close(), at)
        gc.collect()
        assert threading.active_count() <= threads, at
    with load(memory) as runtime:
        assert same(answers(runtime), alone)
