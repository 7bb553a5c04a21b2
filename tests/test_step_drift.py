"""Step drift and attention by area: against loops and a full softmax written out, for every family."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from canvas_figures import LENGTHS, Spy, left_padded
from torch import Tensor
from torch.nn.functional import cosine_similarity
from training import tasks
from workloads import attention_mass
from workloads.canvas_areas import COLUMNS, MASSES
from workloads.step_drift import StepDriftInspector, measure_step_drift

import tiered
from tiered.core.features import Account, Feature
from tiered.forward import forward_bytes
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.models.gidd import Gidd
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
ANSWER, BLOCK = 24, 8
SIZES: dict[str, Any] = {"max_new_tokens": ANSWER, "block_length": BLOCK, "stop_at_eos": False}
UNIFORM: dict[str, Any] = {"block_steps": 2, "tokens_per_step": 5, "seed": 0}
# Checkpoint, options, and the policy that decides the tokens.
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "masks": ("llada/llada_tiny_gqa", {"steps": 6}, "none"),
    "sequences that wait": ("llada/llada_tiny_gqa", {"confidence_threshold": 0.3}, "none"),
    "guidance": ("llada/llada_tiny_gqa", {"steps": 6, "cfg_scale": 0.7}, "none"),
    "guidance at times": ("llada/llada_tiny_gqa", {"steps": 6, "cfg_scale": 0.7}, "dllm_cache"),
    "another's tokens": ("llada/llada_tiny_gqa", {"steps": 6}, "fast_dllm_dual"),
    "shifted predictions": ("dream/dream_tiny", {"confidence_threshold": 0.3}, "none"),
    "uniform noise": ("gidd/gidd_tiny_unif", UNIFORM, "none"),
    "noise behind": ("gidd/gidd_tiny_unif", UNIFORM | {"trailing_noise": 5}, "none"),
    "a second go": ("gidd/gidd_tiny_unif", UNIFORM | {"correction_steps": 2}, "uniform"),
}


@pytest.fixture(scope="module")
def runtimes() -> dict[str, Runtime]:
    names = sorted({name for name, _, _ in CALLS.values()})
    return {name: tiered.from_pretrained(GOLDENS / name, dtype="float32", policy="none") for name in names}


def area(column: int, prompt: int, block: int) -> int:
    """Number of the area of a column of the canvas."""
    if column < prompt:
        return 0
    if column >= prompt + ANSWER:
        return 6
    apart = (column - prompt) // BLOCK - block
    return 1 if apart < -1 else min(apart, 2) + 3


@dataclass
class Uncached:
    """One sequence without padding. `stored`: keys and values [features, layers, heads, length, elements]. `weights`:
    attention of the rows from `start` on over columns and then sinks [layers, heads, rows, keys]."""

    stored: Tensor
    weights: Tensor


def uncached(runtime: Runtime, ids: Tensor, start: int) -> Uncached:
    """Every layer over all rows, with the attention of the block's rows written out."""
    model, shape, length = runtime.model, runtime.model.shape, len(ids)
    features: dict[Feature, int] = dict.fromkeys((Feature.KEY, Feature.VALUE), shape.layers)
    store = FeatureStore(runtime._call.sizes(1, length, BLOCK), features, runtime.device)
    forward = Forward(model, store, torch.arange(length)[None])
    pass_ = Pass(ids[None], forward.rows, slice(0, length), final=start, hidden=model.embed(ids[None]))
    forward.begin(pass_)
    block, weights = slice(start, start + BLOCK), []
    for layer in range(shape.layers):
        normed = model.attention_norm(layer, pass_.hidden)
        queries = model.queries(layer, normed, forward.rotary[0])[0, :, block].double()
        # Computed before the layer's rows are stored: rows that `dense` writes must be the same.
        keys = model.keys(layer, normed, forward.rotary[0])[0].double()
        values = model.values(layer, normed)[0].double()
        if layer == shape.layers - 1:  # else the residual stream changes below
            pass_ = replace(pass_, output=block)
        before = pass_.hidden.clone()
        pass_ = forward.dense(layer, pass_)
        groups = shape.heads // shape.kv_heads
        keys, values = keys.repeat_interleave(groups, dim=0), values.repeat_interleave(groups, dim=0)
        if isinstance(model, Gidd):
            sink_keys, sink_values = (each.double() for each in model.sinks(layer))
            keys, values = torch.cat([keys, sink_keys], dim=1), torch.cat([values, sink_values], dim=1)
        scores = torch.einsum("hrd,hcd->hrc", queries, keys) / shape.head_dim**0.5
        if isinstance(model, Gidd):
            scores = 30 * torch.tanh(scores / 30)  # attn_soft_cap of its config.json
        weights.append(scores.softmax(dim=-1))
        # The weights are the model's own, because they give the output of the layer.
        mixed = torch.einsum("hrc,hcd->rhd", weights[-1], values).flatten(1)[None].to(runtime.dtype)
        own = before[:, block] + model.attention_out(layer, mixed)
        own = own + model.feed_forward(layer, own)
        there = pass_.hidden if layer == shape.layers - 1 else pass_.hidden[:, block]
        torch.testing.assert_close(own, there, rtol=1e-3, atol=1e-4)
    stored = torch.stack([torch.stack([store.view(x, layer)[0] for layer in range(shape.layers)]) for x in features])
    return Uncached(stored, torch.stack(weights))


def brute_force(runtime: Runtime, seen: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drift [features, steps, layers, places], attention [steps, layers, masses] and rows [steps, places], one
    sequence, column and row at a time."""
    longest, layers = max(LENGTHS), runtime.model.shape.layers
    drift, rows = np.full((2, len(seen), layers, len(COLUMNS)), np.nan), np.zeros((len(seen), len(COLUMNS)), dtype=int)
    attention = np.zeros((len(seen), layers, len(MASSES)))
    last: list[Uncached] = []
    for at, shown in enumerate(seen):
        fresh = [
            uncached(runtime, ids[longest - length :], shown["start"] - longest + length)
            for ids, length in zip(shown["ids"][: len(LENGTHS)], LENGTHS, strict=True)
        ]
        here = [number for number, active in enumerate(shown["active"]) if active]
        sums = np.zeros((2, layers, len(COLUMNS)))
        for number in here:
            pad = longest - LENGTHS[number]
            places = [area(column, longest, shown["block"]) for column in range(pad, shown["ids"].shape[1])]
            np.add.at(rows[at], places, 1)
            weights = fresh[number].weights.mean(dim=(1, 2)).numpy() / len(here)
            for key in range(weights.shape[1]):
                attention[at, :, places[key] if key < len(places) else 7] += weights[:, key]
            if shown["number"]:
                old, new = last[number].stored.double(), fresh[number].stored.double()
                distances = (1 - cosine_similarity(old, new, dim=-1)).mean(dim=2).numpy()
                for column, place in enumerate(places):
                    sums[:, :, place] += distances[:, :, column]
        if shown["number"]:
            with np.errstate(invalid="ignore"):
                drift[:, at] = sums / rows[at]
        last = fresh
    return drift, attention, rows


@pytest.mark.parametrize("call", CALLS)
@torch.no_grad()
def test_the_figures_are_those_of_brute_force(runtimes: dict[str, Runtime], call: str, monkeypatch: pytest.MonkeyPatch):
    name, options, policy = CALLS[call]
    runtime, spy = runtimes[name].with_policy(policy), Spy()
    runtime.generate(**left_padded(), inspector=spy, **options, **SIZES)
    with monkeypatch.context() as small:
        # A few rows of one key head at a time, in passes of 10 rows: the parts must add up.
        small.setattr(attention_mass, "PAIRS_AT_ONCE", 600)
        small.setattr(forward_bytes, "PART_ROWS", 30)
        report = measure_step_drift(runtime, **left_padded(), **options, **SIZES)
    drift, attention, rows = brute_force(runtime, spy.seen)
    np.testing.assert_array_equal(report.rows, rows)
    assert [report.blocks, report.numbers] == [[shown[x] for shown in spy.seen] for x in ("block", "number")]
    # The oracle rounds in float32 where its passes over one sequence differ from those over a batch.
    assert report.attention is not None
    np.testing.assert_allclose(report.keys, drift[0], rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(report.values, drift[1], rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(report.attention, attention, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(report.attention.sum(axis=-1), 1, rtol=1e-6)
    # The purpose of the call.
    assert call not in ("sequences that wait", "shifted predictions") or any(
        not all(shown["active"]) for shown in spy.seen
    )
    assert (report.attention[..., -1] > 0).all() == (runtime.model.shape.sink_tokens > 0)
    assert bool(report.rows[:, 6].any()) == ("trailing_noise" in options)


@pytest.mark.parametrize("at_once", [1, 90, 400, 1 << 18])
def test_the_mass_is_that_of_a_full_softmax(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_mass, "PAIRS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(3)
    queries, keys = (torch.randn(2, heads, 11, 8, generator=generator) for heads in (6, 3))
    queries, sinks = 30 * queries[:, :, 4:], 3 * torch.randn(6, 2, 8, generator=generator)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :3] = False
    spans = [(0, 4), (4, 4), (4, 11)]
    found = attention_mass.attention_mass(queries, keys, spans, key_mask=mask, soft_cap=2.5, sink_keys=sinks)
    plain = attention_mass.attention_mass(queries, keys, spans)
    for number, (sequence, every) in enumerate(zip(found.tolist(), plain.tolist(), strict=True)):
        expected, expected_plain = torch.zeros(4, dtype=torch.double), torch.zeros(4, dtype=torch.double)
        for head in range(6):
            for row in range(7):
                query, own = queries[number, head, row].double(), keys[number, head // 2].double()
                scores = torch.cat([own, sinks[head].double()]) @ query / 8**0.5
                expected_plain += split(scores[:11].softmax(dim=0))
                scores = 2.5 * (scores / 2.5).tanh()
                scores[:11][~mask[number]] = -torch.inf
                expected += split(scores.softmax(dim=0))
        assert sequence == pytest.approx(expected.tolist(), rel=1e-5)
        assert every == pytest.approx(expected_plain.tolist(), rel=1e-5)
        assert sum(sequence) == pytest.approx(6 * 7) == sum(every)


def split(weights: Tensor) -> Tensor:
    """Weights on 4 columns, on none, on 7 columns, on sinks."""
    return torch.stack([weights[:4].sum(), weights[:0].sum(), weights[4:11].sum(), weights[11:].sum()])


def test_under_a_noise_mask_final_rows_do_not_move(runtimes: dict[str, Runtime]):
    report = measure_step_drift(runtimes["gidd/gidd_tiny_unif"], **left_padded(), **UNIFORM, **SIZES)
    follows, there = np.array(report.numbers) > 0, report.rows > 0
    for distances in (report.keys, report.values):
        final = distances[follows][:, :, :3]
        assert np.nanmax(final) < 1e-9
        # All others see the current block, from layer 1 on.
        moved = [distances[follows & there[:, place], 1:, place].max() for place in (3, 4, 5)]
        assert min(moved) > 1e-6


def test_a_batch_has_the_mean_of_its_sequences():
    # Prompts of several lengths, blocks that end at different steps, answers that end in different blocks.
    runtime = tiered.from_pretrained("embedded", policy="none")
    prompts = [tasks.sample(task, "test", seed).prompt for task in ("copy", "add", "remove") for seed in range(2)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": 32, "block_length": 4, "confidence_threshold": 0.8}
    batch = measure_step_drift(runtime, chats, **options)
    singles = [measure_step_drift(runtime, chat, **options) for chat in chats]
    assert len({tuple(single.blocks) for single in singles}) > 1
    for at, place in enumerate(zip(batch.blocks, batch.numbers, strict=True)):
        found = []
        for single in singles:
            places = list(zip(single.blocks, single.numbers, strict=True))
            found += [(single, places.index(place))] if place in places else []
        rows = np.stack([single.rows[mine] for single, mine in found])
        np.testing.assert_array_equal(batch.rows[at], rows.sum(axis=0))
        for name in ("keys", "values"):
            figures = np.stack([getattr(single, name)[mine] for single, mine in found])
            weighted = (np.nan_to_num(figures) * rows[:, None]).sum(axis=0)
            expected = weighted / np.where(rows.sum(axis=0) * (place[1] > 0), rows.sum(axis=0), np.nan)
            np.testing.assert_allclose(getattr(batch, name)[at], expected, rtol=1e-3, atol=1e-9)
        shares = [single.attention[mine] for single, mine in found if single.attention is not None]
        assert batch.attention is not None and len(shares) == len(found)
        np.testing.assert_allclose(batch.attention[at], np.mean(shares, axis=0), rtol=1e-4, atol=1e-6)


def test_keys_and_values_of_the_step_before_are_booked(runtimes: dict[str, Runtime]):
    # All layers of them, and the one that the pass works in; on tiny models activations would hide their absence.
    shape = runtimes["llada/llada_tiny_gqa"].model.shape
    booked = StepDriftInspector().device_bytes(shape, sequences=2, length=50, dtype="bfloat16")
    expected = (shape.layers + 1) * 2 * 50 * shape.kv_heads * shape.head_dim * 2
    assert booked[Account(Feature.KEY)] == booked[Account(Feature.VALUE)] == expected
