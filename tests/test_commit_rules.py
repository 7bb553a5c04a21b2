"""Commit rules against plain loops over one sequence at a time."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from baselines import parity
from hypothesis import example, given
from hypothesis import strategies as st

from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule
from tiered.decoding.rules.drift_aware import DriftAware
from tiered.decoding.rules.quota import Static
from tiered.decoding.rules.registry import make_commit_rule
from tiered.decoding.rules.threshold import Factor, Threshold
from tiered.decoding.rules.timestep import Origin, Timestep

# A confidence of each pending row, None if nothing is pending. Few values, so that ties are common.
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5 + 2**-40, 0.75, 0.9, 1.0])
ROWS = st.integers(1, 9).flatmap(
    lambda length: st.lists(
        st.lists(st.none() | CONFIDENCES | st.floats(0, 1), min_size=length, max_size=length), min_size=1, max_size=3
    )
)
Row = list[float | None]
CPU = torch.device("cpu")


def candidates(rows: list[Row]) -> Candidates:
    confidence = torch.tensor([[-math.inf if c is None else c for c in row] for row in rows], dtype=torch.float64)
    pending = torch.tensor([[c is not None for c in row] for row in rows])
    tokens, drift = torch.zeros_like(pending, dtype=torch.long), torch.full(pending.shape, torch.nan)
    return Candidates(tokens=tokens, confidence=confidence, pending=pending, shift=drift)


def chosen(rule: CommitRule, rows: list[Row], steps: int = 1, seed: int = 0) -> list[list[int]]:
    """Columns that the rule fixes in the first step of a block, by sequence."""
    state, given = rule.start(steps, Generators(seed, len(rows), CPU)), candidates(rows)
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


def left_by_shares(row: Row, bound: float, steps: int) -> list[int]:
    """Masks after each forward of a block, by the loop of Fast-dLLM's Dream code without a cache."""
    waiting, left = [c for c, _ in best_first(row)], []
    share, over, step = len(waiting) // steps, 0, 0
    while step < steps:
        taken, over = share + over, 0
        kept = waiting[:1]
        for confidence in waiting[1:taken]:
            if confidence >= bound:
                kept.append(confidence)
                continue
            over += 1
            if step >= steps - 1:
                share, steps = 0, steps + 1
        waiting = waiting[len(kept) :]
        left.append(len(waiting))
        step += 1
    return left


@given(st.integers(1, 4), st.lists(CONFIDENCES, min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@example(steps=8, part=[0.9, 0.0, 0.0, 0.0], bound=0.5)
def test_threshold_in_shares(steps: int, part: list[float], bound: float):
    whole: Row = [*part] * steps  # the steps share the tokens out evenly, or the authors' code stops
    rows: list[Row] = [whole, [0.3] + [None] * (len(whole) - 1)]  # the second has a share of its own
    state = parity.rule("threshold", confidence_threshold=bound).start(steps, Generators(0, 2, CPU))
    state.begin_block(candidates(rows).pending)
    left: list[int] = []
    while best_first(rows[0]):
        fixed = state.choose(candidates(rows)).tolist()
        rows = [[None if now else c for c, now in zip(*each, strict=True)] for each in zip(rows, fixed, strict=True)]
        left.append(len(best_first(rows[0])))
    assert left == left_by_shares(whole, bound, steps)


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


RULES: list[CommitRule] = [
    Static(),
    Threshold(confidence_threshold=0.9),
    parity.rule("threshold", confidence_threshold=0.9),
    Factor(factor=1.0),
    DriftAware(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_ties_go_left(rule: CommitRule):
    assert chosen(rule, [[None, 0.5, 0.5, 0.2, 0.5, 0.1]], steps=5) == [[1]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("confidence", [0.0, math.nan])
def test_a_step_always_commits(rule: CommitRule, confidence: float):
    """A block that never ended would hang the call."""
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
    state = Static().start(steps, Generators(0, 1, CPU))
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
    first, second = (rule.start(3, Generators(0, 1, CPU)) for _ in range(2))
    for state in (first, second):
        state.begin_block(given.pending)
    assert [int(state.choose(given).sum()) for state in (first, first, second, second)] == [2, 1, 2, 1]


# ---- Dream's schedule ----


@pytest.mark.parametrize(
    ("tokens", "steps", "floor", "counts"),
    [
        # In exact numbers the last two steps would share 1 + (31 of 32) tokens and no step would fix none.
        (32, 32, 1e-3, [0] + [1] * 30 + [2]),
        (32, 12, 1e-3, [2] * 5 + [3] * 6 + [4]),
        (32, 16, 1e-3, [1] + [2] * 14 + [3]),
        (32, 1, 1e-3, [32]),
        (7, 3, 1e-3, [2, 2, 3]),
        (9, 4, 0.5, [1, 1, 1, 6]),  # the schedule ends while half is masked, and the last step takes it all
        (4, 8, 1e-3, [0] * 5 + [1, 1, 2]),  # more steps than tokens
        (20, 5, 0.5, [2, 1, 2, 2, 13]),  # float64 would fix 1 and then 2
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_timestep_schedule(tokens: int, steps: int, floor: float, counts: list[int], temperature: float):
    assert sum(counts) == tokens
    rule = Timestep(schedule_floor=floor, confidence_temperature=temperature)
    state = rule.start(steps, Generators(0, 1, CPU))
    for _ in range(2):  # a second block begins the schedule again
        row: Row = [float(i % 3) for i in range(tokens)]
        state.begin_block(candidates([row]).pending)
        for count in counts:
            fixed = state.choose(candidates([row]))[0].nonzero().flatten().tolist()
            assert len(fixed) == count and all(row[i] is not None for i in fixed)
            if not temperature:
                assert fixed == sorted(i for _, i in best_first(row)[:count])
            row = [None if i in fixed else c for i, c in enumerate(row)]
        assert row == [None] * tokens


def test_timestep_ties_go_left_and_a_block_ends():
    assert chosen(Timestep(), [[None, 0.5, 0.5, 0.2, 0.5, 0.1]], steps=3) == [[1]]
    assert chosen(Timestep(), [[None, math.nan, math.nan], [0.0, None, None]]) == [[1, 2], [0]]


def test_timestep_counts_masks_that_it_is_not_shown():
    """Under a policy that computes only some of a block's rows; and sequence by sequence."""
    state = Timestep().start(4, Generators(0, 2, CPU))
    everything: list[Row] = [[0.1] * 8, [0.2, 0.1, 0.2, 0.1, None, None, None, None]]
    state.begin_block(candidates(everything).pending)
    # Of 8 and 4 masks a little less than a quarter is due, but a sequence with shown masks fixes one at least.
    shown: list[Row] = [[None] * 5 + [0.1, 0.3, 0.2], [None, 0.5, 0.4, None, None, None, None, None]]
    assert state.choose(candidates(shown)).nonzero().tolist() == [[0, 6], [1, 1]]
    # A third of 7 and 3, however many are shown.
    shown = [[None] * 5 + [0.1, None, 0.2], [0.1, None, 0.4, None, None, None, None, None]]
    assert state.choose(candidates(shown)).nonzero().tolist() == [[0, 5], [0, 7], [1, 2]]
    nothing: list[Row] = [[None] * 8] * 2
    assert not state.choose(candidates(nothing)).any()
    # The last step, and any that has to follow it, takes all shown masks.
    for last in ([[0.1, 0.2, *[None] * 6], [0.1, *[None] * 7]], [[None, None, 0.1, 0.1, *[None] * 4], nothing[0]]):
        given = candidates(last)
        assert torch.equal(state.choose(given), given.pending)


def test_drawn_tokens_follow_the_softmax_without_replacement():
    sequences, blocks, temperature = 1000, 20, 0.5
    row: Row = [-0.4, None, -0.1, -0.9, -0.2, -0.3]
    weights = {i: math.exp(c / temperature) for i, c in enumerate(row) if c is not None}
    p = {i: weight / sum(weights.values()) for i, weight in weights.items()}
    state = Timestep(confidence_temperature=temperature).start(2, Generators(5, sequences, CPU))
    given, seen = candidates([row] * sequences), Counter[tuple[int, ...]]()
    for _ in range(blocks):
        state.begin_block(given.pending)
        fixed = state.choose(given)  # two of five
        seen.update(tuple(each.nonzero().flatten().tolist()) for each in fixed)
    chi_square = 0.0
    for i, j in combinations(p, 2):
        expected = blocks * sequences * p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))
        chi_square += (seen.pop((i, j)) - expected) ** 2 / expected
    assert not seen
    assert chi_square < 27.9  # 9 degrees of freedom: one seed in a thousand is above


@pytest.mark.parametrize("steps", [2, 5])
def test_origin_fixes_each_token_by_itself(steps: int):
    sequences, columns = 2000, 10
    rows: list[Row] = [[None, *[0.9] * 4, *[0.1] * 5]] * sequences
    state, given = Origin(schedule_floor=0.01).start(steps, Generators(1, sequences, CPU)), candidates(rows)
    state.begin_block(given.pending)
    pending, time = given.pending, [1 - 0.99 * i / steps for i in range(steps)]
    for now, then in pairwise(time):
        fixed = state.choose(replace(given, pending=pending))
        assert not (fixed & ~pending).any()
        share = 1 - then / now
        # In every column by itself, whatever its confidence; six standard deviations of chance.
        for column in range(1, columns):
            count = int(pending[:, column].sum())
            off = abs(int(fixed[:, column].sum()) - share * count)
            assert off < 6 * math.sqrt(count * share * (1 - share))
        left, right = (fixed[pending[:, 1] & pending[:, 2]][:, column].double() for column in (1, 2))
        if len(left) > 500:
            assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 5 / math.sqrt(len(left))
        pending = pending & ~fixed
    for _ in range(2):  # the last step, and one that has to follow it
        assert pending.any() and torch.equal(state.choose(replace(given, pending=pending)), pending)


DRAWING: list[CommitRule] = [Origin(), Timestep(confidence_temperature=0.4)]


@pytest.mark.parametrize("rule", DRAWING, ids=lambda rule: rule.name)
def test_a_batch_draws_what_each_sequence_draws_alone(rule: CommitRule):
    """Though the second has less to do and waits, and the first leaves after two blocks of four."""
    rows: list[Row] = [[0.1, 0.2] * 6, [None] * 9 + [0.3, 0.2, 0.1], [0.5, 0.2, 0.4] * 4]

    def blocks(seed: int, sequences: list[int]) -> list[dict[int, list[list[int]]]]:
        """Columns that each step of each block fixes, by sequence."""
        noise, done = Generators(seed, len(sequences), CPU), []
        state = rule.start(6, noise)
        for block in range(4):
            if block == 2 and len(sequences) == 3:
                noise.keep([1, 2])
                state.keep([1, 2])
                sequences = [1, 2]
            given = candidates([rows[i] for i in sequences])
            pending, steps = given.pending, {i: [] for i in sequences}
            state.begin_block(pending)
            while pending.any():
                confidence = given.confidence.masked_fill(~pending, -math.inf)
                fixed = state.choose(replace(given, pending=pending, confidence=confidence))
                for place, i in enumerate(sequences):
                    if pending[place].any():
                        steps[i].append(fixed[place].nonzero().flatten().tolist())
                pending = pending & ~fixed
            done.append(steps)
        return done

    together = blocks(7, [0, 1, 2])
    assert len(together[0][1]) <= len(together[0][0])
    for i in range(3):
        alone = blocks(7 + i, [i])
        for block, steps in enumerate(together):
            if i in steps:
                assert steps[i] == alone[block][i]
        assert alone[0] != alone[1]
    assert blocks(8, [0])[0] != blocks(7, [0])[0]


def test_rules_that_draw():
    assert [rule.draws for rule in (Static(), Timestep(), *DRAWING)] == [False, False, True, True]


@pytest.mark.parametrize("name", ["timestep", "origin"])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schedule_floor": 0}, "schedule_floor = 0; a number above 0"),
        ({"schedule_floor": 1.0}, "schedule_floor = 1.0; a number above 0"),
        ({"schedule_floor": -0.5}, "schedule_floor = -0.5"),
        ({"schedule_floor": math.nan}, "schedule_floor = nan"),
        ({"schedule_floor": "low"}, "schedule_floor = 'low'"),
        ({"confidence_temperature": -1}, "confidence_temperature"),
    ],
)
def test_options_of_the_schedule(name: str, options: dict[str, Any], error: str):
    with pytest.raises((TypeError, ValueError), match=error):
        make_commit_rule(name, **options)
