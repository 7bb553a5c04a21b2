"""The rule `drift_aware` against a loop over single tokens, and the drift it reads against attention from scratch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drift_rules import EAGER, drift_aware
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training import tasks

import tiered
from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.decoding.attention_shift import AttentionShift
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.drift_aware import DriftAware
from tiered.forward.attention_bytes import AttentionChunk
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.models.rope import Rotary
from tiered.models.shape import ModelShape
from tiered.policies.base import Policy, PolicyState, Step, StepKind
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
NAN = math.nan
CPU = torch.device("cpu")

# ---- the rule ----

# A block step by step: confidence and drift of each token; eighths, so that bounds are met exactly.
EIGHTHS = st.integers(0, 8).map(lambda n: n / 8)
DRIFTS = st.integers(0, 40).map(lambda n: n / 8) | st.just(NAN)
BLOCKS = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9)).flatmap(
    lambda sizes: st.lists(
        st.lists(
            st.lists(st.tuples(EIGHTHS, DRIFTS), min_size=sizes[1], max_size=sizes[1]),
            min_size=sizes[0], max_size=sizes[0],
        ),
        min_size=sizes[2], max_size=sizes[2],
    )
)  # fmt: skip
RULES = st.builds(
    lambda low, high, window, slope, ceiling: drift_aware(
        early_threshold=min(low, high), confidence_threshold=max(low, high),
        drift_window=window, drift_slope=slope, drift_ceiling=ceiling,
    ),
    EIGHTHS, EIGHTHS, st.integers(1, 6), st.sampled_from([0.0, 1.0, 4.0, 10.0]), st.sampled_from([0.0, 0.5, 2.0, 9.0]),
)  # fmt: skip


def candidates(confidence: list[list[float]], pending: Tensor, drift: list[list[float]] | None) -> Candidates:
    scores = torch.tensor(confidence, dtype=torch.float64).masked_fill(~pending, -math.inf)
    measured = None if drift is None else torch.tensor(drift)
    return Candidates(tokens=torch.zeros_like(pending).long(), confidence=scores, pending=pending, shift=measured)


def token_by_token(rule: DriftAware, steps: list[list[tuple[float, float]]]) -> list[list[int]]:
    """Columns that one sequence commits in each step of a block."""
    pending = set(range(len(steps[0])))
    earlier: list[list[float]] = [[] for _ in steps[0]]
    committed = []
    for step in steps:
        chosen = {max(pending, key=lambda i: (step[i][0], -i))} if pending else set()
        for i, (confidence, drift) in enumerate(step):
            if math.isnan(drift):
                earlier[i].clear()
                rise = None
            else:
                recent = earlier[i][-rule.drift_window :]
                rise = drift - sum(recent) / max(1, len(recent))
                earlier[i].append(drift)
            if i not in pending:
                continue
            if confidence >= rule.confidence_threshold:
                chosen.add(i)
            elif confidence > rule.early_threshold and rise is not None:
                needed = rule.drift_slope * (rule.confidence_threshold - confidence) ** 2
                if needed <= rise < rule.drift_ceiling:
                    chosen.add(i)
        pending -= chosen
        committed.append(sorted(chosen))
    return committed


@given(RULES, BLOCKS)
def test_the_rule_token_by_token(rule: DriftAware, steps: list[list[list[tuple[float, float]]]]):
    batch, length = len(steps[0]), len(steps[0][0])
    expected = [token_by_token(rule, [step[i] for step in steps]) for i in range(batch)]
    state = rule.start(1, Generators(0, batch, CPU))
    for _ in range(2):  # the first block must not change the second
        pending = torch.ones(batch, length, dtype=torch.bool)
        state.begin_block(pending)
        for number, step in enumerate(steps):
            confidence, drift = ([[pair[part] for pair in row] for row in step] for part in (0, 1))
            chosen = state.choose(candidates(confidence, pending, drift))
            assert [row.nonzero().flatten().tolist() for row in chosen] == [one[number] for one in expected]
            pending = pending & ~chosen


def early(rule: DriftAware, drifts: list[float], confidence: float = 0.85) -> list[bool]:
    """Whether a token of that confidence passes early, by step; another token is always the most confident one."""
    state = rule.start(1, Generators(0, 1, CPU))
    pending = torch.ones(1, 2, dtype=torch.bool)
    state.begin_block(pending)
    return [bool(state.choose(candidates([[0.95, confidence]], pending, [[0.0, drift]]))[0, 1]) for drift in drifts]


@pytest.mark.parametrize(
    ("options", "drifts", "passes"),
    [
        pytest.param({}, [NAN, 1.9, 1.9], [False, True, False], id="no drift before, all of it is rise"),
        pytest.param({}, [2.0, 0.02], [False, False], id="no drift before, the bounds hold"),
        pytest.param({}, [0.1, 0.1, NAN, 0.1, 0.1], [True, False, False, True, False], id="refreshed"),
        pytest.param({}, [0.1, 0.12, 0.14], [True, False, True], id="slope"),
        pytest.param({"drift_slope": 0.0}, [0.5, 0.5, 0.4], [True, True, False], id="no slope"),
        pytest.param({}, [0.0, 1.99, 4.0, 2.0], [False, True, False, False], id="ceiling"),
        pytest.param({}, [0.0, 2.0], [False, False], id="at the ceiling"),
        pytest.param({"drift_window": 1}, [4.0, 0.5, 0.6], [False, False, True], id="window of one"),
        pytest.param({"drift_window": 3}, [4.0, 0.0, 0.0, 1.3, 0.5], [False, False, False, False, True], id="window"),
        pytest.param({"early_threshold": 0.85}, [0.1, 0.2], [False, False], id="early threshold"),
    ],
)
def test_early_commits(options: dict[str, Any], drifts: list[float], passes: list[bool]):
    assert early(drift_aware(**options), drifts) == passes


def test_sequences_that_go_on_keep_their_history():
    rule, pending = DriftAware(), torch.ones(3, 2, dtype=torch.bool)
    state = rule.start(1, Generators(0, 3, CPU))
    state.begin_block(pending)
    state.choose(candidates([[0.95, 0.8]] * 3, pending, [[0.0, 0.0], [0.0, 1.15], [0.0, 0.0]]))
    state.keep([1, 2])
    chosen = state.choose(candidates([[0.95, 0.8]] * 2, pending[:2], [[0.0, 1.2]] * 2))
    assert chosen.tolist() == [[True, False], [True, True]]


def test_the_rule_needs_the_drift():
    pending = torch.ones(1, 2, dtype=torch.bool)
    state = DriftAware().start(1, Generators(0, 1, CPU))
    state.begin_block(pending)
    with pytest.raises(ValueError, match="drift"):
        state.choose(candidates([[0.5, 0.6]], pending, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_threshold": 0.91}, "early_threshold = 0.91"),
        ({"confidence_threshold": 0.5}, "early_threshold = 0.7 is allowed up to confidence_threshold = 0.5"),
        ({"confidence_threshold": 1.1}, "confidence_threshold = 1.1"),
        ({"early_threshold": -0.1}, "early_threshold = -0.1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        DriftAware(**options)


# ---- the drift ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(CommitRule):
    """Commits the two best of the first sequence and the best of every other; notes drift and pending rows."""

    name: ClassVar[str] = "recorder"
    needs_shift: ClassVar[bool] = True
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Recording(self.seen)


class _Recording(CommitState):
    def __init__(self, seen: list[tuple[Tensor, Tensor]]) -> None:
        self._seen = seen

    def choose(self, candidates: Candidates) -> Tensor:
        assert candidates.shift is not None
        self._seen.append((candidates.shift.clone(), candidates.pending))
        count = torch.ones(len(candidates.pending), 1)
        count[0] = 2
        return candidates.pending & (candidates.ranks() < count)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRows(Policy):
    """Every row in every step, by some route, and never called a refresh."""

    name: ClassVar[str] = "all_rows"
    plan: Callable[[Step], Pass]

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        return {Feature.KEY: shape.layers, Feature.VALUE: shape.layers}

    def start(self) -> PolicyState:
        return _Planned(self.plan)


class _Planned(PolicyState):
    def __init__(self, plan: Callable[[Step], Pass]) -> None:
        self._plan = plan

    def rows(self, step: Step) -> Pass:
        return self._plan(step)


def _span(step: Step) -> Pass:
    return step.over(0, step.canvas.length, StepKind.UPDATE)


def _scattered(step: Step) -> Pass:
    """Every row in any order, and filler rows, some of them in the block."""
    block = torch.arange(step.first_row, step.last_row)
    others = torch.tensor([c for c in range(step.canvas.length) if not step.first_row <= c < step.last_row])
    order = torch.stack([others[torch.randperm(len(others))] for _ in range(step.canvas.batch)])
    filler = torch.randint(0, step.canvas.length, (step.canvas.batch, 4))
    index = torch.cat([filler, order[:, :5], block.expand(step.canvas.batch, -1), order[:, 5:]], dim=1)
    valid = (torch.arange(index.shape[1]) >= 4).expand(step.canvas.batch, -1)
    return step.of_rows(Rows.at(index, valid), slice(9, 9 + len(block)), StepKind.UPDATE)


def _unnarrowed(plan: Callable[[Step], Pass]) -> Callable[[Step], Pass]:
    """As `plan`, with a program that takes every row through the last layer; filler rows hold nonsense."""

    def program(forward: Forward, layer: int, pass_: Pass) -> Pass:
        if pass_.rows.valid is not None and not pass_.rows.is_span:
            pass_ = replace(pass_, hidden=pass_.hidden.masked_fill(~pass_.rows.valid[..., None], 3.0))
        normed = forward.write_keys_values(layer, pass_.rows, pass_.hidden)
        hidden = pass_.hidden + forward.attention(layer, pass_.rows, normed)
        return replace(pass_, hidden=hidden + forward.model.feed_forward(layer, hidden))

    return lambda step: replace(plan(step), program=program)


def attention_from_scratch(
    runtime: Runtime, ids: Tensor, columns: list[int], cache: dict[int, tuple[Tensor, Tensor]]
) -> Tensor:
    """Last layer's attention [heads, columns, length] of a canvas without padding, in float64. It recomputes `columns`,
    reads all others from `cache` (keys and values by layer), and updates `cache`."""
    model, attention = runtime.model, torch.empty(0)
    hidden = model.embed(ids[None, columns])
    for layer in range(model.shape.layers):
        normed = model.attention_norm(layer, hidden)
        rotary: Rotary = model.rotary(torch.tensor([columns]))
        keys, values = model.keys_values(layer, normed, rotary)
        if layer not in cache:
            nothing = keys.new_zeros(keys.shape[1], len(ids), keys.shape[3])
            cache[layer] = (nothing, nothing.clone())
        for kept, new in zip(cache[layer], (keys, values), strict=True):
            kept[:, columns] = new[0]
        queries = model.queries(layer, normed, rotary)[0].double()
        keys, values = (part.double().repeat_interleave(len(queries) // len(part), dim=0) for part in cache[layer])
        attention = (queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).softmax(dim=-1)
        mixed = (attention @ values).transpose(0, 1).flatten(1)[None].float()
        hidden = hidden + model.attention_out(layer, mixed)
        hidden = hidden + model.feed_forward(layer, hidden)
    return attention


def expected_drift(
    runtime: Runtime, canvases: list[Tensor], *, prompt: int, block_length: int, policy: str
) -> list[Tensor | None]:
    """Drift of one sequence's block rows at each step, from its canvases before each. It is None for a step without
    drift."""
    length, mask = len(canvases[0]), runtime.model.mask_token_id
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    result: list[Tensor | None] = []
    before, last_block, number = None, -1, 0
    for ids in canvases:
        block = int((ids == mask).nonzero()[0] - prompt) // block_length
        number = number + 1 if block == last_block else 0
        shift = runtime.model.shape.prediction_shift
        first = prompt + block * block_length - shift
        rows = list(range(first, first + block_length))
        refresh = policy != "all" and number % (3 if policy == "every third" else 10**9) == 0
        block_rows = list(range(first, first + shift + block_length))
        fed = block_rows if policy != "all" and not refresh else list(range(length))
        fed = list(range(first, length)) if policy == "prefix" and not refresh else fed
        attention = attention_from_scratch(runtime, ids, fed, cache)[:, [fed.index(row) for row in rows]]
        if refresh or number == 0 or before is None:
            result.append(None)
        else:
            result.append((attention * (attention / before).log()).sum(-1).mean(0))
        before, last_block = attention, block
    return result


DUAL = make_policy("fast_dllm_dual")
ROUTES: dict[str, tuple[Policy, str]] = {
    "span": (AllRows(plan=_span), "all"),
    "scattered": (AllRows(plan=_scattered), "all"),
    "span, every row in the last layer": (AllRows(plan=_unnarrowed(_span)), "all"),
    "scattered, every row in the last layer": (AllRows(plan=_unnarrowed(_scattered)), "all"),
    "dual": (DUAL, "dual"),
    "dual, every third": (make_policy("fast_dllm_dual", refresh_interval=3), "every third"),
    "prefix": (make_policy("fast_dllm_prefix"), "prefix"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"cfg_scale": 0.5},
    "in parts": {"part": 3},
    "head by head": {"chunk": AttentionChunk(1, 1, 0)},
    "two heads of two sequences": {"chunk": AttentionChunk(2, 2, 0)},
    "shifted": {"shift": 1},
}


@pytest.fixture(scope="module")
def tiny() -> Runtime:
    """Four heads on two key heads."""
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("route", ROUTES)
def test_the_drift_is_that_of_attention_from_scratch(
    tiny: Runtime, route: str, variant: str, monkeypatch: pytest.MonkeyPatch
):
    options = dict(VARIANTS[variant])
    if part := options.pop("part", None):
        monkeypatch.setattr("tiered.forward.forward.part_rows", lambda batch: part)
    if chunk := options.pop("chunk", None):
        monkeypatch.setattr("tiered.planning.call_bytes.compared_at_a_time", lambda *_, **__: chunk)
    if shift := options.pop("shift", 0):
        monkeypatch.setattr(tiny.model, "shape", replace(tiny.model.shape, prediction_shift=shift))
    policy, kind = ROUTES[route]
    pads, block_length = [5, 0, 2], 6
    ids = torch.randint(0, 480, (3, 11), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(11) >= torch.tensor(pads)[:, None]).long()
    rule = Recorder()
    out = tiny.with_policy(policy).generate(
        ids, attention_mask=mask, max_new_tokens=12, block_length=block_length, commit=rule, stop_at_eos=False,
        output_history=True, **options,
    )  # fmt: skip
    assert out.history is not None and len(rule.seen) == len(out.history) - 1 == 12
    measured = 0
    for sequence, pad in enumerate(pads):
        takes_part = [n for n, (_, pending) in enumerate(rule.seen) if pending[sequence].any()]
        assert len(takes_part) == (6 if sequence == 0 else 12)  # the first waits for the others, block after block
        canvases = [out.history[n][sequence, pad:] for n in takes_part]
        expected = expected_drift(tiny, canvases, prompt=11 - pad, block_length=block_length, policy=kind)
        for n, drift in zip(takes_part, expected, strict=True):
            seen = rule.seen[n][0][sequence].double()
            if drift is None:
                assert seen.isnan().all()
            else:
                torch.testing.assert_close(seen, drift, rtol=2e-4, atol=1e-5)
                measured += 1
    assert measured >= 12


@pytest.mark.parametrize(("soft_cap", "sinks"), [(None, 0), (1.5, 2)])
def test_rows_that_a_step_leaves_out_are_compared_with_their_last(soft_cap: float | None, sinks: int):
    generator = torch.Generator().manual_seed(0)
    sink_keys = torch.randn(2, sinks, 8, generator=generator) if sinks else None
    log_rows = torch.empty(1, 2, 4, 12 + sinks)
    shift = AttentionShift(log_rows, AttentionChunk(1, 1, 0), soft_cap=soft_cap, sink_keys=sink_keys)
    last: dict[int, Tensor] = {}
    # Places in the block that each step computes, and those that have been computed before.
    for number, (computed, known) in enumerate([([0, 1], []), ([2, 1], [1]), ([3, 0, 1], [0, 1]), ([3], [3])]):
        queries, keys = (torch.randn(1, 2, n, 8, generator=generator) for n in (len(computed), 12))
        shift.begin_step(5, forget=[number == 0])
        shift.observe(Rows.at(torch.tensor([computed]) + 5), queries, keys, None)
        everything = keys[0] if sink_keys is None else torch.cat([sink_keys, keys[0]], dim=1)
        scores = queries[0].double() @ everything.double().mT / math.sqrt(8)
        attention = (scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()).softmax(dim=-1)
        expected = torch.full((4,), torch.nan, dtype=torch.float64)
        for row, place in enumerate(computed):
            now = attention[:, row]
            if place in known:
                expected[place] = (now * (now / last[place]).log()).sum(-1).mean()
            last[place] = now
        torch.testing.assert_close(shift.shift[0].double(), expected, equal_nan=True, rtol=1e-4, atol=1e-6)


# ---- both together ----

SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 8}
PROMPT = torch.randint(0, 480, (1, 17), generator=torch.Generator().manual_seed(1))


def history(runtime: Runtime, **options: Any) -> Tensor:
    out = runtime.generate(PROMPT, output_history=True, stop_at_eos=False, **options, **SIZES)
    assert out.history is not None
    return torch.stack(out.history)


@pytest.mark.parametrize("policy", [make_policy("fast_dllm_dual"), make_policy("fast_dllm_prefix")])
def test_early_commits_save_forwards(tiny: Runtime, policy: Policy):
    runtime = tiny.with_policy(policy)
    assert len(history(runtime, commit=EAGER)) < len(history(runtime, confidence_threshold=0.8)) - 4


def test_without_drift_the_rule_is_threshold(tiny: Runtime):
    for policy in (
        tiered_none := tiny.with_policy("none"),
        tiny.with_policy(make_policy("fast_dllm_dual", refresh_interval=1)),
    ):
        assert torch.equal(history(policy, commit=EAGER), history(tiered_none, confidence_threshold=0.8))
    # With a refresh in every second step there is a drift in the others, and none before it.
    runtime = tiny.with_policy(make_policy("fast_dllm_dual", refresh_interval=2))
    assert len(history(runtime, commit=EAGER)) < len(history(runtime, confidence_threshold=0.8))


def test_stopping_at_the_end_changes_no_text():
    runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual")
    examples = [tasks.sample(task, "test", seed) for task, seed in (("copy", 1), ("remove", 2), ("add", 0))]
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    options = {**SIZES, "commit": replace(EAGER, confidence_threshold=0.999)}
    stopped, whole = (runtime.generate(chats, stop_at_eos=stop, **options) for stop in (True, False))
    assert stopped.text == whole.text
    assert len(set(stopped.forwards)) > 1 and max(stopped.forwards) < whole.num_forwards


def test_other_rules_measure_nothing(tiny: Runtime):
    plain = tiny.generate(PROMPT, confidence_threshold=0.8, **SIZES)
    measured = tiny.generate(PROMPT, commit="drift_aware", **SIZES)
    # Log-probabilities of 8 rows in 4 heads over 49 keys, the rows' drift with its sum, and nothing else.
    assert measured.memory.peak_device_bytes - plain.memory.peak_device_bytes == 4 * 8 * (4 * 49 + 2)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("attended", {"attended_rows": 32}),
        ("attended", {"attended_rows": 4}),
        ("elastic_cache", {"refresh_interval": 3, "window": 8}),
        ("dllm_cache", {"prompt_interval": 3, "response_interval": 3}),
    ],
)
def test_a_short_prompt_in_a_batch_forgets_drift_when_it_would_alone(
    tiny: Runtime, policy: str, options: dict[str, Any]
):
    """A step that recomputes all rows of a short prompt is a refresh of that prompt, and not of the long ones."""
    runtime, lengths = tiny.with_policy(make_policy(policy, **options)), (60, 10, 33, 7, 21)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 480, (length,), generator=generator).tolist() for length in lengths]
    call = {"max_new_tokens": 24, "block_length": 8, "commit": replace(EAGER, early_threshold=0.01)}
    together = runtime.generate(prompts, stop_at_eos=False, **call)
    for row, prompt in enumerate(prompts):
        alone = runtime.generate([prompt], stop_at_eos=False, **call)
        assert together.forwards[row] == alone.num_forwards
        assert torch.equal(together.sequences[row, -24:], alone.sequences[0, -24:])
