"""Polestar on Dream. With everything renewed it is the uncached model, with nothing renewed the dual cache. The tier of
the hidden states and their way change no bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from polestar_variants import variant
from simulation import Point, SimulatedThreads
from torch import Tensor

import tiered
from tiered.offload.transport import Lane, Transport
from tiered.output import GenerationOutput
from tiered.runtime import Runtime

pytestmark = pytest.mark.usefixtures("few_slots")

DREAM = Path(__file__).parent / "goldens" / "dream" / "dream_tiny"
LENGTHS = (17, 9)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(DREAM, policy="none", dtype="float32")


def generate(runtime: Runtime, **options: Any) -> GenerationOutput:
    ids = torch.randint(0, 480, (2, 17), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    sizes = {"max_new_tokens": 24, "block_length": 8, "stop_at_eos": False, "output_history": True}
    return runtime.generate(ids, attention_mask=mask, **{**sizes, "steps": 12, **options})


def history(out: GenerationOutput) -> Tensor:
    assert out.history is not None
    return torch.stack(out.history)


EVERYTHING: dict[str, Any] = {"codec": "raw", "top_m": 1000, "update_threshold": 0}


@pytest.mark.parametrize(
    ("refresh", "call"),
    [("full", {}), ("drift", {}), ("drift", {"cfg_scale": 0.7}), ("full", {"block_length": 4})],
    ids=["plain", "plain, by drift", "guided, by drift", "short"],
)
def test_renewing_every_cluster_equals_none(runtime: Runtime, refresh: str, call: dict[str, Any]):
    found = generate(runtime.with_policy("polestar", clusters=5, refresh=refresh, **EVERYTHING), **call)
    assert torch.equal(history(found), history(generate(runtime, **call)))
    assert found.steps_by_kind["update"] >= 6


def test_without_clusters_to_renew_it_is_the_dual_cache(runtime: Runtime):
    found, dual = (
        generate(runtime.with_policy(policy, **options))
        for policy, options in (("polestar", {"top_m": 0}), ("fast_dllm_dual", {}))
    )
    assert torch.equal(history(found), history(dual)) and found.steps_by_kind == dual.steps_by_kind
    assert found.rows_per_step == dual.rows_per_step


def slow(point: Point, lane: Lane | None) -> float:
    return 0.002


TRANSPORTS: dict[str, Callable[[], Transport] | None] = {
    "plain": None,
    "delayed": lambda: SimulatedThreads(delay=slow),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {"codec": "raw", "clusters": 5, "top_m": 2, "update_threshold": 0},
    "raw, by drift": {"codec": "raw", "clusters": 9, "top_m": 3, "update_threshold": 1, "refresh": "drift"},
    "delta": {"codec": "nvfp4_delta", "clusters": 5, "top_m": 1, "update_threshold": 0},
}


@pytest.mark.parametrize(
    ("options", "transport"), [("raw", "plain"), ("raw, by drift", "delayed"), ("delta", "plain"), ("delta", "delayed")]
)
def test_offloaded_is_resident(runtime: Runtime, options: str, transport: str):
    host, device = (
        Runtime(runtime.model, policy=variant(tier, **OPTIONS[options]), transport=TRANSPORTS[transport])
        for tier in ("host", "device")
    )
    left, right = generate(host), generate(device)
    assert torch.equal(history(left), history(right))
    assert [update.clusters for update in left.updates] == [update.clusters for update in right.updates]
    assert [update.drift for update in left.updates] == [update.drift for update in right.updates]
    assert left.steps_by_kind["update"] > 3 and any(any(update.clusters) for update in left.updates)


def test_a_prompt_without_a_row_to_cluster_is_answered_beside_a_longer_one(runtime: Runtime):
    # The answer is one block, and the prompt's only row predicts its first token: nothing is left outside the block.
    own = runtime.with_policy("polestar", clusters=3, cluster_layers=1)
    long, sizes = torch.arange(5, 22)[None], {"max_new_tokens": 8, "block_length": 8, "stop_at_eos": False}
    ids, mask = torch.cat([torch.full_like(long, 3), long]), torch.ones(2, 17, dtype=torch.long)
    ids[0, -1], mask[0, :-1] = 9, 0
    both = own.generate(ids, attention_mask=mask, **sizes).sequences[:, 17:]
    assert torch.equal(both[0], own.generate(ids[:1, -1:], **sizes).sequences[0, 1:])
    assert torch.equal(both[1], own.generate(long, **sizes).sequences[0, 17:])
