"""The policy contract holds for policies that the library does not have yet. Rows are scattered, ragged or different
from layer to layer, caching is delayed, and rows are recomputed from stored hidden states."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tiered
from tiered.core.canvas import PROMPT
from tiered.core.features import Feature
from tiered.core.rows import Rows, rows_where
from tiered.forward.forward import Forward
from tiered.forward.passes import LayerProgram, Pass
from tiered.models.shape import ModelShape
from tiered.policies.base import Policy, PolicyState, Step, StepKind
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "confidence_threshold": 0.6, "stop_at_eos": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom(Policy):
    """A policy from a function of the step; `keeps_hidden` keeps every layer's input rows as well."""

    name: ClassVar[str] = "custom"
    rule: Callable[[Step], Pass]
    keeps_hidden: bool = False

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        kept = [Feature.KEY, Feature.VALUE] + [Feature.HIDDEN] * self.keeps_hidden
        return dict.fromkeys(kept, shape.layers)

    def start(self) -> PolicyState:
        return _State(self.rule)


class _State(PolicyState):
    def __init__(self, rule: Callable[[Step], Pass]) -> None:
        self.rows = rule  # type: ignore[method-assign]

    def rows(self, step: Step) -> Pass:
        raise AssertionError


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")


@pytest.fixture(params=[0.0, 0.5], ids=["plain", "guided"])
def history(runtime: Runtime, request: pytest.FixtureRequest) -> Callable[[Policy], list[list[list[int]]]]:
    """All canvases of a left-padded batch under a policy."""
    ids = torch.randint(0, 480, (3, 20), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[2, :3] = 0

    def run(policy: Policy) -> list[list[list[int]]]:
        out = runtime.with_policy(policy).generate(
            ids, attention_mask=mask, output_history=True, cfg_scale=request.param, **OPTIONS
        )
        assert out.history is not None
        return [state.tolist() for state in out.history]

    return run


def test_rows_in_any_order(history: Callable):
    def shuffled(step: Step) -> Pass:
        block = torch.arange(step.first_row, step.last_row)
        others = torch.tensor([c for c in range(step.canvas.length) if not step.first_row <= c < step.last_row])
        order = torch.stack([others[torch.randperm(len(others))] for _ in range(step.canvas.batch)])
        index = torch.cat([order[:, :5], block.expand(step.canvas.batch, -1), order[:, 5:]], dim=1)
        return step.of_rows(Rows.at(index), slice(5, 5 + len(block)), StepKind.REFRESH)

    assert history(Custom(rule=shuffled)) == history(make_policy("none"))


def test_sequences_with_different_numbers_of_rows(history: Callable):
    # The prefix cache's rows; a third of the sequences get theirs in front of filler rows that must leave no trace.
    def ragged(step: Step) -> Pass:
        if step.number == 0:
            return step.over(0, step.canvas.length, StepKind.REFRESH)
        rows = torch.arange(step.first_row, step.canvas.length).expand(step.canvas.batch, -1)
        filler = torch.randint(0, step.canvas.length, (step.canvas.batch, 6))
        index = torch.cat([rows, filler], dim=1)
        valid = (torch.arange(index.shape[1]) < rows.shape[1]).expand(step.canvas.batch, -1)
        return step.of_rows(Rows.at(index, valid), slice(0, step.last_row - step.first_row), StepKind.STEP)

    assert history(Custom(rule=ragged)) == history(make_policy("fast_dllm_prefix"))


def test_logits_of_pending_rows_alone(history: Callable):
    # Every sequence has other rows among its output, and another number of them.
    def pending_first(step: Step) -> Pass:
        every = torch.ones(step.canvas.batch, step.canvas.length, dtype=torch.bool)
        wanted = every.clone()
        wanted[:, : step.first_row] = wanted[:, step.last_row :] = False
        wanted[:, step.first_row : step.last_row] &= step.canvas.pending(step.start, step.stop)
        rows, (count, _) = rows_where(wanted, every)
        return step.of_rows(rows, slice(0, count), StepKind.REFRESH)

    assert history(Custom(rule=pending_first)) == history(make_policy("none"))


def test_a_token_without_a_predicting_row_is_not_committed(runtime: Runtime):
    # Two pending columns a step, the last first: rows of the others have no logits.
    seen: list[list[int]] = []

    def backwards(step: Step) -> Pass:
        pending = step.canvas.pending(step.start, step.stop)
        seen.append((pending[0].nonzero()[:, 0] + step.start).tolist())
        columns = torch.tensor([seen[-1][-2:]])
        others = torch.tensor([[c for c in range(step.canvas.length) if c not in seen[-1][-2:]]])
        return step.of_rows(Rows.at(torch.cat([columns, others], dim=1)), slice(0, columns.shape[1]), StepKind.REFRESH)

    options = {**OPTIONS, "confidence_threshold": 0.0}
    out = runtime.with_policy(Custom(rule=backwards)).generate(torch.arange(5)[None], **options)
    assert [len(pending) for pending in seen] == [8, 6, 4, 2] * 3
    assert all(pending == list(range(pending[0], pending[0] + len(pending))) for pending in seen)
    assert int((out.sequences == runtime.model.mask_token_id).sum()) == 0


def test_forwards_count_by_sequence(runtime: Runtime):
    # A sequence that waits for others has a clock that stands still, and dates of commits that go by it.
    def clocks(ids: torch.Tensor) -> tuple[list[list[int | None]], torch.Tensor]:
        seen: list[list[int | None]] = []
        dates: list[torch.Tensor] = []

        def rule(step: Step) -> Pass:
            seen.append([count if here else None for count, here in zip(step.forwards, step.active, strict=True)])
            dates.append(step.canvas.committed_at[:, : step.start].clone())
            assert step.active == tuple(step.canvas.pending(step.start, step.stop).any(dim=1).tolist())
            return step.over(0, step.canvas.length, StepKind.REFRESH)

        runtime.with_policy(Custom(rule=rule)).generate(ids, **OPTIONS)
        return seen, dates[-1]

    ids = torch.randint(0, 480, (3, 20), generator=torch.Generator().manual_seed(4))
    together, dates = clocks(ids)
    assert any(None in forwards for forwards in together)
    for number in range(3):
        alone, of_one = clocks(ids[number : number + 1])
        taken = [forwards[number] for forwards in together if forwards[number] is not None]
        assert taken == [forwards[0] for forwards in alone] == list(range(len(alone)))
        assert torch.equal(dates[number], of_one[0])


def test_commits_of_random_remasking_are_known_before(runtime: Runtime):
    next_commits: list[torch.Tensor | None] = []
    pending: list[torch.Tensor] = []

    def rule(step: Step) -> Pass:
        next_commits.append(step.next_commits)
        pending.append(step.canvas.pending(step.canvas.prompt_length, step.canvas.length).clone())
        return step.over(0, step.canvas.length, StepKind.REFRESH)

    ids, options = torch.randint(0, 480, (2, 9)), {"max_new_tokens": 12, "steps": 5, "stop_at_eos": False, "seed": 1}
    runtime.with_policy(Custom(rule=rule)).generate(ids, remasking="random", **options)
    for ahead, before, after in zip(next_commits, pending, pending[1:], strict=False):
        assert ahead is not None and ahead.any() and torch.equal(ahead > 0, before & ~after)
        assert all(sorted(row[row > 0].tolist()) == list(range(1, 1 + int((row > 0).sum()))) for row in ahead)
    next_commits.clear()
    runtime.with_policy(Custom(rule=rule)).generate(ids, **options)
    assert set(next_commits) == {None}


def test_guidance_that_is_computed_at_times(runtime: Runtime):
    ids = torch.randint(0, 480, (3, 20), generator=torch.Generator().manual_seed(4))

    def answer(guided: Callable[[Step], tuple[bool, ...] | None]) -> tuple[list[list[int]], list[int]]:
        sequences: list[int] = []

        def program(forward: Forward, layer: int, pass_: Pass) -> Pass:
            assert len(forward.keys(layer)) == len(pass_.hidden)
            sequences.append(len(pass_.hidden))
            return forward.dense(layer, pass_)

        def rule(step: Step) -> Pass:
            plan = step.over(0, step.canvas.length, StepKind.REFRESH)
            return replace(plan, guided=guided(step), program=program)

        out = runtime.with_policy(Custom(rule=rule)).generate(ids, cfg_scale=2.0, **OPTIONS)
        return out.sequences.tolist(), sequences[:: runtime.model.shape.layers]

    always, _ = answer(lambda step: None)
    # Every forward by name is the same except for the order of the sums.
    assert answer(lambda step: (True,) * 3) == (always, [6] * len(answer(lambda step: None)[1]))
    seldom, sequences = answer(lambda step: (step.number == 0,) * 3)
    assert seldom != always and set(sequences) == {3, 6}
    # Each sequence as if it were alone: the second is guided in the first forward of a block, the others always.
    mixed, sequences = answer(lambda step: (True, step.number == 0, True))
    assert [mixed[0], mixed[1], mixed[2]] == [always[0], seldom[1], always[2]] and set(sequences) == {6}


def test_a_policy_sees_the_forward_of_every_commit(history: Callable):
    # Delayed caching needs to know which tokens are new; recomputing all that are not of the prompt, and the prompt
    # as well, is a full refresh.
    seen: list[int] = []

    def by_commit(step: Step) -> Pass:
        committed = step.canvas.committed_at
        assert ((committed[:, : step.canvas.prompt_length] == PROMPT).all()).item()
        seen.append(int((committed[:, step.canvas.prompt_length :] < 2**31 - 1).sum()))
        return step.over(0, step.canvas.length, StepKind.REFRESH)

    assert history(Custom(rule=by_commit)) == history(make_policy("none"))
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] > 0


def _from_hidden(layer_of_all_rows: int) -> Callable[[Step], Pass]:
    """A step computes the block's rows up to a layer, and from there on every row, the others from their stored
    hidden states."""

    def capture(forward: Forward, layer: int, pass_: Pass) -> Pass:
        forward.store.write(Feature.HIDDEN, layer, pass_.rows, pass_.hidden[:, None])
        return forward.dense(layer, pass_)

    def rows(step: Step) -> Pass:
        if step.number == 0:
            whole = step.over(0, step.canvas.length, StepKind.REFRESH)
            return step.of_rows(whole.rows, whole.output, whole.kind, capture)
        block = step.over(step.first_row, step.last_row, StepKind.UPDATE)
        return step.of_rows(block.rows, block.output, block.kind, widen(step))

    def widen(step: Step) -> LayerProgram:
        columns = slice(step.first_row, step.last_row)

        def program(forward: Forward, layer: int, pass_: Pass) -> Pass:
            if layer == layer_of_all_rows:
                hidden = forward.store.view(Feature.HIDDEN, layer)[:, 0].clone()
                hidden[:, columns] = pass_.hidden
                pass_ = replace(pass_, rows=step.canvas.rows, hidden=hidden, output=columns)
            return forward.dense(layer, pass_)

        return program

    return rows


def test_rows_recomputed_from_stored_hidden_states(history: Callable, runtime: Runtime):
    layers = runtime.model.shape.layers
    # From layer 0 on, every row is fresh, since tokens outside the block stand still; from behind the last layer on,
    # nothing but the block is.
    assert history(Custom(rule=_from_hidden(0), keeps_hidden=True)) == history(make_policy("none"))
    assert history(Custom(rule=_from_hidden(layers), keeps_hidden=True)) == history(make_policy("fast_dllm_dual"))
    assert history(make_policy("none")) != history(make_policy("fast_dllm_dual"))


def test_state_is_made_anew_for_every_call(runtime: Runtime):
    made: list[PolicyState] = []

    class Counted(Custom):
        def start(self) -> PolicyState:
            made.append(Custom.start(self))
            return made[-1]

    policy = Counted(rule=lambda step: step.over(0, step.canvas.length, StepKind.REFRESH))
    for _ in range(2):
        runtime.with_policy(policy).generate(torch.arange(5)[None], **OPTIONS)
    assert len(made) == 2 and made[0] is not made[1]
