"""Proxy attention against float64 arithmetic, by the reference and by the Triton kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tiered.kernels import proxy_attention_ref
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import proxy_scores, sink_scores

# The reference anywhere; the Triton kernel on a GPU where there is one, else in the interpreter.
IMPLEMENTATIONS = ["reference", "triton"]
SHAPES = {
    "plain": {},
    "no pads": {"masked": False},
    "a head for each key head": {"kv_heads": 4},
    "one key head": {"heads": 3, "kv_heads": 1, "batch": 1},
    "whole tiles": {"head_dim": 32, "length": 64, "clusters": 16, "batch": 1},
    "one centroid, few keys": {"length": 10, "clusters": 1},
    "several tiles of rows": {"clusters": 35, "batch": 1},
    "keys in two splits": {"length": 1100, "heads": 2, "kv_heads": 1, "clusters": 3, "batch": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "soft cap": {"soft_cap": 0.7},
    "soft cap, keys in two splits": {"length": 1100, "heads": 2, "kv_heads": 1, "batch": 1, "soft_cap": 2.0},
    "soft cap, bfloat16": {"dtype": torch.bfloat16, "soft_cap": 2.0, "masked": False},
}
PARTS = {
    "one": (1, {}),
    "a few": (4, {}),
    "as many as there may be": (18, {"clusters": 3, "batch": 1}),
    "keys in two splits": (5, {"length": 1100, "heads": 2, "kv_heads": 1, "clusters": 3, "batch": 1}),
    "soft cap": (3, {"soft_cap": 0.7}),
    "bfloat16": (9, {"dtype": torch.bfloat16, "heads": 3, "kv_heads": 1, "batch": 1}),
}


def attention(implementation: str) -> Callable[..., LogSumExp]:
    if implementation == "reference":
        return proxy_attention_ref.proxy_attention
    pytest.importorskip("triton")
    from tiered.kernels import proxy_attention

    return proxy_attention.proxy_attention


def inputs(
    implementation: str = "reference",
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    clusters: int = 5,
    length: int = 70,
    head_dim: int = 24,
    masked: bool = True,
    dtype: torch.dtype = torch.float32,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
    """Queries, keys, a mask with pads on the right of one sequence and on the left of the next, and the cap."""
    device = "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(batch, heads, clusters, head_dim, generator=generator)
    keys = torch.randn(batch, kv_heads, length, head_dim, generator=generator)
    key_mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    for b in range(batch):
        key_mask[b, slice(0, 9) if b % 2 else slice(length - 4, length)] = False
    return queries.to(device, dtype), keys.to(device, dtype), key_mask if masked else None, soft_cap


def scores64(queries: Tensor, keys: Tensor, key_mask: Tensor | None, soft_cap: float | None = None) -> Tensor:
    """Scores in float64, head by head; −inf where masked."""
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    queries, keys = queries.double(), keys.double()
    by_head = [queries[:, head] @ keys[:, head // group].transpose(-1, -2) for head in range(heads)]
    scores = torch.stack(by_head, dim=1) / queries.shape[-1] ** 0.5
    scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
    return scores if key_mask is None else scores.masked_fill(~key_mask[:, None, None], -torch.inf)


def assert_close(found: LogSumExp, scores: Tensor) -> None:
    """A float32 log-sum-exp is that of the float64 `scores`, up to the rounding of scores of about 10."""
    assert found.value.dtype == torch.float32
    torch.testing.assert_close(found.value.double(), scores.logsumexp(-1), rtol=0, atol=3e-6)
    torch.testing.assert_close(found.peak.double(), scores.amax(-1), rtol=0, atol=3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_log_sum_exp(implementation: str, shape: str):
    given = inputs(implementation, **SHAPES[shape])
    assert_close(attention(implementation)(*given), scores64(*given))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PARTS)
def test_log_sum_exp_of_parts(implementation: str, case: str):
    """Of which the last has no column, some columns have no part, and one part's scores are far below the others'."""
    parts, shape = PARTS[case]
    queries, keys, key_mask, soft_cap = inputs(implementation, **shape)
    assert key_mask is not None
    part = torch.randint(0, max(1, parts - 1), keys.shape[::2], generator=torch.Generator().manual_seed(1))
    part = part.to(keys.device).where(key_mask, -1)
    queries[..., 0] = 24**0.5
    keys[..., 0] = torch.where(part == 1, -150.0, keys[:, 0, :, 0])[:, None]
    found = attention(implementation)(queries, keys, None, soft_cap, part, parts)
    assert found.peak.shape == found.mass.shape == (*queries.shape[:3], parts)
    for p in range(parts):
        of_part = LogSumExp(found.peak[..., p], found.mass[..., p])
        scores = scores64(queries, keys, part == p, soft_cap)
        torch.testing.assert_close(of_part.value.double(), scores.logsumexp(-1), rtol=2e-7, atol=4e-6)
        assert parts == 1 or p < parts - 1 or (of_part.mass == 0).all()


@pytest.mark.parametrize("keys_at_once", [16, 48, 64])
@pytest.mark.parametrize("parts", [None, 3, 20])
def test_chunks_add_up(keys_at_once: int, parts: int | None, monkeypatch: pytest.MonkeyPatch):
    given = inputs(length=100, soft_cap=3.0)
    monkeypatch.setattr(proxy_attention_ref, "SCORES_AT_ONCE", keys_at_once * 2 * 4 * 5)
    part = None if parts is None else (torch.arange(100) % parts).expand(2, -1)
    found = proxy_attention_ref.proxy_attention(*given, part, parts or 1)
    assert_close(found if part is None else found.merged(), scores64(*given))


def test_scores_exist_for_a_chunk_of_keys_at_a_time(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def watched(*given: Any) -> Tensor:
        scores = proxy_scores(*given)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(proxy_attention_ref, "SCORES_AT_ONCE", 100 * 2 * 4 * 5)
    monkeypatch.setattr(proxy_attention_ref, "proxy_scores", watched)
    proxy_attention_ref.proxy_attention(*inputs(length=500))
    assert sizes == [100 * 2 * 4 * 5] * 5
    sizes.clear()  # as many keys as there are parts, at least
    proxy_attention_ref.proxy_attention(*inputs(length=500), torch.zeros(2, 500, dtype=torch.int64), 200)
    assert sizes == [200 * 2 * 4 * 5] * 2 + [100 * 2 * 4 * 5]


@pytest.mark.parametrize("soft_cap", [None, 0.4])
def test_scores_of_sinks(soft_cap: float | None):
    """Every head has its own, whatever key heads there are; every sequence the same."""
    queries, *_ = inputs()
    sink_keys = torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(1))
    expected = scores64(queries, sink_keys[None].repeat(2, 1, 1, 1), None, soft_cap)
    torch.testing.assert_close(sink_scores(queries, sink_keys, soft_cap).double(), expected, rtol=0, atol=3e-6)
    with pytest.raises(ValueError, match="do not fit sink_keys"):
        sink_scores(queries, sink_keys[:2], soft_cap)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_are_honoured(implementation: str):
    """Queries as a projection leaves them, keys as one layer of a store has them, a mask that is a part of another."""
    queries, keys, key_mask, _ = inputs(implementation, length=40)
    assert key_mask is not None
    store = torch.full((2, 3, 2, 50, 24), torch.nan, device=keys.device)
    store[1, :2, :, 5:45] = keys
    mask = torch.stack([key_mask, ~key_mask], dim=2)[:, :, 0]
    found = attention(implementation)(queries.mT.contiguous().mT, store[1, :2, :, 5:45], mask)
    assert_close(found, scores64(queries, keys, key_mask))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_pad_may_hold_anything(implementation: str):
    queries, keys, key_mask, _ = inputs(implementation)
    assert key_mask is not None
    expected = scores64(queries, keys, key_mask)
    keys.transpose(1, 2)[~key_mask] = torch.nan
    assert_close(attention(implementation)(queries, keys, key_mask), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_nothing_may_be_attended_to(implementation: str):
    queries, keys, key_mask, _ = inputs(implementation)
    assert key_mask is not None
    key_mask[1] = False
    found = attention(implementation)(queries, keys, key_mask)
    assert (found.peak[1] == -torch.inf).all() and (found.mass[1] == 0).all() and (found.value[1] == -torch.inf).all()
    assert found.value[0].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_keep_the_mass(implementation: str):
    """At 10⁵ one float32 number could not tell three keys from four."""
    queries, keys = torch.full((1, 1, 1, 4), 1.0), torch.full((1, 1, 20, 4), 5e4)
    keys[0, 0, 3:] -= 100
    device = inputs(implementation)[0].device
    found = attention(implementation)(queries.to(device), keys.to(device))
    assert found.peak.item() == 1e5 and found.mass.item() == 3


@pytest.mark.parametrize("large", [0.0, 1e5])
def test_probabilities_of_chosen_columns(large: float):
    queries, keys, key_mask, _ = inputs()
    queries[..., 0], keys[..., 0] = large, 1  # the same for every key: large scores, and no other probability
    total = proxy_attention_ref.proxy_attention(queries, keys, key_mask)
    found = total.log_probability(proxy_scores(queries, keys[:, :, 20:30])).exp()
    queries[..., 0] = 0
    expected = scores64(queries, keys, key_mask).softmax(-1)[..., 20:30]
    torch.testing.assert_close(found.double(), expected, rtol=2e-2 if large else 2e-6, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [((2, 4, 3, 8), (1, 2, 5, 8)), ((1, 4, 3, 8), (1, 2, 5, 6)), ((1, 4, 3, 8), (1, 3, 5, 8))],
    ids=["batch", "head_dim", "heads"],
)
def test_shapes_that_do_not_go_together(implementation: str, queries: tuple[int, ...], keys: tuple[int, ...]):
    with pytest.raises(ValueError, match="do not fit keys"):
        attention(implementation)(torch.zeros(queries), torch.zeros(keys))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4)], ids=["LLaDA-8B", "Dream-7B"])
def test_at_the_size_of_a_model(dtype: torch.dtype, heads: int, kv_heads: int):
    size: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "clusters": 64, "length": 5000, "head_dim": 128}
    size["soft_cap"] = 30.0 if heads == kv_heads else None
    given = inputs("triton", dtype=dtype, **size)
    found = attention("triton")(*given)
    torch.testing.assert_close(found.value.double(), scores64(*given).logsumexp(-1), rtol=0, atol=1e-5)
