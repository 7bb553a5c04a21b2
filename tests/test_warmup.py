"""Kernels before the first call: if a machine cannot compile them, an error comes before weights are read. `tiered
warmup` compiles them."""

import json
from typing import Any

import pytest
import torch

import tiered
from tiered import loading
from tiered.cli import warmup
from tiered.cli.main import main
from tiered.core.errors import TierCapacityError
from tiered.kernels import choice


def test_a_machine_that_cannot_compile_kernels_is_named_before_weights_are_read(monkeypatch: pytest.MonkeyPatch):
    def no_compiler(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(loading, "pick_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(loading, "Checkpoint", None)
    monkeypatch.setattr(choice, "_launch_smallest", no_compiler)
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    with pytest.raises(OSError, match=r"cuda:0 .*Failed to find C compiler.*install gcc and python3-dev \(Python\.h\)"):
        tiered.from_pretrained("embedded")
    monkeypatch.setattr(choice, "_has_triton", lambda: False)
    choice.check_kernels(torch.device("cuda", 0))  # plain torch needs no compiler


def test_without_a_gpu_there_is_nothing_to_compile(capsys: pytest.CaptureFixture[str]):
    assert main(["warmup", "embedded", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "nothing to compile for cpu: kernels run on CUDA alone\n"
    assert main(["warmup", "embedded", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"device": "cpu", "calls": 0}


@pytest.mark.parametrize(
    ("model", "policy", "given"),
    [
        ("embedded", "fast_dllm_dual", {"kv": "fp8"}),
        ("embedded", "polestar", {}),
        ("embedded-blocks", "auto", {"weights": "int8"}),
        ("embedded-uniform", "auto", {}),
    ],
)
def test_a_warm_up_answers_prompts_of_several_lengths(
    model: str, policy: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warmup, "ANSWER", 8)
    with tiered.from_pretrained(model, policy=policy, **given) as runtime:
        monkeypatch.setattr(warmup, "PROMPTS", ((4,), (20, 4)))
        assert warmup.warm_up(runtime) == 2


def test_a_warm_up_leaves_out_calls_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warmup, "ANSWER", 8)
    with tiered.from_pretrained("embedded", policy="none", memory="12MiB") as runtime:
        monkeypatch.setattr(warmup, "PROMPTS", ((4,), (1000,) * 64))
        assert warmup.warm_up(runtime) == 1
        monkeypatch.setattr(warmup, "PROMPTS", ((1000,) * 64,))
        with pytest.raises(TierCapacityError):
            warmup.warm_up(runtime)
