"""How a CUDA device is made ready, on faked devices."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tiered
import tiered.call
from tiered.forward.library_bytes import LARGEST_GPU, Gpu, gpu_of
from tiered.offload.device import available_bytes, computing_on, cublas_workspace_bytes
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Says whether attention may be cuDNN's, as it may at first, to every thread; devices can be made current."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)

    def enabled() -> bool:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
        thread.start()
        thread.join()
        return seen[0]

    yield enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_no_call_gets_cudnns_attention_in_whatever_order_calls_end(cudnn: Callable[[], bool]):
    """torch has one switch for all threads, so a call that restored it would change other calls that still run."""
    with computing_on(CPU):
        assert cudnn()
    calls = [computing_on(CUDA) for _ in range(3)]
    for call in calls:
        call.__enter__()
        assert not cudnn()
    for call in calls:  # the first to begin is the first to end
        assert not cudnn()
        call.__exit__(None, None, None)
    assert not cudnn()


@pytest.mark.parametrize("call", ["generate", "logits"])
def test_the_models_device_is_current_in_every_pass(call: str, tiny_model: Any, monkeypatch: pytest.MonkeyPatch):
    inside: list[torch.device] = []
    passes: list[list[torch.device]] = []

    @contextlib.contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(tiered.call, "computing_on", noted)
    attend = tiny_model.attend
    monkeypatch.setattr(tiny_model, "attend", lambda *given: passes.append([*inside]) or attend(*given))
    runtime = Runtime(tiny_model, policy=make_policy("none"))
    getattr(runtime, call)(torch.arange(9)[None], **({"max_new_tokens": 2} if call == "generate" else {}))
    assert passes and all(devices == [CPU] for devices in passes) and not inside


@pytest.mark.parametrize(
    ("said", "config", "major", "mib"),
    [
        (20, ":4096:8", 9, 20),
        (None, ":4096:8:16:2", 8, 32.03125),
        (None, "", 9, 32),
        (None, "", 12, 32),
        (None, "", 8, 8.125),
    ],
)
def test_workspace_of_cublas(said: int | None, config: str, major: int, mib: float, monkeypatch: pytest.MonkeyPatch):
    """As torch says, else as it reads its variable, else as it documents."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(
        torch.backends.cuda, "cublas_workspace_size", None if said is None else lambda: said << 20, raising=False
    )
    assert cublas_workspace_bytes(CUDA) == mib * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a GPU, which a plan counts")
@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", None), ("auto", None), ("cuda", LARGEST_GPU), ("cuda:3", LARGEST_GPU)]
)
def test_gpu_of_a_plan_on_a_machine_without_one(device: str, expected: Gpu | None):
    assert gpu_of(device) == expected
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        gpu_of("gpu")


@pytest.mark.parametrize(("free", "warns"), [(1 << 30, False), (48 << 20, False), (40 << 20, True)])
def test_a_budget_beyond_the_free_memory_of_the_card_warns(free: int, warns: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 18 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 << 20)
    assert available_bytes(CPU) is None
    monkeypatch.setattr("tiered.loading.available_bytes", lambda device: available_bytes(CUDA))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tiered.from_pretrained("embedded", device="cpu", memory="64MiB").close()
    assert [(str(each.message)[:17], each.filename) for each in told] == [("memory = 64.00 MiB"[:17], __file__)] * warns
