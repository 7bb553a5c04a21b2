"""A mixture whose experts do not all fit, behind the HTTP server and in Ray's workers: answers are those of a runtime
that holds all of them."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving import serving
from torch import Tensor

import tiered
from tiered.core.features import Tier
from tiered.ray import Answerer, answered
from tiered.runtime import Runtime

pytestmark = pytest.mark.long

# Experts have most of the bytes; tokens are those of the embedded models.
CONFIG: dict[str, Any] = {
    **{"model_type": "llada2_moe", "vocab_size": 128, "mask_token_id": 3, "eos_token_id": 0, "pad_token_id": 0},
    **{"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    **{"intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 64, "num_experts_per_tok": 4},
    **{"n_group": 4, "topk_group": 2, "num_shared_experts": 1, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "max_position_embeddings": 2048},
    "torch_dtype": "float32",
}
PROMPTS = ["sort: Nora Ben Ivan Cleo", "reverse: Max Ada Zoe", "copy: Tara Uma Vera Will", "sort: Gus Eva " * 12]
OPTIONS: dict[str, Any] = {"block_length": 16, "confidence_threshold": 0.1, "stop_at_eos": False}
TOKENS = 48


@pytest.fixture
def directory(
    write_checkpoint: Callable[..., Path], random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]]
) -> Path:
    return write_checkpoint(CONFIG, random_weights(CONFIG), tokenizer=True)


@pytest.fixture
def resident(directory: Path) -> Iterator[Runtime]:
    with tiered.from_pretrained(directory) as runtime:
        yield runtime


@pytest.fixture
def expected(resident: Runtime) -> list[str]:
    """The answer to each prompt."""
    outs = [resident.generate(prompt, max_new_tokens=TOKENS, **OPTIONS) for prompt in PROMPTS]
    texts = [text for out in outs for text in out.text or []]
    assert len({*texts}) == len(PROMPTS)
    return texts


def memory_for(resident: Runtime, calls: int) -> int:
    """Device bytes that some experts and some calls fit in."""
    peak = resident.ledger.report().peak_device_bytes
    weights = resident.ledger.held(Tier.DEVICE)
    return weights // 2 + calls * (peak - weights)


def test_clients_of_a_server_share_the_slots(directory: Path, resident: Runtime, expected: list[str]):
    memory = memory_for(resident, 5)
    with tiered.from_pretrained(directory, memory=memory) as runtime, serving(runtime) as served:
        url, body = f"{served.url}/v1/chat/completions", {"max_tokens": TOKENS, **OPTIONS}

        def ask(prompt: str) -> str:
            told = httpx.post(url, json={"messages": [{"role": "user", "content": prompt}], **body}, timeout=120)
            return told.json()["choices"][0]["message"]["content"]

        def goes(prompt: str) -> None:
            message = {"messages": [{"role": "user", "content": prompt}], **body, "max_tokens": 1024, "stream": True}
            with httpx.stream("POST", url, json=message, timeout=120) as told:
                next(told.iter_lines())

        for _ in range(3):
            with ThreadPoolExecutor(5) as clients:
                gone = clients.submit(goes, PROMPTS[0])
                assert [*clients.map(ask, PROMPTS)] == expected
                gone.result()
        served.held()
        counts = served.scheduler.counts
        assert counts.ended["done"] + counts.ended["cancelled"] == 15 and counts.ended["cancelled"] >= 3
        assert counts.tokens < 1024, "an answer of which a client is gone is not made"
        assert counts.taken > counts.forwards, "forwards are shared"
        weights = runtime._call.weights
        assert weights is not None and weights.now.count and runtime.ledger.moved[Tier.HOST, Tier.DEVICE]
        assert runtime.ledger.report().peak_device_bytes <= memory
        runtime.ledger.check_integrity()
        weights.check_integrity()
        assert ask(PROMPTS[0]) == expected[0]


def test_a_worker_answers_a_batch(directory: Path, resident: Runtime, expected: list[str]):
    worker = Answerer(str(directory), memory=memory_for(resident, 4), options={**OPTIONS, "max_new_tokens": TOKENS})
    told = worker({"prompt": np.array(PROMPTS * 2, dtype=object)})
    assert (told["answer"], told["error"]) == (expected * 2, [""] * 8)
    assert worker._runtime.ledger.moved[Tier.HOST, Tier.DEVICE]


def test_workers_of_ray_answer_in_order(directory: Path, resident: Runtime, expected: list[str]):
    ray: Any = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 1024**2, log_to_driver=False)
    try:
        rows = [{"number": number, "prompt": PROMPTS[number % len(PROMPTS)]} for number in range(40)]
        told = answered(
            ray.data.from_items(rows, override_num_blocks=4),
            str(directory),
            workers=2,
            memory=memory_for(resident, 4),
            options={**OPTIONS, "max_new_tokens": TOKENS},
        ).take_all()
    finally:
        ray.shutdown()
    assert [(row["number"], row["answer"], row["error"]) for row in told] == [
        (number, expected[number % len(PROMPTS)], "") for number in range(40)
    ]
