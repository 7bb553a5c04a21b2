"""Launches of the CUDA path as they are counted on the CPU: what is one, and how many a layer takes at most."""

from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from long_cases import and_long
from torch import Tensor
from triton.runtime.interpreter import GridExecutor
from workloads import served_reads
from workloads.launches import count, counting
from workloads.models import in_records
from workloads.plain_layers import CONFIGS, ROWS, forward_of, host_time, without_kernels
from workloads.plain_layers import launches as launches_of

from tiered.clustering import summaries
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.forward.passes import Pass
from tiered.kernels import choice, projection
from tiered.kernels.host_values import on_device
from tiered.offload import codecs
from tiered.offload.codec_bytes import Codec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not in its interpreter")
# Every family: two products of the attention's output and the MLP's, one of queries, keys and values, two norms that
# add a branch each, a rotation, two writes, attention. All but GIDD: a product of both branches of the MLP, and its
# gate. Dream: the biases. GIDD: a product, ReLU and its square; four products and two branches are scaled; two norms of
# all heads together, and a rotation more. SDAR norms heads as it rotates them.
LAUNCHES = {"llada": 11, "Dream": 12, "gidd": 21, "sdar": 11}
LIMITS = {"sdar": 6}  # more, for the limits of scattered rows
OVER = {
    "span": ROWS,
    "scattered": Rows.at(torch.arange(8, 16)[None], torch.ones(1, 8, dtype=torch.bool)),
}
HEADS = torch.randn(1, 2, 6, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[4, 1]])


def encode(rows: Tensor) -> None:
    """Four rows."""
    coded = torch.empty(6, Codec.NVFP4.row_bytes(16, 2), dtype=torch.uint8, device=rows.device)
    codecs.encode(Codec.NVFP4, rows[0, 0, :4], coded, on_device([5, 0, 1, 3], rows.device), None)


def by_cluster(rows: Tensor) -> None:
    summaries.add_by_cluster(torch.zeros(1, 5, 16, device=rows.device), rows[:, 0, :2].float(), INDEX)


def host_work(rows: Tensor) -> list[int]:
    sizes = torch.tensor([2, 3])
    return [*torch.cat([sizes.cumsum(0), torch.arange(3)]).tolist(), int(sizes.sum())]


@pytest.mark.parametrize(
    ("run", "launches", "reads"),
    [
        (lambda rows: rows.view(1, 2, -1).transpose(1, 2)[:, 1:], {}, {}),
        (lambda rows: torch.empty_like(rows), {}, {}),
        (lambda rows: (rows.float() + 1).sum(), {"_to_copy": 1, "add": 1, "sum": 1}, {}),
        (lambda rows: F.scaled_dot_product_attention(rows, rows, rows), {"scaled_dot_product_attention": 1}, {}),
        (lambda rows: F.rms_norm(rows, (16,)), {"rms_norm": 1}, {}),
        (host_work, {}, {}),
        (lambda rows: on_device([1, 2], rows.device) * 2, {"host to device": 1, "mul": 1}, {}),
        (lambda rows: torch.zeros(2, device=rows.device), {"zeros": 1}, {}),
        (lambda rows: rows.isfinite().tolist(), {"eq": 1, "abs": 1, "ne": 1, "mul": 1}, {"tolist": 1}),
        (lambda rows: bool(rows[0, 0, 0, 0]), {}, {"__bool__": 1}),
        (lambda rows: int(rows.cpu().sum()), {}, {"cpu": 1}),
        (lambda rows: int(rows.to("cpu").sum()), {}, {"to": 1}),
        (lambda rows: rows[rows > 0], {"gt": 1, "index": 1}, {"__getitem__": 1}),
        # In Triton: once for each time that its launcher starts it, and what torch does for it.
        (lambda rows: Rows.at(INDEX).put(rows.clone(), rows[:, :, :2]), {"clone": 1, "_scatter": 1}, {}),
        (encode, {"host to device": 1, "_encode_rows": 1}, {}),
        # By a product there, whose sums come in one order.
        (by_cluster, {"zeros": 1, "_to_copy": 1, "new_zeros": 1, "scatter_": 1, "baddbmm_": 1}, {}),
    ],
)
def test_what_is_a_launch_and_what_a_read(
    run: Callable[[Tensor], Any], launches: dict[str, int], reads: dict[str, int]
):
    with counting() as found, found.span(Op.LAYER, 0):
        run(HEADS)
    assert {name: number for (*_, name), number in found.launches.items()} == launches
    assert {name: number for (*_, name), number in found.reads.items()} == reads
    assert {(layer, op) for counter in (found.launches, found.reads) for _, layer, op, _ in counter} <= {(0, Op.LAYER)}


def test_counting_leaves_nothing_changed():
    before = choice.for_device, summaries.add_by_cluster, GridExecutor.__call__
    with counting():
        assert choice.for_device is not before[0] and GridExecutor.__call__ is not before[2]
    assert (choice.for_device, summaries.add_by_cluster, GridExecutor.__call__) == before


@pytest.mark.parametrize("rows", OVER.values(), ids=OVER)
@pytest.mark.parametrize("family", LAUNCHES)
def test_a_layer_of_a_plain_step(family: str, rows: Rows):
    layers, reads = launches_of(family, rows)
    expected = LAUNCHES[family] + (0 if rows.is_span else LIMITS.get(family, 0))
    assert [layers[0], layers[1]] == [expected] * 2
    assert not reads


# Calls of functions in a plain layer at most, the same on every machine; and its Python time over that of as many bare
# launchers, twice what the fastest machine had, because others had up to 1.7 times that. These numbers only fall.
CALLS = {"llada": 428, "Dream": 462, "gidd": 514, "sdar": 450}
OVER_BARE = {"llada": 6.3, "Dream": 5.0, "gidd": 4.2, "sdar": 6.2}


@pytest.mark.parametrize("family", OVER_BARE)
def test_the_host_needs_little_time_for_a_layer(family: str, monkeypatch: pytest.MonkeyPatch):
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)  # the poison would be counted
    found = host_time(family, rounds=15)
    assert found["launches"] == LAUNCHES[family] and found["calls"] <= CALLS[family]
    assert 1 < found["over_bare"] <= OVER_BARE[family], found


def test_what_starts_no_kernel_leaves_nothing_changed():
    def found() -> tuple[object, ...]:
        return choice.for_device, projection.FEW_ROWS, projection.project_joined

    before = found()
    with without_kernels():
        assert not any(map(is_, before, found()))
    assert found() == before


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", OVER.values(), ids=OVER)
@pytest.mark.parametrize("family", LAUNCHES)
def test_kernels_answer_as_their_references(family: str, rows: Rows, random_model: Callable[[Any], Any]):
    """Logits in float32 of a step behind a pass over all columns."""
    model = in_records(random_model({"model_type": family, **CONFIGS[family]}))
    ids = torch.randint(0, 120, (1, 24), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def answer() -> Tensor:
        forward = forward_of(model)
        forward.logits(Pass(ids, forward.rows, slice(0, 8)))
        return forward.logits(Pass(ids.flip(1), rows, slice(0, 8)))

    expected = answer()
    with counting():
        found = answer()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Of each kind of forward at most: launches of a layer, reads by the host in all layers, launches outside of layers.
# These numbers only fall. Which clusters of `polestar` drift most, and so what an update mends, depends on rounding. So
# does the token that a layer of `elastic_cache` tracks: 95 is a layer's most, if its token has no row in the step.
MOST: dict[str, dict[str, tuple[int, int, int]]] = {
    "fast_dllm_dual": {"refresh": (11, 0, 44), "step": (11, 0, 44)},
    "attended": {"refresh": (11, 0, 51), "update": (11, 0, 73)},
    "dkv_pd": {"refresh": (11, 0, 44), "step": (11, 0, 111)},
    "dllm_cache": {"refresh": (18, 0, 44), "step": (45, 0, 44), "update": (18, 0, 46)},
    "elastic_cache": {"refresh": (40, 0, 139), "step": (95, 0, 131)},
    "polestar": {"refresh": (92, 4, 44), "step": (11, 0, 55), "update": (33, 2, 55)},
}


@pytest.mark.parametrize("policy", and_long(["attended"], MOST))
def test_forwards_of_a_policy_launch_and_read_no_more_than_this(policy: str):
    rows = count(policy, {})
    kinds = {row["kind"]: row for row in rows if "op" not in row}
    assert kinds.keys() == MOST[policy].keys()
    for kind, most in MOST[policy].items():
        found = kinds[kind]
        assert all(found[name] <= at_most for name, at_most in zip(("launches", "reads", "outside"), most, strict=True))
        of = [row for row in rows if row["kind"] == kind and "op" in row]
        assert sum(row["launches"] for row in of) == pytest.approx(found["launches"])


@pytest.mark.parametrize(
    ("family", "policy"),
    and_long([("sdar", "block_causal")], [("llada", "fast_dllm_dual")]),
)
def test_the_host_reads_once_in_a_round_of_requests(family: str, policy: str):
    """And once more in the round that ends all answers. A layer launches no more than for one request."""
    found = served_reads.measure(family, policy, requests=2)
    assert (found["forwards"], found["reads"], found["most_reads"]) == (1, 1, 2)
    assert sum(found["read"].values()) * found["rounds"] == pytest.approx(8 + 1)  # a round a token
    assert found["launches"] <= LAUNCHES[family] - 1  # keys and values are written in one launch
