"""Commit rules against plain loops over one sequence at a time."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tiered.commit.base import Candidates, CommitRule
from tiered.commit.drift_aware import DriftAware
from tiered.commit.factor import Factor
from tiered.commit.static import Static
from tiered.commit.threshold import Threshold

# A confidence of each pending row, None where nothing is pending. Few values, so that ties are common.
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5 + 2**-40, 0.75, 0.9, 1.0])
ROWS = st.integers(1, 9).flatmap(
    lambda length: st.lists(
        st.lists(st.none() | CONFIDENCES | st.floats(0, 1), min_size=length, max_size=length), min_size=1, max_size=3
    )
)
Row = list[float | None]


def candidates(rows: list[Row]) -> Candidates:
    confidence = torch.tensor([[-math.inf if c is None else c for c in row] for row in rows], dtype=torch.float64)
    pending = torch.tensor([[c is not None for c in row] for row in rows])
    tokens, drift = torch.zeros_like(pending, dtype=torch.long), torch.full(pending.shape, torch.nan)
    return Candidates(tokens=tokens, confidence=confidence, pending=pending, drift=drift)


def chosen(rule: CommitRule, rows: list[Row], steps: int = 1) -> list[list[int]]:
    """Columns that the rule fixes in the first step of a block, by sequence."""
    state, given = rule.start(steps), candidates(rows)
    state.begin_block(given.pending)
    return [row.nonzero().flatten().tolist() for row in state.choose(given)]


def best_first(row: Row) -> list[tuple[float, int]]:
    """Confidence and column of the pending rows; of equals the leftmost first."""
    return sorted(((c, i) for i, c in enumerate(row) if c is not None), key=lambda pair: (-pair[0], pair[1]))


def by_threshold(row: Row, bound: float) -> list[int]:
    ranked = best_first(row)
    return sorted(i for n, (c, i) in enumerate(ranked) if n == 0 or c >= bound)


def by_factor(row: Row, factor: float) -> list[int]:
    """The loop of Fast-dLLM's `get_transfer_index_dynamic`."""
    ranked = best_first(row)
    if not ranked:
        return []
    bounds = [1 - factor / (n + 1) for n in range(1, len(ranked) + 1)]
    bounds[0] = -1
    top = 0
    for top in range(len(bounds)):
        if ranked[top][0] < bounds[top]:
            break
    if top in (0, len(bounds) - 1):
        top += 1
    return sorted(i for _, i in ranked[:top])


@given(ROWS, st.sampled_from([0.0, 0.5, 0.9, 1.0]) | st.floats(0, 1))
def test_threshold(rows: list[Row], bound: float):
    assert chosen(Threshold(confidence_threshold=bound), rows) == [by_threshold(row, bound) for row in rows]


@given(ROWS, st.sampled_from([0.5, 1.0, 1.5, 2.0]) | st.floats(0.01, 10))
@example([[0.75, 0.0, 0.0]], 1.0)
@example([[0.75, 0.75, 0.0]], 1.0)
def test_factor(rows: list[Row], factor: float):
    assert chosen(Factor(factor=factor), rows) == [by_factor(row, factor) for row in rows]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ([0.0, 0.1, 0.2, 0.3], [3]),  # the first always passes
        ([0.7, 0.0, 0.9, 0.0], [0, 2]),  # 0.7 is at least 1 - 1/3; 0 is below 1 - 1/4
        ([0.6, 0.0, 0.9, 0.0], [2]),
        ([0.7, 0.0, 0.9], [0, 1, 2]),  # all but the last of three pass: it goes with them
        ([0.0, 0.9], [0, 1]),  # so does the second of two, always
        ([None, 0.1, None], [1]),
        ([None, None], []),
    ],
)
def test_factor_of_one(row: Row, columns: list[int]):
    assert chosen(Factor(factor=1.0), [row]) == [columns]


RULES: list[CommitRule] = [Static(), Threshold(confidence_threshold=0.9), Factor(factor=1.0), DriftAware()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_ties_go_left(rule: CommitRule):
    assert chosen(rule, [[None, 0.5, 0.5, 0.2, 0.5, 0.1]], steps=5) == [[1]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("confidence", [0.0, math.nan])
def test_a_step_always_commits(rule: CommitRule, confidence: float):
    """Whatever the model says: a block that never ended would hang the call."""
    rows: list[Row] = [[None, confidence, confidence, confidence, confidence], [confidence] + [None] * 4, [None] * 5]
    fixed = chosen(rule, rows, steps=4)
    assert [bool(columns) for columns in fixed] == [True, True, False]
    assert all(rows[i][column] is not None for i, columns in enumerate(fixed) for column in columns)


@pytest.mark.parametrize(
    ("tokens", "steps", "quotas"),
    [
        (32, 32, [1] * 32),
        (32, 5, [7, 7, 6, 6, 6]),
        (8, 3, [3, 3, 2]),
        (8, 8, [1] * 8),
        (8, 1, [8]),
        (7, 4, [2, 2, 2, 1]),
        (4, 6, [1, 1, 1, 1, 0, 0]),
    ],
)
def test_static_schedule(tokens: int, steps: int, quotas: list[int]):
    assert sum(quotas) == tokens
    state = Static().start(steps)
    for _ in range(2):  # a second block begins the schedule again
        row: Row = [float(i % 3) for i in range(tokens)]
        state.begin_block(candidates([row]).pending)
        for quota in quotas:
            (fixed,) = state.choose(candidates([row])).nonzero(as_tuple=True)[1:]
            assert fixed.tolist() == sorted(i for _, i in best_first(row)[:quota])
            row = [None if i in fixed else c for i, c in enumerate(row)]


def test_static_quotas_are_of_each_sequence():
    rows: list[Row] = [[0.1, 0.2, 0.3, 0.4, 0.5], [None, 0.2, 0.3, 0.2, None], [None, None, None, None, 0.1]]
    assert chosen(Static(), rows, steps=2) == [[2, 3, 4], [1, 2], [4]]


def test_state_belongs_to_one_call():
    rule, given = Static(), candidates([[0.1, 0.2, 0.3, 0.4]])
    first, second = rule.start(3), rule.start(3)
    for state in (first, second):
        state.begin_block(given.pending)
    assert [int(state.choose(given).sum()) for state in (first, first, second, second)] == [2, 1, 2, 1]
