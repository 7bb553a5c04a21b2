"""Frames of a call against its own history, stores, fetches and books; and that watching changes no token."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from polestar_variants import variant
from torch import Tensor

import tiered
from tiered.core.features import Account, ColumnState, Feature, Tier
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.streamed_store import StreamedFeatureStore
from tiered.observe.watch.frame import Frame, State
from tiered.observe.watch.watcher import Watcher
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.policies.polestar import update as hidden_update
from tiered.policies.polestar.hidden_records import Tickets
from tiered.policies.polestar.layer_state import LayerState
from tiered.policies.polestar.members import RowLayout
from tiered.policies.registry import POLICIES, policies_for
from tiered.runtime import Runtime

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


def padded(*lengths: int) -> dict[str, Tensor]:
    """Prompts of these lengths as one left-padded batch."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), 499), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        prompt = torch.randint(0, 480, (length,), generator=torch.Generator().manual_seed(length))
        ids[row, longest - length :], mask[row, longest - length :] = prompt, 1
    return {"inputs": ids, "attention_mask": mask}


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
) -> list[list[list[State]]]:
    """What a masked answer's tokens were after each forward, from nothing but the tokens after each forward."""
    assert out.history is not None
    mask, eos = runtime.model.mask_token_id, runtime.model.eos_token_id
    found = []
    for before, after, (first, stop) in zip(out.history, out.history[1:], spans, strict=False):
        rows = []
        for was, now in zip(before[:, -length:].tolist(), after[:, -length:].tolist(), strict=True):
            row, ended = [], False
            for column, token in enumerate(now):
                if ended:
                    row.append(State.END)
                elif token == mask:
                    row.append(State.DRAFT if first <= column < stop else State.NOISE)
                else:
                    row.append(State.FRESH if was[column] == mask else State.FIXED)
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
        shown = np.isin(frame.states[:, answers], (State.FRESH, State.FIXED))
        assert np.array_equal(frame.tokens[:, answers][shown], after[:, -length:].numpy()[shown])
        # Who waits or has left takes no step; and in the next block no cache is left of who has ended.
        here = np.array(frame.active)
        steps = frame.layers[:, slice(*frame.span)] > 0
        assert not steps[~here].any() and steps[here].all()
        left = ~here & (frame.step == 0)
        assert not frame.column_states[left].any()
    ended = {number for frame in frames for number, active in enumerate(frame.active) if not active}
    assert ended, "no sequence has waited or left"
    last = frames[-1]
    assert last.forwards == tuple(out.forwards)
    assert sum(last.settled) == out.timings.tokens
    assert last.tokens_per_forward == pytest.approx(out.tokens_per_forward.mean().item())
    assert Counter(frame.kind for frame in frames[1:]) == out.passes


def test_before_the_first_forward_the_answer_is_noise(tiny: Runtime):
    _, frames = watched(tiny, **padded(7, 4), **SIZES)
    first = frames[0]
    assert (first.kind, first.forward, first.span) == ("", -1, (7, 15))
    pads, prompts = first.states[1, :3], first.states[0, :7]
    assert set(pads.tolist()) == {State.PAD} and set(prompts.tolist()) == {State.PROMPT}
    assert set(first.states[:, 7:].ravel().tolist()) == {State.NOISE}
    assert not first.column_states.any() and first.tokens_per_forward == first.tokens_per_second == 0.0


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
        open_ = frame.states[:, slice(*frame.span)] == State.DRAFT
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
    written = np.zeros(canvases[0].shape, dtype=bool)
    edits = np.zeros(canvases[0].shape, dtype=int)
    rewrites, again = 0, False
    for before, frame in pairwise(frames):
        changed = before.tokens[:, first:last] != frame.tokens[:, first:last]
        states = frame.states[:, first:last]
        rewritten = changed & written
        assert np.array_equal(states == State.REVISED, rewritten)
        assert ((states == State.FRESH) | ~changed | rewritten).all()
        edits += changed
        assert np.array_equal(frame.edits[:, first:last], edits)
        written |= changed
        written |= (states == State.FRESH) | (states == State.FIXED)
        noise = states == State.NOISE
        assert not (noise & written).any()
        rewrites += rewritten.sum()
        again |= frame.forward > 0 and frame.block == frame.step == 0
        assert frame.correcting == again
        assert sum(frame.settled) > 0 or not again, "what the first go has written counts"
    assert rewrites
    assert frames[-1].correcting == bool(correction)
    assert set(frames[-1].states[:, last:].ravel().tolist()) == {State.NOISE}, "trailing noise stays"
    assert sum(frames[-1].settled) == out.timings.tokens


def options_of(policy: str) -> dict[str, Any]:
    """Options of a call that make a policy do what it does, on a small model."""
    more = {
        "dkv_greedy": {"remasking": "random", "seed": 6},
        "elastic_cache": {"similarity_threshold": 0.999, "window": 8},
    }
    own = {
        "polestar": {"clusters": 6, "top_m": 2, "update_threshold": 0, "cluster_layers": 1},
        "dllm_cache": {"prompt_interval": 5, "response_interval": 3},
        "composed": {"prompt_interval": 4},
    }
    return {**more.get(policy, {}), **own.get(policy, {})}


def call(runtime: Runtime, policy: str) -> tuple[Runtime, dict[str, Any]]:
    """A runtime under `policy`, and options of `generate`."""
    given = options_of(policy)
    names = set(POLICIES[policy].__dataclass_fields__)
    own = {name: value for name, value in given.items() if name in names}
    rest = {name: value for name, value in given.items() if name not in names}
    return runtime.with_policy(policy, **own), {
        **padded(*LENGTHS),
        **SIZES,
        "stop_at_eos": False,
        "confidence_threshold": 0.3,
        **rest,
    }


def without_threshold(options: dict[str, Any]) -> dict[str, Any]:
    """Random remasking ranks by lot, not by confidence."""
    if options.get("remasking") == "random":
        options.pop("confidence_threshold")
    return options


@pytest.mark.parametrize(
    ("policy", "guidance"),
    [
        *((policy, 0.0) for policy in sorted(policies_for("canvas"))),
        ("none", 0.7),
        ("dllm_cache", 0.7),
        ("polestar", 0.7),
    ],
)
def test_watching_changes_no_token_and_counts_what_is_recomputed(
    tiny: Runtime, policy: str, guidance: float, monkeypatch: pytest.MonkeyPatch
):
    runtime, options = call(tiny, policy)
    options = {**without_threshold(options), "cfg_scale": guidance}
    alone = runtime.generate(output_history=True, **options)
    # What goes to the store as keys, by layer, of the canvases that see their prompts.
    written: list[Counter[tuple[int, int]]] = []
    write, logits = FeatureStore.write, Forward.logits

    def spied(self: FeatureStore, feature: Feature, layer: int, rows: Rows, values: Tensor) -> None:
        if feature is Feature.KEY:
            columns = rows.positions(len(values), values.device)
            valid = torch.ones_like(columns, dtype=torch.bool) if rows.valid is None else rows.valid
            for sequence, (row, good) in enumerate(zip(columns.tolist(), valid.tolist(), strict=True)):
                written[-1].update((sequence, column) for column, one in zip(row, good, strict=True) if one)
        write(self, feature, layer, rows, values)

    def began(self: Forward, *args: Any, **kwargs: Any) -> Tensor:
        written.append(Counter())
        return logits(self, *args, **kwargs)

    monkeypatch.setattr(FeatureStore, "write", spied)
    monkeypatch.setattr(Forward, "logits", began)
    out, frames = watched(runtime, **options)
    assert alone.history is not None and out.history is not None
    assert torch.equal(torch.stack(alone.history), torch.stack(out.history))
    assert len(frames) == out.num_forwards + 1
    pads = [max(LENGTHS) - length for length in LENGTHS]
    partly = 0
    for frame, counts in zip(frames[1:], written, strict=True):
        expected = np.zeros_like(frame.layers)
        for (sequence, column), layers in counts.items():
            # The batch is whole: nobody ends before the last block does.
            if sequence < frame.batch and column >= pads[sequence]:
                expected[sequence, column] = layers
        assert np.array_equal(frame.layers, expected)
        assert np.array_equal(frame.column_states & ColumnState.RECOMPUTED != 0, expected > 0)
        partly += not expected[:, max(LENGTHS) :].all()
    assert partly or policy in ("none", "fast_dllm_prefix", "dkv_prefill", "dllm_cache")
    assert frames[1].layers[0].tolist() == [tiny.model.shape.layers] * frames[0].tokens.shape[1]


@pytest.mark.parametrize("policy", ["none", "fast_dllm_dual", "polestar", "dkv_decode", "composed"])
def test_watching_changes_no_token_where_noise_is_uniform(uniform: Runtime, policy: str):
    options = {**chats(), "block_steps": 6, "tokens_per_step": 8, "correction_steps": 3, "seed": 2}
    runtime = uniform.with_policy(policy)
    alone = runtime.generate(**options)
    out, _ = watched(runtime, **options)
    assert torch.equal(alone.sequences, out.sequences) and alone.forwards == out.forwards


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[tuple[int, int, set[int], set[int]]]]]:
    """By forward: layer, sequence, members of clusters that were asked for and used, and rows handed up to there."""
    seen: dict[int, list[tuple[int, int, set[int], set[int]]]] = defaultdict(list)
    number = [-1]
    gather, logits = hidden_update.gather_rows, Forward.logits

    def spied(
        forward: Forward, state: LayerState, known: Any, layout: RowLayout, fetching: Any, tickets: Tickets, out: Tensor
    ) -> Rows:
        columns, wide = layout.columns.ravel(), layout.columns.shape[1]
        for sequence, cluster in chain(*tickets):
            members = columns[layout.rows[sequence, cluster]]
            above = columns[layout.to[0][layout.to[0] // wide == sequence]]
            seen[number[0]].append((state.layer, sequence, {*members[members >= 0].tolist()}, {*above.tolist()}))
        return gather(forward, state, known, layout, fetching, tickets, out)

    def began(self: Forward, *args: Any, **kwargs: Any) -> Tensor:
        number[0] += 1
        return logits(self, *args, **kwargs)

    monkeypatch.setattr(hidden_update, "gather_rows", spied)
    monkeypatch.setattr(Forward, "logits", began)
    yield seen


@pytest.mark.parametrize(
    "options",
    [
        {"cluster_layers": 1},
        {"cluster_layers": 4, "confidence_threshold": 0.3},
        {"cluster_layers": 2, "refresh": "drift", "confidence_threshold": 0.3},
        {"cluster_layers": 1, "cfg_scale": 0.7},
        {"cluster_layers": 1, "window": (1, 1)},
    ],
)
def test_column_states_are_where_the_rows_were(
    tiny: Runtime, options: dict[str, Any], fetches: dict[int, list[tuple[int, int, set[int], set[int]]]]
):
    names = {*POLICIES["polestar"].__dataclass_fields__, "window"}
    own = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    runtime = tiny.with_policy(variant(clusters=6, top_m=2, update_threshold=0, codec="raw", **own))
    # Were a sequence to leave, its number would be another's.
    out, frames = watched(runtime, **padded(*LENGTHS), **SIZES, **rest, stop_at_eos=False)
    batch, outside = len(LENGTHS), 0
    for frame in frames[1:]:
        expected = np.zeros(frame.column_states.shape, dtype=bool)
        for _, sequence, members, handed in fetches[frame.forward]:
            if sequence < batch:  # the canvases that see their prompts
                expected[sequence, list(members - handed)] = True
        assert np.array_equal(frame.column_states & ColumnState.FETCHED != 0, expected)
        fetched, recomputed = (
            frame.column_states & place != 0 for place in (ColumnState.FETCHED, ColumnState.RECOMPUTED)
        )
        assert (recomputed | ~fetched).all()
        outside += fetched[:, : frame.span[0]].sum()
        # Rows of an update beside the active ones, as its own log counts them: their keys are written one layer up.
        updates = [update for update in out.updates if update.forward == frame.forward]
        assert bool(updates) == (frame.kind == "update")
        if updates and own.get("refresh") != "drift":
            beside = frame.layers.copy()
            beside[:, slice(*frame.span)] = 0
            rows = [sum(update.layers * update.rows[row] for update in updates) for row in range(batch)]
            assert beside.sum(axis=1).tolist() == rows
    assert outside
    stored = frames[-1].column_states & ColumnState.STORED != 0
    first, stop = frames[-1].span
    assert not stored[:, first:stop].any(), "the block's own rows are in no cluster"
    if "window" in options:
        assert stored[:, first - 8 : first].all() and not stored[:, : first - 8].any()
    elif own.get("refresh") != "drift":
        assert stored[0, :first].all() and not stored[1, : LENGTHS[0] - LENGTHS[1]].any()


def test_on_the_device_nothing_is_stored_or_fetched(tiny: Runtime):
    runtime = tiny.with_policy(variant("device", clusters=6, update_threshold=0))
    out, frames = watched(runtime, **padded(*LENGTHS), **SIZES)
    assert out.passes["update"]
    assert not any(frame.count_columns(ColumnState.STORED | ColumnState.FETCHED) for frame in frames)


def test_streamed_columns(tiny: Runtime, monkeypatch: pytest.MonkeyPatch):
    resident, _ = watched(tiny.with_policy("elastic_cache", hidden_tier="device"), **padded(*LENGTHS), **SIZES)
    streams: list[StreamedFeatureStore] = []
    init = StreamedFeatureStore.__init__

    def spied(self: StreamedFeatureStore, *args: Any, **kwargs: Any) -> None:
        streams.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(StreamedFeatureStore, "__init__", spied)
    out, frames = watched(tiny.with_policy("elastic_cache"), **padded(*LENGTHS), **SIZES)
    assert streams and torch.equal(out.sequences, resident.sequences)
    pads = frames[0].states == State.PAD
    assert pads.any()
    for frame in frames[1:]:
        assert np.array_equal(frame.column_states & ColumnState.STREAMED != 0, ~pads)


@pytest.mark.parametrize("policy", ["none", "polestar", "elastic_cache"])
def test_bytes_are_the_ledgers(tiny: Runtime, policy: str):
    runtime, options = call(tiny, policy)
    frames: list[Frame] = []
    checked: list[Tier] = []

    def show(frame: Frame) -> None:
        for tier in frame.tiers:
            held = {account: runtime.ledger.held(tier.tier, account) for account in Account}
            assert dict(tier.accounts) == {account: size for account, size in held.items() if size}
            assert tier.held == runtime.ledger.held(tier.tier) and tier.cap == runtime.ledger.budget.cap(tier.tier)
            checked.append(tier.tier)
        frames.append(frame)

    watcher = Watcher(runtime.ledger, show, fail)
    out = runtime.generate(streamer=watcher, inspector=watcher, **options)
    assert not watcher.failed and set(checked) == set(Tier)
    for tier in frames[-1].tiers:
        assert tier.peak == out.memory.tiers[tier.tier].peak
    if policy == "none":
        assert out.tiers is None and not any(frame.copies for frame in frames)
        return
    assert out.tiers is not None
    for way in Lane:
        told = [frame.copies[way] for frame in frames]
        assert sum(copied.nbytes for copied in told) == told[-1].total <= out.tiers.ways[way].nbytes
        assert sum(copied.busy_ns for copied in told) <= out.tiers.ways[way].busy_ns
    assert frames[-1].copies[Lane.FETCH].total > 0 < frames[-1].copies[Lane.STORE].total


def test_what_it_takes_is_booked(tiny: Runtime):
    options = {**padded(*LENGTHS), **SIZES, "cfg_scale": 0.5}
    alone = tiny.generate(**options).memory.tiers[Tier.DEVICE].peak
    out, frames = watched(tiny, **options)
    columns = frames[0].tokens.shape[1]
    assert out.memory.tiers[Tier.DEVICE].peak - alone == 2 * 2 * 2 * len(LENGTHS) * columns
    assert tiny.ledger.held(Tier.DEVICE) == out.memory.tiers[Tier.DEVICE].current


def test_the_views_own_time_is_left_out(tiny: Runtime):
    import time

    frames: list[Frame] = []

    def show(frame: Frame) -> None:
        frames.append(frame)
        time.sleep(0.05)

    watcher = Watcher(tiny.ledger, show, fail)
    out = tiny.generate(streamer=watcher, inspector=watcher, **padded(9), **SIZES)
    slept = 0.05 * len(frames)
    assert watcher.own_seconds >= slept and out.timings.total >= slept
    assert frames[-1].seconds <= out.timings.total - slept + 0.05
    assert sum(frame.forward_seconds for frame in frames) == pytest.approx(frames[-1].seconds)


@pytest.mark.parametrize("at", [-1, 5])
def test_an_error_ends_the_view_and_nothing_else(tiny: Runtime, at: int):
    runtime, options = call(tiny, "polestar")
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

    watcher = Watcher(runtime.ledger, show, give_up)
    out = runtime.generate(streamer=watcher, inspector=watcher, **options)
    assert torch.equal(out.sequences, alone.sequences) and watcher.failed
    assert shown == list(range(-1, at)) and [str(error) for error in errors] == ["no picture"]


def test_ctrl_c_is_no_error_of_the_view(tiny: Runtime):
    def show(frame: Frame) -> None:
        raise KeyboardInterrupt

    watcher = Watcher(tiny.ledger, show, fail)
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(streamer=watcher, inspector=watcher, **padded(9), **SIZES)
    assert set(tiny.ledger.accounts(Tier.DEVICE)) <= {Account.WEIGHTS}
