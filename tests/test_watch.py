"""Frames of a call against its own history, updates and books; and watching changes no token."""

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from padded_prompts import padded
from polestar_variants import variant
from torch import Tensor

import tiered
from tiered.core.features import Account, ColumnState, Tier
from tiered.observe.watch.frame import Frame, TokenState
from tiered.observe.watch.watcher import Watcher
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.policies.registry import policies_for
from tiered.runtime import Runtime
from tiered.tiers.stats import ENDS

GOLDENS = Path(__file__).parent / "goldens" / "llada"
LENGTHS = (17, 9, 12)
SIZES: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8}
CHATS = ["sort: Nora Ben Ivan Cleo", "reverse: Ada Max", "copy: Zoe Ben Ivan Ada Pia Uma Gus Hana Eva Yan Rosa"]


@pytest.fixture(scope="module")
def tiny() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32", policy="none")


@pytest.fixture(scope="module")
def embedded() -> Runtime:
    return tiered.from_pretrained("embedded", policy="none")


@pytest.fixture(scope="module")
def uniform() -> Runtime:
    return tiered.from_pretrained("embedded-uniform", policy="none")


def chats() -> dict[str, Any]:
    return {"inputs": [[{"role": "user", "content": text}] for text in CHATS], "max_new_tokens": 32, "block_length": 8}


def fail(error: Exception) -> None:
    raise AssertionError("the view gave up") from error


def watched(runtime: Runtime, **options: Any) -> tuple[GenerationOutput, list[Frame]]:
    """A call with its history, and its frames, the one before the first forward among them."""
    frames: list[Frame] = []
    errors: list[Exception] = []
    watcher = Watcher(runtime.ledger, frames.append, errors.append, stop_at_eos=options.get("stop_at_eos", True))
    out = runtime.generate(streamer=watcher, inspector=watcher, output_history=True, **options)
    assert not errors, errors
    return out, frames


def states_by_history(
    out: GenerationOutput, runtime: Runtime, length: int, spans: list[tuple[int, int]]
) -> list[list[list[TokenState]]]:
    """States of a masked answer's tokens after each forward, by the history of tokens alone."""
    assert out.history is not None
    mask, eos = runtime.model.mask_token_id, runtime.model.eos_token_id
    found = []
    for before, after, (first, stop) in zip(out.history, out.history[1:], spans, strict=False):
        rows = []
        for was, now in zip(before[:, -length:].tolist(), after[:, -length:].tolist(), strict=True):
            row, ended = [], False
            for column, token in enumerate(now):
                if ended:
                    row.append(TokenState.END)
                elif token == mask:
                    row.append(TokenState.DRAFT if first <= column < stop else TokenState.NOISE)
                else:
                    row.append(TokenState.FRESH if was[column] == mask else TokenState.FIXED)
                ended = ended or (token == eos and mask not in now[:column])
            rows.append(row)
        found.append(rows)
    return found


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("none", {"block_steps": 4}),
        ("none", {"commit": "factor", "factor": 1.5}),
        ("none", {"remasking": "random", "seed": 4, "block_steps": 4}),
        ("polestar", {"confidence_threshold": 0.6}),
        ("polestar", {"cfg_scale": 0.5, "confidence_threshold": 0.9}),
    ],
)
def test_states_are_those_of_the_history(embedded: Runtime, policy: str, options: dict[str, Any]):
    # Sequences of this batch end in different blocks, and leave.
    runtime = embedded.with_policy(policy)
    out, frames = watched(runtime, **chats(), **options)
    assert out.history is not None
    assert [frame.forward for frame in frames] == list(range(-1, out.num_forwards))
    start = frames[0].answer[0]
    spans = [(frame.span[0] - start, frame.span[1] - start) for frame in frames[1:]]
    expected = states_by_history(out, runtime, 32, spans)
    assert len(expected) == out.num_forwards, "every forward of a masked model fixes something"
    length = frames[0].answer[1] - start
    for frame, rows, after in zip(frames[1:], expected, out.history[1:], strict=True):
        answers = slice(*frame.answer)
        assert frame.states[:, answers].tolist() == rows
        shown = np.isin(frame.states[:, answers], (TokenState.FRESH, TokenState.FIXED))
        assert np.array_equal(frame.tokens[:, answers][shown], after[:, -length:].numpy()[shown])
        # A sequence that waits or has left takes no step. In the next block nothing is cached of one that has ended.
        steps = frame.layers[:, slice(*frame.span)] > 0
        assert not steps[~frame.active].any() and steps[frame.active].all()
        left = ~frame.active & (frame.step == 0)
        assert not frame.column_states[left].any()
    ended = {number for frame in frames for number, active in enumerate(frame.active) if not active}
    assert ended, "no sequence has waited or left"
    last = frames[-1]
    assert last.forwards.tolist() == list(out.forwards)
    assert last.settled.sum() == out.timings.tokens
    assert last.tokens_per_forward == pytest.approx(out.tokens_per_forward.mean().item())
    assert Counter(frame.kind for frame in frames[1:]) == out.steps_by_kind


def test_before_the_first_forward_the_answer_is_noise(tiny: Runtime):
    _, frames = watched(tiny, **padded(7, 4), **SIZES)
    first = frames[0]
    assert (first.kind, first.forward, first.span) == ("", -1, (7, 15))
    pads, prompts = first.states[1, :3], first.states[0, :7]
    assert set(pads.tolist()) == {TokenState.PAD} and set(prompts.tolist()) == {TokenState.PROMPT}
    assert set(first.states[:, 7:].ravel().tolist()) == {TokenState.NOISE}
    assert not first.column_states.any() and first.tokens_per_forward == 0


def test_drafts_are_what_the_model_proposes(embedded: Runtime):
    class Drafts:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def put(self, value: Tensor) -> None: ...

        def put_draft(self, value: Tensor) -> None:
            self.seen.append(value.clone())

        def end(self) -> None: ...

    heard = Drafts()
    options = {**chats(), "temperature": 0.7, "seed": 1}
    embedded.generate(streamer=heard, **options)
    _, frames = watched(embedded, **options)
    drafts = 0
    for frame, draft in zip(frames[1:], heard.seen, strict=True):
        open_ = frame.states[:, slice(*frame.span)] == TokenState.DRAFT
        drafts += open_.sum()
        assert np.array_equal(frame.tokens[:, slice(*frame.span)][open_], draft.numpy()[open_])
    assert drafts


@pytest.mark.parametrize("correction", [0, 3])
def test_rewritten_tokens_are_told_from_written_ones(uniform: Runtime, correction: int):
    counts = {"block_steps": 6, "tokens_per_step": 4, "trailing_noise": 8, "correction_steps": correction, "seed": 5}
    options: dict[str, Any] = {**counts, "temperature": 2.0}
    out, frames = watched(uniform.with_policy("polestar"), **chats(), **options, stop_at_eos=False)
    assert out.history is not None
    first, last = frames[0].answer
    canvases = [frame.tokens[:, first:last] for frame in frames]
    # Forwards that change nothing leave no trace in a history.
    changes = [now for before, now in pairwise(canvases) if not np.array_equal(before, now)]
    history = [state[:, -(last - first) :].numpy() for state in out.history]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip([canvases[0], *changes], history, strict=True))
    written, rewrites = np.zeros(canvases[0].shape, dtype=bool), 0
    for before, frame in pairwise(frames):
        changed = before.tokens[:, first:last] != frame.tokens[:, first:last]
        states = frame.states[:, first:last]
        assert np.array_equal(states == TokenState.REVISED, changed & written)
        assert ((states == TokenState.FRESH) | ~changed | (changed & written)).all()
        rewrites += (changed & written).sum()
        written |= changed | (states == TokenState.FRESH) | (states == TokenState.FIXED)
        assert not ((states == TokenState.NOISE) & written).any()
        assert not frame.correcting or frame.settled.sum() > 0, "the first pass has written tokens, which count"
    assert rewrites and frames[-1].correcting == bool(correction)
    assert set(frames[-1].states[:, last:].ravel().tolist()) == {TokenState.NOISE}, "trailing noise stays"
    assert frames[-1].settled.sum() == out.timings.tokens


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        *((policy, {}) for policy in sorted(policies_for("canvas"))),
        ("dllm_cache", {"cfg_scale": 0.7}),
        ("polestar", {"cfg_scale": 0.7}),
    ],
)
def test_watching_changes_no_token_and_counts_what_is_recomputed(tiny: Runtime, policy: str, options: dict[str, Any]):
    runtime, call = tiny.with_policy(policy), {**padded(17, 17), **SIZES, "stop_at_eos": False, **options}
    if policy == "dkv_greedy":
        call |= {"remasking": "random", "seed": 6}
    alone = runtime.generate(output_history=True, **call)
    out, frames = watched(runtime, **call)
    assert alone.history is not None and out.history is not None
    assert torch.equal(torch.stack(alone.history), torch.stack(out.history))
    assert len(frames) == out.num_forwards + 1
    layers = tiny.model.shape.layers
    assert (frames[1].layers == layers).all(), "the first forward computes everything"
    for frame, rows in zip(frames[1:], out.rows_per_step, strict=True):
        assert np.array_equal(frame.column_states & ColumnState.RECOMPUTED != 0, frame.layers > 0)
        if policy == "dkv_greedy":  # some of its rows are filling
            assert frame.layers.sum() <= 2 * layers * rows
        elif not options:
            assert frame.layers.sum() == pytest.approx(2 * layers * rows)


@pytest.mark.parametrize("policy", ["none", "fast_dllm_dual", "polestar", "dkv_decode"])
def test_watching_changes_no_token_where_noise_is_uniform(uniform: Runtime, policy: str):
    options = {**chats(), "block_steps": 6, "tokens_per_step": 8, "correction_steps": 3, "seed": 2}
    runtime = uniform.with_policy(policy)
    alone = runtime.generate(**options)
    out, _ = watched(runtime, **options)
    assert torch.equal(alone.sequences, out.sequences) and alone.forwards == out.forwards


@pytest.mark.parametrize("options", [{}, {"cfg_scale": 0.7}, {"refresh": "drift"}, {"window": (1, 1)}])
def test_rows_are_stored_and_fetched_by_updates(tiny: Runtime, options: dict[str, Any]):
    own = {name: value for name, value in options.items() if name != "cfg_scale"}
    rest = {name: value for name, value in options.items() if name == "cfg_scale"}
    runtime = tiny.with_policy(variant(clusters=6, top_m=2, update_threshold=0, **own))
    out, frames = watched(runtime, **padded(*LENGTHS), **SIZES, **rest, stop_at_eos=False)
    for frame in frames[1:]:
        fetched, recomputed = (
            frame.column_states & state != 0 for state in (ColumnState.FETCHED, ColumnState.RECOMPUTED)
        )
        assert (recomputed | ~fetched).all() and (frame.kind == "update" or not fetched.any())
        # An update's own log counts its rows beside the active ones.
        updates = [update for update in out.updates if update.forward == frame.forward]
        assert bool(updates) == (frame.kind == "update")
        if updates and "refresh" not in own:
            beside = frame.layers.copy()
            beside[:, slice(*frame.span)] = 0
            rows = [sum(update.layers * update.rows[row] for update in updates) for row in range(len(LENGTHS))]
            assert beside.sum(axis=1).tolist() == rows
    assert any(frame.count(ColumnState.FETCHED) for frame in frames)
    stored = frames[-1].column_states & ColumnState.STORED != 0
    first, stop = frames[-1].span
    assert not stored[:, first:stop].any(), "the block's own rows are in no cluster"
    if "window" in own:
        assert stored[:, first - 8 : first].all() and not stored[:, : first - 8].any()
    elif "refresh" not in own:
        assert stored[0, :first].all() and not stored[1, : LENGTHS[0] - LENGTHS[1]].any()


def test_on_the_device_nothing_is_stored_or_fetched(tiny: Runtime):
    runtime = tiny.with_policy(variant("device", clusters=6, update_threshold=0))
    out, frames = watched(runtime, **padded(*LENGTHS), **SIZES)
    assert out.steps_by_kind["update"]
    assert not any(frame.count(ColumnState.STORED | ColumnState.FETCHED) for frame in frames)


def test_streamed_columns(tiny: Runtime):
    resident, frames = watched(tiny.with_policy("elastic_cache", hidden_tier="device"), **padded(*LENGTHS), **SIZES)
    assert not any(frame.count(ColumnState.STREAMED) for frame in frames)
    out, frames = watched(tiny.with_policy("elastic_cache"), **padded(*LENGTHS), **SIZES)
    assert torch.equal(out.sequences, resident.sequences)
    for frame in frames[1:]:
        assert np.array_equal(frame.column_states & ColumnState.STREAMED != 0, frame.states != TokenState.PAD)


@pytest.mark.parametrize("policy", ["none", "polestar", "elastic_cache"])
@pytest.mark.usefixtures("few_slots")
def test_bytes_are_the_ledgers(tiny: Runtime, policy: str):
    runtime = tiny.with_policy(policy, **({"clusters": 6, "update_threshold": 0} if policy == "polestar" else {}))
    frames: list[Frame] = []

    def show(frame: Frame) -> None:
        for tier in Tier:
            assert frame.accounts[tier] == runtime.ledger.accounts(tier)
            assert frame.tiers[tier].current == runtime.ledger.held(tier)
        moved = runtime.ledger.moved
        assert frame.moved_in_all == {lane: moved[way] for lane, way in ENDS.items() if way in moved}
        frames.append(frame)

    watcher = Watcher(runtime.ledger, show, fail, True)
    out = runtime.generate(streamer=watcher, inspector=watcher, **padded(*LENGTHS), **SIZES)
    assert not watcher.failed
    assert all(report.peak == out.memory.tiers[tier].peak for tier, report in frames[-1].tiers.items())
    if policy == "none":
        assert out.tiers is None and not any(frame.moved for frame in frames)
        return
    assert out.tiers is not None
    for lane in Lane:
        last = frames[-1].moved_in_all.get(lane, 0)
        assert sum(frame.moved.get(lane, 0) for frame in frames) == last <= out.tiers.ways[lane].nbytes
    assert frames[-1].moved_in_all[Lane.FETCH] > 0 < frames[-1].moved_in_all[Lane.STORE]


def test_streamed_weights_move():
    with tiered.from_pretrained("embedded", policy="none", memory="5MiB") as runtime:
        frames: list[Frame] = []
        watcher = Watcher(runtime.ledger, frames.append, fail, True)
        out = runtime.generate("sort: Nora Ben", max_new_tokens=4, streamer=watcher, inspector=watcher)
    assert out.tiers is None and out.weights is not None and not watcher.failed
    assert 0 < frames[-1].moved[Lane.FETCH] < frames[-1].moved_in_all[Lane.FETCH] <= out.weights.ways[Lane.FETCH].nbytes


def test_what_it_takes_is_booked(tiny: Runtime):
    options = {**padded(*LENGTHS), **SIZES, "cfg_scale": 0.5}
    alone = tiny.generate(**options).memory.tiers[Tier.DEVICE].peak
    out, frames = watched(tiny, **options)
    columns = frames[0].tokens.shape[1]
    assert out.memory.tiers[Tier.DEVICE].peak - alone == 2 * 12 * len(LENGTHS) * columns
    assert tiny.ledger.held(Tier.DEVICE) == out.memory.tiers[Tier.DEVICE].current


def test_the_views_own_time_is_left_out(tiny: Runtime):
    frames: list[Frame] = []

    def show(frame: Frame) -> None:
        frames.append(frame)
        time.sleep(0.05)

    watcher = Watcher(tiny.ledger, show, fail, True)
    out = tiny.generate(streamer=watcher, inspector=watcher, **padded(9), **SIZES)
    slept = 0.05 * len(frames)
    assert watcher.own_seconds >= slept and out.timings.total >= slept
    assert frames[-1].seconds <= out.timings.total - slept + 0.05
    assert sum(frame.forward_seconds for frame in frames) == pytest.approx(frames[-1].seconds)


@pytest.mark.parametrize("at", [-1, 5])
def test_an_error_ends_the_view_and_nothing_else(tiny: Runtime, at: int):
    runtime, options = tiny.with_policy("polestar"), {**padded(*LENGTHS), **SIZES}
    alone = runtime.generate(**options)
    shown: list[int] = []
    errors: list[Exception] = []

    def show(frame: Frame) -> None:
        if frame.forward == at:
            raise RuntimeError("no picture")
        shown.append(frame.forward)

    def give_up(error: Exception) -> None:
        errors.append(error)
        raise BrokenPipeError("nowhere to say it")

    watcher = Watcher(runtime.ledger, show, give_up, True)
    out = runtime.generate(streamer=watcher, inspector=watcher, **options)
    assert torch.equal(out.sequences, alone.sequences) and watcher.failed
    assert shown == list(range(-1, at)) and [str(error) for error in errors] == ["no picture"]


def test_ctrl_c_is_no_error_of_the_view(tiny: Runtime):
    def show(frame: Frame) -> None:
        raise KeyboardInterrupt

    watcher = Watcher(tiny.ledger, show, fail, True)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(streamer=watcher, inspector=watcher, **padded(9), **SIZES)
    assert set(tiny.ledger.accounts(Tier.DEVICE)) <= {Account.WEIGHTS}
