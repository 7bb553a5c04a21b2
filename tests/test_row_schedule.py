"""Caches by one schedule: which rows every step recomputes, and which options each of them has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiered
from tiered.forward.passes import Pass
from tiered.policies.base import Step
from tiered.policies.registry import make_policy
from tiered.policies.row_schedule import SCHEDULES, RowSchedule, ScheduledRows, row_schedule
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
PROMPTS, BLOCK, ANSWER = (17, 9, 12), 8, 32
PROMPT = max(PROMPTS)
LENGTH = PROMPT + ANSWER
THRESHOLD: dict[str, Any] = {"confidence_threshold": 0.3}
RANDOM: dict[str, Any] = {"remasking": "random", "seed": 2, "steps": 24}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny_gqa", dtype="float32")


def history(runtime: Runtime, policy: str, options: dict[str, Any], rule: dict[str, Any] = THRESHOLD) -> Tensor:
    """All canvases of a left-padded batch."""
    generator = torch.Generator().manual_seed(11)
    ids, mask = torch.full((len(PROMPTS), PROMPT), 499), torch.zeros(len(PROMPTS), PROMPT, dtype=torch.long)
    for row, length in enumerate(PROMPTS):
        ids[row, PROMPT - length :] = torch.randint(0, 480, (length,), generator=generator)
        mask[row, PROMPT - length :] = 1
    out = runtime.with_policy(policy, **options).generate(
        ids,
        attention_mask=mask,
        max_new_tokens=ANSWER,
        block_length=BLOCK,
        stop_at_eos=False,
        output_history=True,
        **rule,
    )
    assert out.history is not None
    return torch.stack(out.history)


# Columns that a sequence recomputes, from its own count of forwards `n`, the number `k` of the step in the block, the
# block's columns [a, b), and `at`: by column, the forward that fixed its token, or None.
def every(*_: Any) -> set[int]:
    return set(range(LENGTH))


def block_rows(n: int, k: int, a: int, b: int, at: list[int | None]) -> set[int]:
    return set(range(a, b))


def undecided(delay: int) -> Callable[..., set[int]]:
    return lambda n, k, a, b, at: {c for c in range(PROMPT, LENGTH) if (date := at[c]) is None or date >= n - delay}


def with_window(window: int) -> Callable[..., set[int]]:
    def rows(n: int, k: int, a: int, b: int, at: list[int | None]) -> set[int]:
        fresh = [c for c in range(PROMPT, LENGTH) if at[c] == n - 1]
        return {c + d for c in fresh for d in range(-(window // 2), window // 2 + 1) if 0 <= c + d < LENGTH}

    return rows


def at_times(n: int, interval: int | None, columns: set[int]) -> set[int]:
    return columns if n == 0 or (interval and n % interval == 0) else set()


IN_PROMPT, BEHIND = set(range(PROMPT)), set(range(PROMPT, LENGTH))
FULL = {PROMPT, PROMPT + 2 * BLOCK}  # first columns of every other block
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], Callable[..., set[int]]]] = [
    (
        "dkv_decode",
        {"refresh_interval": 3, "delay": 2},
        THRESHOLD,
        lambda n, *rest: undecided(2)(n, *rest) | at_times(n, 3, every()),
    ),
    (
        "dkv_decode",
        {"refresh_interval": None, "delay": 0},
        THRESHOLD,
        lambda n, *rest: undecided(0)(n, *rest) | at_times(n, None, every()),
    ),
    (
        "dkv_pd",
        {"refresh_interval": 4},
        THRESHOLD,
        lambda n, *rest: undecided(1)(n, *rest) | at_times(n, 4, BEHIND) | at_times(n, None, IN_PROMPT),
    ),
    ("dkv_prefill", {"prompt_interval": 5}, THRESHOLD, lambda n, *rest: BEHIND | at_times(n, 5, IN_PROMPT)),
    (
        "dkv_greedy",
        {"window": 4, "refresh_interval": 4},
        RANDOM,
        lambda n, *rest: with_window(4)(n, *rest) | at_times(n, 4, every()),
    ),
    (
        "dkv_greedy",
        {"window": 0, "refresh_interval": None},
        RANDOM,
        lambda n, *rest: with_window(0)(n, *rest) | at_times(n, None, every()),
    ),
    (
        "uniform",
        {"next_block_interval": 2},
        THRESHOLD,
        lambda n, k, a, b, at: every() if k == 0 else set(range(a, min(LENGTH, b + BLOCK * (k % 2 == 0)))),
    ),
    (
        "uniform",
        {"next_block_interval": None, "refresh_interval": 3},
        THRESHOLD,
        lambda n, k, a, b, at: every() if k % 3 == 0 else set(range(a, b)),
    ),
    (
        "fast_dllm_dual",
        {"refresh_blocks": 2},
        THRESHOLD,
        lambda n, k, a, b, at: (
            set(range(a, b)) | (every() if k == 0 and a in FULL else set(range(a - BLOCK, a)) if k == 0 else set())
        ),
    ),
    (
        "fast_dllm_prefix",
        {"refresh_interval": 3},
        THRESHOLD,
        lambda n, k, a, b, at: every() if k % 3 == 0 else set(range(a, LENGTH)),
    ),
]


@pytest.mark.parametrize(
    ("policy", "options", "rule", "expected"), ROWS, ids=[f"{row[0]} {n}" for n, row in enumerate(ROWS)]
)
def test_rows_that_a_step_recomputes(
    runtime: Runtime,
    policy: str,
    options: dict[str, Any],
    rule: dict[str, Any],
    expected: Callable[..., set[int]],
    monkeypatch: pytest.MonkeyPatch,
):
    rows_of, ragged = ScheduledRows.rows, []
    dates: dict[int, dict[int, int]] = {}  # by sequence, the forward of its own that fixed each column
    before: dict[int, set[int]] = {}

    def watched(state: ScheduledRows, step: Step) -> Pass:
        made = rows_of(state, step)
        pending = step.canvas.pending(0, LENGTH)
        columns = made.rows.index.expand(step.canvas.batch, -1)
        wanted: list[set[int]] = []
        for number, is_active in enumerate(step.active):
            n = step.forwards[number]
            left = set(pending[number].nonzero()[:, 0].tolist())
            for column in before.get(number, left) - left:
                dates.setdefault(number, {})[column] = n - 1
            before[number] = left
            if not is_active:
                continue
            at = [dates.get(number, {}).get(column) for column in range(LENGTH)]
            rows = expected(n, step.number, step.start, step.stop, at)
            if step.next_commits is not None:
                rows |= {step.start + c for c in step.next_commits[number].nonzero()[:, 0].tolist()}
            pads = int(step.canvas.pads[number])
            fed = columns[number] if made.rows.valid is None else columns[number][made.rows.valid[number]]
            assert {c for c in fed.tolist() if c >= pads} == {c for c in rows if c >= pads}, (number, n, step.number)
            wanted.append(rows)
        ragged.append(len({len(rows) for rows in wanted}) > 1)
        return made

    monkeypatch.setattr(ScheduledRows, "rows", watched)
    history(runtime, policy, options, rule)
    assert len(ragged) > 4
    if policy.startswith("dkv") and rule is THRESHOLD:
        assert any(ragged), "sequences all keep step: this shows nothing about their own clocks"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_row_of_the_table_has_its_own_options_alone(name: str):
    policy = make_policy(name)
    assert policy == row_schedule(name) and policy.name == name == str(policy) and not policy.changed
    assert policy.options == dict(SCHEDULES[name].options)
    others = {option for row in SCHEDULES.values() for option in row.options} - policy.options.keys()
    for option in (*others, "rows", "name"):
        told = f"unknown option of policy '{name}' '{option}'"
        if not policy.options:
            told = f"'{option}' is no option of policy '{name}'"
        with pytest.raises(ValueError, match=told):
            make_policy(name, **{option: 1})


def test_a_policy_prints_options_off_their_defaults():
    policy = make_policy("fast_dllm_dual", refresh_interval=4)
    assert str(policy) == "fast_dllm_dual(refresh_interval=4)"
    assert policy.options == {"refresh_interval": 4, "refresh_blocks": 1} and policy.changed == {"refresh_interval": 4}


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"rows": "blocks"}, ValueError, "did you mean 'block'"),
        ({"delay": True}, TypeError, "delay"),
        ({"delay": -1}, ValueError, "delay"),
        ({"window": 1.5}, TypeError, "window"),
        ({"prompt_interval": 0}, ValueError, "prompt_interval"),
        ({"prompt_interval": "block"}, TypeError, "prompt_interval"),
        ({"next_block_interval": 0}, ValueError, "next_block_interval"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], named: str):
    with pytest.raises(error, match=named):
        RowSchedule(**{"name": "dkv_greedy", "rows": "next_commits", **options})


def test_an_order_that_is_not_known_before_is_refused(runtime: Runtime):
    with pytest.raises(ValueError, match="remasking = 'random' is allowed, not 'low_confidence'"):
        history(runtime, "dkv_greedy", {})
