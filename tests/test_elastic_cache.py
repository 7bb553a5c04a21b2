"""Elastic-Cache against the paper's algorithm written out with full attention maps; a batch changes no sequence."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_names import official
from torch import Tensor

import tiered
from tiered.core.canvas import PENDING, PROMPT, Canvas
from tiered.core.features import Feature
from tiered.decoding.observers import Inspector
from tiered.forward.attention_received import SummedChunk, attention_received
from tiered.forward.attention_weights import attention_exponentials, attention_weights
from tiered.models.llada import LLaDA
from tiered.offload.lane import Lane
from tiered.policies.base import Step
from tiered.policies.elastic_cache.program import ElasticStep, Storing, similarity
from tiered.policies.elastic_cache.rows import NONE, Tracked, Widening, step_rows
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
KEPT = (Feature.KEY, Feature.VALUE, Feature.HIDDEN)
LENGTHS = (17, 9, 12)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", policy="none", dtype="float32")


def prompt(length: int) -> Tensor:
    return torch.randint(0, 480, (length,), generator=torch.Generator().manual_seed(length))


@dataclass
class Copy:
    """One canvas in the oracle, with what it caches in every layer for all columns."""

    inputs: list[Tensor]
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    maps: list[Tensor]  # attention of the last forward [heads, length, length]


@dataclass
class Oracle:
    """The algorithm of arXiv 2510.14973 for one sequence, from the weights, with no row ever left out of a map.

    `guidance` above 0 runs a second canvas whose prompt is masked; the first decides for both.
    """

    model: LLaDA
    window: int = 16
    threshold: float = 0.9
    tracked: int = 1
    interval: int | None = None
    guidance: float = 0.0
    history: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)  # recomputed in every layer of every forward
    caches: list[tuple[list[Tensor], ...]] = field(default_factory=list)  # keys, values, inputs behind each forward

    def run(self, ids: Tensor, new_tokens: int, block: int, confidence: float) -> list[list[int]]:
        model, start = self.model, len(ids)
        tokens = torch.cat([ids, ids.new_full((new_tokens,), model.mask_token_id)])
        committed = torch.arange(len(tokens)) < start
        recent: list[int] = []
        chosen: list[list[int]] = [[] for _ in model.blocks]
        copies = [Copy([], [], [], [], []) for _ in range(2 if self.guidance else 1)]
        self.history = [tokens.tolist()]
        number = 0
        for stop in range(start + block, start + new_tokens + 1, block):
            while not committed[:stop].all():
                masked = (~committed).nonzero()[:, 0].tolist()[: self.window]
                full = number % self.interval == 0 if self.interval else number == 0
                some = sorted({*masked, *recent, *(column for layer in chosen for column in layer)})
                logits = self._forward(copies, tokens, committed, start, full, some, masked, chosen)
                logits[:, model.mask_token_id] = -torch.inf
                inside = [column for column in masked if column < stop]
                best, token = logits[inside].double().softmax(-1).max(-1)
                sure = best >= min(confidence, float(best.max()))
                recent = [column for column, is_sure in zip(inside, sure.tolist(), strict=True) if is_sure]
                tokens[recent], committed[recent] = token[sure], True
                self.history.append(tokens.tolist())
                number += 1
        return self.history

    def _forward(
        self,
        copies: list[Copy],
        tokens: Tensor,
        committed: Tensor,
        start: int,
        full: bool,
        some: list[int],
        masked: list[int],
        chosen: list[list[int]],
    ) -> Tensor:
        everything = list(range(len(tokens)))
        rows = everything if full else some
        ids = [tokens, tokens.clone()][: len(copies)]
        ids[-1][: start if self.guidance else 0] = self.model.mask_token_id
        hidden = [self.model.wte.weight[of_copy][rows] for of_copy in ids]
        counts = []
        for number, block in enumerate(self.model.blocks):
            counts.append(len(rows))
            past = [copy.maps[number] if len(copy.maps) > number else None for copy in copies]
            for copy, entering in zip(copies, hidden, strict=True):
                self._attend(copy, number, block, rows, entering, len(tokens))
            hidden = [self._leave(copy, number, block, rows) for copy in copies]
            if number == len(self.model.blocks) - 1:
                break
            now = copies[0].maps[number]
            trigger = False
            if len(rows) < len(tokens) and chosen[number]:
                before = past[0]
                assert before is not None
                alike = [F.cosine_similarity(before[:, k], now[:, k], dim=-1).mean() for k in chosen[number]]
                trigger = bool(sum(alike) / len(alike) < self.threshold)
            mass = now[:, masked].sum(dim=(0, 1))
            mass[~committed] = -1
            chosen[number] = mass.argsort(descending=True)[: min(self.tracked, int(committed.sum()))].tolist()
            for copy, leaving in zip(copies, hidden, strict=True):
                if len(copy.inputs) == number + 1:
                    copy.inputs.append(leaving.clone())
                copy.inputs[number + 1][rows] = leaving
            if trigger:
                rows = everything
                hidden = [copy.inputs[number + 1].clone() for copy in copies]
        self.rows.append(counts)
        self.caches.append(
            tuple([of.clone() for of in kept] for kept in (copies[0].keys, copies[0].values, copies[0].inputs))
        )
        last = [self._norm(leaving, self.model.ln_f.weight) @ self.model.ff_out.weight.T for leaving in hidden]
        logits = torch.full((len(tokens), last[0].shape[-1]), torch.nan)
        logits[rows] = last[0] if not self.guidance else last[1] + (self.guidance + 1) * (last[0] - last[1])
        return logits

    def _attend(self, copy: Copy, number: int, block: Any, rows: list[int], entering: Tensor, length: int) -> None:
        shape = self.model.shape
        if len(copy.queries) == number:  # the first forward: all rows
            copy.queries.append(torch.empty(shape.heads, length, shape.head_dim))
            copy.keys.append(torch.empty(shape.kv_heads, length, shape.head_dim))
            copy.values.append(torch.empty(shape.kv_heads, length, shape.head_dim))
            copy.maps.append(torch.empty(0))
        if number == 0:
            copy.inputs[:1] = [torch.zeros(length, shape.width)]
        copy.inputs[number][rows] = entering
        normed = self._norm(entering, block.attn_norm.weight)
        angles = torch.tensor(rows)[:, None] / 5e5 ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        turn = (angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))
        for kept, weight, turned in (
            (copy.queries, block.q_proj.weight, True),
            (copy.keys, block.k_proj.weight, True),
            (copy.values, block.v_proj.weight, False),
        ):
            heads = (normed @ weight.T).view(len(rows), -1, shape.head_dim).transpose(0, 1)
            half = shape.head_dim // 2
            swapped = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
            kept[number][:, rows] = heads * turn[0] + swapped * turn[1] if turned else heads
        keys = copy.keys[number].repeat_interleave(shape.heads // shape.kv_heads, dim=0)
        copy.maps[number] = (copy.queries[number] @ keys.transpose(1, 2) / shape.head_dim**0.5).softmax(-1)

    def _leave(self, copy: Copy, number: int, block: Any, rows: list[int]) -> Tensor:
        shape = self.model.shape
        values = copy.values[number].repeat_interleave(shape.heads // shape.kv_heads, dim=0)
        mixed = (copy.maps[number] @ values).transpose(0, 1).flatten(1)[rows]
        hidden = copy.inputs[number][rows] + mixed @ block.attn_out.weight.T
        normed = self._norm(hidden, block.ff_norm.weight)
        return (
            hidden
            + (F.silu(normed @ block.ff_proj.weight.T) * (normed @ block.up_proj.weight.T)) @ block.ff_out.weight.T
        )

    @staticmethod
    def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


class Stores(Inspector):
    """Copies what a forward left in the store, by feature and layer."""

    def __init__(self) -> None:
        self.seen: list[dict[tuple[Feature, int], Tensor]] = []
        self.active: list[list[bool]] = []

    def after_forward(self, step: Any, kind: Any, ids: Any, forward: Any, active: Tensor) -> None:
        layers = forward.model.shape.layers
        kept = [(feature, layer) for feature in KEPT for layer in range(feature is Feature.HIDDEN, layers)]
        self.seen.append({(feature, layer): forward.store.view(feature, layer).clone() for feature, layer in kept})
        self.active.append(active.tolist())


# Options of the oracle, sizes of the call, and how many layers some forward has left as they were.
ORACLE: dict[str, tuple[dict[str, Any], dict[str, Any], set[int]]] = {
    "never": ({"threshold": -1.0}, {}, {0, 4}),
    "always": ({"threshold": 2.0}, {}, {0, 1}),
    "at times": ({"threshold": 0.98}, {}, {0, 1, 2, 3, 4}),
    "several tracked": ({"threshold": 0.99, "tracked": 3}, {}, {0, 1, 2, 3, 4}),
    "more tracked than committed": ({"threshold": 0.98, "tracked": 20}, {}, {0, 1, 2}),
    "narrow window": ({"threshold": 0.98, "window": 3}, {}, {0, 1, 2, 3, 4}),
    "one block, as in the paper": ({"threshold": 0.98, "window": 5}, {"block": 24}, {0, 1, 2, 3, 4}),
    "several a step": ({"threshold": 0.9, "window": 6}, {"block": 24, "confidence": 0.5}, {0, 1, 2, 3, 4}),
    "refreshed": ({"threshold": 0.98, "interval": 4, "window": 4}, {}, {0, 1, 2, 4}),
    "guided": ({"threshold": 0.95, "guidance": 0.7, "window": 6}, {"confidence": 0.3}, {0, 1, 2}),
}


@pytest.mark.parametrize("case", ORACLE)
def test_tokens_and_caches_are_those_of_the_paper(runtime: Runtime, case: str):
    options, sizes, left = ORACLE[case]
    ids, block, confidence = prompt(17), sizes.get("block", 8), sizes.get("confidence")
    assert isinstance(runtime.model, LLaDA)
    oracle = Oracle(runtime.model, **options)
    oracle.run(ids, 24, block, 2.0 if confidence is None else confidence)
    assert {sum(rows < 41 for rows in forward) for forward in oracle.rows} == left  # else the case shows nothing
    names = {"threshold": "similarity_threshold", "interval": "refresh_interval"}
    policy = {names.get(name, name): value for name, value in options.items() if name != "guidance"}
    stores = Stores()
    out = runtime.with_policy("elastic_cache", **policy).generate(
        ids[None], max_new_tokens=24, block_length=block, confidence_threshold=confidence, stop_at_eos=False,
        cfg_scale=options.get("guidance", 0.0), output_history=True, inspector=stores,
    )  # fmt: skip
    assert out.history is not None
    assert [state[0].tolist() for state in out.history] == oracle.history
    assert out.rows_per_step == [sum(forward) / 4 for forward in oracle.rows]
    for seen, expected in zip(stores.seen, oracle.caches, strict=True):
        for (feature, layer), stored in seen.items():
            kept = expected[KEPT.index(feature)][layer]
            torch.testing.assert_close(stored[0], kept.view_as(stored[0]), atol=1e-4, rtol=1e-4)


def test_above_a_first_layer_that_mixes_no_rows_widening_always_equals_none(runtime: Runtime):
    # Then stored rows of its output are exact, and all other rows that are read are recomputed.
    model = tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32").model
    official(model, "model.transformer.blocks.0.attn_out.weight").zero_()
    unmixed = Runtime(model, policy=make_policy("none"))
    options: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "stop_at_eos": False, "output_history": True}
    for threshold, equal in ((2.0, True), (-1.0, False)):
        policy = unmixed.with_policy("elastic_cache", similarity_threshold=threshold)
        exact, elastic = (r.generate(prompt(17)[None], **options).history for r in (unmixed, policy))
        assert exact is not None and elastic is not None
        assert torch.equal(torch.stack(exact), torch.stack(elastic)) is equal


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, tuple[bool, ...]]]]:
    """Layers that passes widened for, and in which sequences of the batch."""
    made: list[tuple[int, tuple[bool, ...]]] = []
    widened = Widening.widened

    def noted(self: Widening, forward: Any, layer: int, flow: Any, moved: Tensor, others: int):
        made.append((layer, tuple(moved.tolist())))
        return widened(self, forward, layer, flow, moved, others)

    monkeypatch.setattr(Widening, "widened", noted)
    yield made


@pytest.mark.parametrize(
    "options",
    [
        {"confidence_threshold": 0.3},
        {"confidence_threshold": 0.3, "hidden_tier": "device"},
        {"confidence_threshold": 0.3, "cfg_scale": 0.5},
        {"confidence_threshold": 0.3, "refresh_interval": 3},
        {"confidence_threshold": 0.3, "tracked": 3, "hidden_tier": "device"},
        {"confidence_threshold": 0.3, "stop_at_eos": True},
        {"steps": 12, "window": 3},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_sequences_that_widen_at_different_layers_are_as_alone(
    runtime: Runtime, options: dict[str, Any], moves: list, monkeypatch: pytest.MonkeyPatch
):
    policy = {"similarity_threshold": 0.97, "window": 6, **options}
    generation = {
        name: policy.pop(name)
        for name in ("confidence_threshold", "cfg_scale", "stop_at_eos", "steps")
        if name in policy
    }
    generation = {"max_new_tokens": 24, "block_length": 8, "stop_at_eos": False, **generation}
    elastic = runtime.with_policy("elastic_cache", **policy)
    if generation["stop_at_eos"]:  # a token that comes early in some answers is their end
        first = elastic.generate(prompt(9)[None], **{**generation, "stop_at_eos": False}).sequences
        monkeypatch.setattr(runtime.model, "eos_token_id", int(first[0, 12]))
    alone, single_stores = [], []
    for length in LENGTHS:
        single_stores.append(Stores())
        alone.append(elastic.generate(prompt(length)[None], inspector=single_stores[-1], **generation))
    moves.clear()
    ids, mask = torch.full((3, 17), 499), torch.zeros(3, 17, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, 17 - length :], mask[row, 17 - length :] = prompt(length), 1
    stores = Stores()
    out = elastic.generate(ids, attention_mask=mask, inspector=stores, **generation)
    for row, one in enumerate(alone):
        assert torch.equal(out.sequences[row, 17:], one.sequences[0, LENGTHS[row] :])
    assert out.forwards == [one.num_forwards for one in alone]
    assert any(not all(moved) for _, moved in moves)  # some widen while others do not
    if generation["stop_at_eos"]:
        assert len(set(out.forwards)) > 1 and min(map(len, stores.active)) < 3
        return
    clocks = [0, 0, 0]
    for seen, active in zip(stores.seen, stores.active, strict=True):
        for row, length in enumerate(LENGTHS):
            expected = single_stores[row].seen[max(0, clocks[row] + active[row] - 1)]
            clocks[row] += active[row]
            for key, stored in seen.items():
                torch.testing.assert_close(stored[row, :, 17 - length :], expected[key][0], atol=2e-4, rtol=1e-4)


def test_a_layer_reads_from_the_device_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    reads: list[int] = []
    call = ElasticStep.__call__

    def counted(self: ElasticStep, forward: Any, layer: int, flow: Any):
        made: list[str] = []
        with monkeypatch.context() as patched:
            for name in ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
                original = getattr(Tensor, name)
                patched.setattr(
                    Tensor, name, lambda *a, _name=name, _call=original, **o: made.append(_name) or _call(*a, **o)
                )
            result = call(self, forward, layer, flow)
        reads.append(len(made))
        return result

    monkeypatch.setattr(ElasticStep, "__call__", counted)
    runtime.with_policy("elastic_cache", similarity_threshold=0.98, hidden_tier="device").generate(
        prompt(17)[None], max_new_tokens=8, block_length=8, stop_at_eos=False
    )
    # None in the first forward, where all rows pass; one in the layers of a later one, until all rows pass.
    assert reads[:4] == [0] * 4
    later = [reads[first : first + 4] for first in range(4, len(reads), 4)]
    assert set(map(tuple, later)) >= {(1, 0, 0, 0), (1, 1, 0, 0)}
    assert all(sorted(forward, reverse=True) == forward and max(forward) == 1 and not forward[3] for forward in later)


def step_of(committed: list[list[int]], *, prompt_length: int, start: int, stop: int, **options: Any) -> Step:
    """A step of sequences whose columns were committed in these forwards."""
    at = torch.tensor(committed, dtype=torch.int32)
    canvas = Canvas(
        torch.zeros(len(at), prompt_length, dtype=torch.long),
        options.pop("pads", torch.zeros(len(at), dtype=torch.long)),
        max_new_tokens=at.shape[1] - prompt_length,
        block_length=stop - start,
        mask_token_id=99,
    )
    canvas.committed_at = at
    shift = options.pop("shift", 0)
    return Step(
        canvas=canvas, block=0, start=start, stop=stop, number=1, first_row=start - shift, last_row=stop - shift,
        active=options.pop("active", (True,) * len(at)), **options,
    )  # fmt: skip


def chosen(rows: Any, part: slice) -> list[list[int]]:
    """Columns of the valid rows of each sequence."""
    return [index[valid].tolist() for index, valid in zip(rows.index[:, part], rows.valid[:, part], strict=True)]


P, M = PROMPT, PENDING


def test_rows_of_a_step(runtime: Runtime):
    # Forward 2 was the last of both: the first sequence committed column 4 in it, the second, which waited, nothing.
    at = [[P, P, 0, M, 2, M, M, M], [P, P, 1, 0, 0, M, M, M]]
    tracked = Tracked(2)
    tracked.begin(runtime.model.shape, 2, 8, torch.empty(0))
    columns, both = torch.tensor([[0, 4], [2, NONE]]), torch.tensor([True, True])
    tracked.put(0, columns, torch.zeros(2, 4, 2, 32), both[:, None])
    tracked.put(1, columns + 1, torch.zeros(2, 4, 2, 32), both[:, None])
    tracked.put(2, columns, torch.zeros(2, 4, 2, 32), both[:, None])
    step = step_of(at, prompt_length=2, start=2, stop=6, forwards=(3, 3))
    rows = step_rows(step, 3, tracked, (False, False))
    assert chosen(rows.rows, rows.output) == [[3, 5], [5]]
    assert chosen(rows.rows, slice(2, rows.near)) == [[4, 6], [6, 7]]
    assert chosen(rows.rows, slice(rows.near, rows.count)) == [[0, 1], [0, 2, 3]]
    # Pieces that a store writes: the window at once, each tracked token by itself.
    pieces = Storing(rows, rows.rows, 8, apart=True).pieces
    columns = [range(3, 8), range(1), range(1, 3), range(3, 4)]
    assert pieces == [*zip((slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7)), columns, strict=True)]
    assert Storing(rows, rows.rows, 8, apart=False).pieces == [(slice(0, 7), range(0))]
    assert rows.others is None and rows.rows.count == rows.count
    assert [w[i].tolist() for w, i in zip(rows.window, rows.in_window, strict=True)] == [
        [3, 5, 6],
        [5, 6, 7],
    ]
    assert rows.committed.tolist() == [[column != M for column in row] for row in at]


def test_rows_of_a_step_that_predicts_from_the_row_before():
    at = [[P, P, 0, M, 2, M, M, M]]
    rows = step_rows(step_of(at, prompt_length=2, start=2, stop=6, shift=1, forwards=(3,)), 2, Tracked(1), (False,))
    assert chosen(rows.rows, rows.output) == [[2, 4]]
    assert chosen(rows.rows, slice(2, rows.count)) == [[3, 5]]


def test_rows_of_a_step_in_which_some_refresh_and_some_wait():
    at = [[P, P, 0, M, M], [P, P, M, M, M], [P, P, M, M, M]]
    step = step_of(at, prompt_length=2, start=2, stop=5, forwards=(1, 2, 2), active=(True, True, False))
    rows = step_rows(step, 2, Tracked(1), (False, True, False))
    assert chosen(rows.rows, rows.output) == [[3, 4], [2, 3], []]
    assert chosen(rows.rows, slice(2, rows.count)) == [[2], [], []]
    # Behind the step's rows: valid if all are due, known for the others.
    assert chosen(rows.rows, slice(rows.count, None)) == [[], [0, 1, 4], []]
    assert rows.others is not None and chosen(rows.others, slice(None)) == [[0, 1], [0, 1, 4], []]
    assert (rows.all_due, rows.due.tolist()) == (False, [False, True, False])


def test_padding_is_never_tracked():
    at = [[P, P, P, M, M]]
    step = step_of(at, prompt_length=3, start=3, stop=5, forwards=(0,), pads=torch.tensor([2]))
    assert step_rows(step, 2, Tracked(1), (True,)).committed.tolist() == [[False, False, True, False, False]]


def test_tracked_tokens_follow_their_sequences(runtime: Runtime):
    tracked = Tracked(2)
    committed = torch.zeros(3, 7, dtype=torch.bool)
    assert not tracked.mask(committed).any()
    tracked.begin(runtime.model.shape, 3, 7, torch.empty(0))
    columns, queries = torch.tensor([[0, 1], [2, NONE], [6, 3]]), torch.randn(3, 4, 2, 32)
    tracked.put(1, columns, queries, torch.tensor([True, True, True])[:, None])
    tracked.put(1, columns + 1, queries + 1, torch.tensor([False, False, False])[:, None])
    tracked.put(2, columns.clamp_min(0), queries, torch.tensor([False, False, True])[:, None])
    assert [row.nonzero()[:, 0].tolist() for row in tracked.mask(committed)] == [[0, 1], [2], [3, 6]]
    tracked.keep([1, 2])
    assert [row.nonzero()[:, 0].tolist() for row in tracked.mask(committed[:2])] == [[2], [3, 6]]
    assert torch.equal(tracked.queries(1), queries[1:]) and tracked.columns(1).tolist() == columns[1:].tolist()


CHUNKS = [SummedChunk(3, 2, 9), SummedChunk(2, 2, 9), SummedChunk(1, 1, 9), SummedChunk(1, 1, 4), SummedChunk(1, 1, 1)]


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, None), (0.8, 2)])
def test_attention_received_in_any_chunks(chunk: SummedChunk, padded: bool, soft_cap: float | None, sinks: int | None):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(3, heads, rows, 8, generator=generator) for heads, rows in ((6, 9), (2, 40)))
    counts = torch.rand(3, 9, generator=generator) < 0.6
    mask = torch.arange(40) >= torch.tensor([[0], [7], [13]]) if padded else None
    sink_keys = None if sinks is None else torch.randn(6, sinks, 8, generator=generator)
    own = {"soft_cap": soft_cap, "sink_keys": sink_keys}
    weights = weights64(queries, keys, mask, **own)
    torch.testing.assert_close(attention_weights(queries, keys, mask, **own)[0].double(), weights, atol=1e-6, rtol=1e-5)
    received = attention_received(queries, counts, keys, mask, chunk, **own)
    expected = (weights * counts[:, None, :, None]).sum(dim=(1, 2))
    torch.testing.assert_close(received.double(), expected, atol=1e-5, rtol=1e-5)


def weights64(
    queries: Tensor, keys: Tensor, mask: Tensor | None, *, soft_cap: float | None, sink_keys: Tensor | None
) -> Tensor:
    """In float64, with the sinks as columns that are cut off at the end."""
    scores = queries.double() @ keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1).mT
    if sink_keys is not None:
        scores = torch.cat([queries.double() @ sink_keys.double().mT, scores], dim=-1)
    scores = scores / queries.shape[-1] ** 0.5
    scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
    if mask is not None:
        scores[..., -mask.shape[1] :].masked_fill_(~mask[:, None, None], -torch.inf)
    return scores.softmax(-1)[..., -keys.shape[2] :]


@pytest.mark.parametrize("sinks", [None, 1])
def test_final_rows_see_final_columns_alone(sinks: int | None):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(2, 4, rows, 8, generator=generator) for rows in (3, 20))
    sink_keys = None if sinks is None else torch.randn(4, sinks, 8, generator=generator)
    visible = torch.tensor([[5, 20, 1], [12, 12, 20]])
    mask = torch.arange(20) >= torch.tensor([[0], [4]])
    found, of_sinks = attention_exponentials(queries, keys, mask, soft_cap=2.0, sink_keys=sink_keys, stop=visible)
    found /= found.sum(dim=-1, keepdim=True) + (0 if of_sinks is None else of_sinks)
    for b in range(2):
        for row, count in enumerate(visible[b].tolist()):
            part = slice(b, b + 1), slice(None), slice(None, count)
            seen = queries[b : b + 1, :, row : row + 1], keys[part], mask[b : b + 1, :count]
            expected = weights64(*seen, soft_cap=2.0, sink_keys=sink_keys)[0, :, 0]
            torch.testing.assert_close(found[b, :, row, :count].double(), expected, atol=1e-6, rtol=1e-5)
            assert (found[b, :, row, count:] == 0).all()


def test_similarity_is_a_mean_over_heads_of_cosines_over_keys():
    past, now = (torch.rand(2, 4, 3, 50, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    torch.testing.assert_close(similarity(past, now), F.cosine_similarity(past, now, dim=-1).mean(dim=1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": 0}, ValueError),
        ({"window": 2.5}, TypeError),
        ({"tracked": 0}, ValueError),
        ({"similarity_threshold": -1.5}, ValueError),
        ({"similarity_threshold": "high"}, TypeError),
        ({"hidden_tier": "disk"}, ValueError),
        ({"refresh_interval": 0}, ValueError),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match=next(iter(options))):
        make_policy("elastic_cache", **options)


def test_a_pass_over_all_rows_fetches_nothing(runtime: Runtime):
    # Rows that it overwrites need not come first; rows that a pass widens from must.
    fetched = {}
    for name, options in {
        "refresh": {"refresh_interval": 1},
        "widening": {"similarity_threshold": 2.0},
    }.items():
        out = runtime.with_policy("elastic_cache", **options).generate(
            prompt(300)[None], max_new_tokens=8, block_length=8, stop_at_eos=False
        )
        assert out.tiers is not None
        fetched[name] = out.tiers.ways[Lane.FETCH].nbytes
    # Seven of the eight forwards widen to the second of four layers, and the store guesses that the third comes next.
    layer = 308 * 128 * 4
    assert fetched["refresh"] == 0
    assert 7 * layer <= fetched["widening"] < 2.5 * 7 * layer


def test_a_model_of_one_layer(random_model: Callable[[Mapping[str, Any]], Any], tiny_config: Mapping[str, Any]):
    runtime = Runtime(random_model({**tiny_config, "n_layers": 1}), policy=make_policy("elastic_cache"))
    assert runtime.generate([[5]], max_new_tokens=1, stop_at_eos=False).num_forwards == 1
