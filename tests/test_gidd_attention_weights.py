"""The drift of the rule `drift_aware` and Elastic-Cache's weights are of the attention of the GIDD family."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiered
from tiered.core.rows import Rows
from tiered.decoding.attention_shift import AttentionShift
from tiered.forward.attention_received import attention_received
from tiered.forward.forward import Forward
from tiered.policies.elastic_cache import program
from tiered.policies.elastic_cache.program import weights_of
from tiered.runtime import Runtime

SIZES: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "stop_at_eos": False}


@pytest.fixture(scope="module")
def masked(masked_gidd: Callable[..., Path]) -> Runtime:
    """The checkpoint with masks for its noise, and sinks that draw attention."""
    return tiered.from_pretrained(masked_gidd(attn_soft_cap=3.0), policy="none", dtype="float32")


def prompts(*pads: int) -> dict[str, Tensor]:
    ids = torch.randint(2, 500, (len(pads), 15), generator=torch.Generator().manual_seed(0))
    return {"inputs": ids, "attention_mask": (torch.arange(15) >= torch.tensor(pads)[:, None]).long()}


def weights64(forward: Forward, layer: int, queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Attention over the columns of `visible` [batch, rows, length], and over the sinks behind them."""
    sinks = forward.model.sink_keys(layer)
    cap = forward.model.shape.soft_cap
    assert sinks is not None and cap is not None
    scores = torch.cat([queries.double() @ keys.double().mT, queries.double() @ sinks.double().mT], dim=-1)
    scores = cap * (scores / queries.shape[-1] ** 0.5 / cap).tanh()
    hidden = torch.cat([~visible, visible.new_zeros(*visible.shape[:2], sinks.shape[1])], dim=-1)
    return scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)


def test_the_drift_of_rows(masked: Runtime, monkeypatch: pytest.MonkeyPatch):
    kept: dict[int, Tensor] = {}
    compared = []
    observe, begin = AttentionShift.observe, AttentionShift.begin_step
    forwards: list[Forward] = []
    attention = Forward.attention

    def watched_forward(forward: Forward, *given: Any) -> Tensor:
        forwards.append(forward)
        return attention(forward, *given)

    def begun(drift: AttentionShift, first_row: int, *, forget: list[bool]) -> None:
        if all(forget):
            kept.clear()
        begin(drift, first_row, forget=forget)

    def watched(drift: AttentionShift, rows: Rows, queries: Tensor, keys: Tensor, mask: Tensor | None) -> None:
        assert rows.count == 8 and mask is not None
        observe(drift, rows, queries, keys, mask)
        everything = mask[:, None].expand(-1, 8, -1)
        now = weights64(forwards[-1], forwards[-1].model.shape.layers - 1, queries, keys, everything)
        if 0 in kept:
            terms = (now * (now / kept[0]).log()).where(now > 0, 0.0)
            torch.testing.assert_close(drift.shift.double(), terms.sum(-1).mean(1), rtol=1e-3, atol=1e-7)
            compared.append(drift.shift)
        kept[0] = now

    monkeypatch.setattr(Forward, "attention", watched_forward)
    monkeypatch.setattr(AttentionShift, "observe", watched)
    monkeypatch.setattr(AttentionShift, "begin_step", begun)
    masked.with_policy("fast_dllm_dual").generate(**prompts(0, 6), commit="drift_aware", **SIZES)
    assert len(compared) > 6 and torch.stack(compared).max() > 1e-4


@pytest.mark.parametrize("tracked", [1, 12])
def test_weights_of_tracked_tokens_and_of_the_window(masked: Runtime, tracked: int, monkeypatch: pytest.MonkeyPatch):
    final = open_ = 0

    def watched(forward: Forward, layer: int, queries: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
        nonlocal final, open_
        found = weights_of(forward, layer, queries, columns, keys)
        border, mask = forward.limits.final, forward.limits.key_mask
        assert isinstance(border, int) and border >= 15 and mask is not None
        column = torch.arange(forward.length)
        visible = (column < border) | (columns >= border)[..., None]
        visible &= mask[: len(columns), None]
        expected = weights64(forward, layer, queries, forward.keys(layer)[: len(columns)], visible)[..., :-1]
        there = (columns >= 0)[:, None, :, None].expand_as(found)
        # Of a row they are a multiple of its weights, which is as similar.
        shares, expected = (each / each.sum(dim=-1, keepdim=True) for each in (found.double(), expected))
        torch.testing.assert_close(shares[there], expected[there], rtol=1e-5, atol=1e-7)
        final += int((there[:, 0, :, 0] & (columns < border)).sum())
        open_ += int((columns >= border).sum())
        return found

    def received(queries: Tensor, counts: Tensor, keys: Tensor, mask: Tensor | None, *rest: Any, **own: Any) -> Tensor:
        found = attention_received(queries, counts, keys, mask, *rest, **own)
        assert mask is not None and own["soft_cap"] == 3.0
        layer = next(n for n in range(4) if model.sink_keys(n).data_ptr() == own["sink_keys"].data_ptr())
        forward: Any = SimpleNamespace(model=model)
        visible = mask[:, None].expand(-1, queries.shape[2], -1)
        expected = weights64(forward, layer, queries, keys, visible)[..., :-1]
        expected = (expected * counts[:, None, :, None]).sum(dim=(1, 2))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
        return found

    model: Any = masked.model
    monkeypatch.setattr(program, "weights_of", watched)
    monkeypatch.setattr(program, "attention_received", received)
    options = {"window": 8, "tracked": tracked, "similarity_threshold": 0.999}
    masked.with_policy("elastic_cache", **options).generate(**prompts(0, 6), steps=12, **SIZES)
    assert final and (open_ or tracked == 1)


@pytest.mark.parametrize("policy", ["elastic_cache", "dllm_cache"])
def test_every_row_at_every_step_equals_none(masked: Runtime, policy: str):
    options = (
        {"refresh_interval": 1, "window": 24}
        if policy == "elastic_cache"
        else {"response_interval": 1, "prompt_interval": 1}
    )
    found, expected = (
        runtime.generate(**prompts(0, 6), steps=12, **SIZES).sequences
        for runtime in (masked.with_policy(policy, **options), masked)
    )
    assert torch.equal(found, expected)
