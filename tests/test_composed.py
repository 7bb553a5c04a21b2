"""Policies from pieces: which rows every step recomputes, what equals what, and what does not go together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiered
from tiered.policies.base import Step, StepRows
from tiered.policies.composed import Composed
from tiered.policies.polestar.update import Update
from tiered.policies.recipe import RecipeState
from tiered.policies.registry import make_policy
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


EQUAL: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "fast_dllm_dual", {}),
    ({"rows": "suffix"}, "fast_dllm_prefix", {}),
    ({"next_block_interval": 2}, "uniform", {"next_block_interval": 2}),
    ({"rows": "undecided", "prompt_interval": 5, "response_interval": 5}, "dkv_decode", {"refresh_interval": 5}),
    (
        {"rows": "undecided", "delay": 0, "prompt_interval": None, "response_interval": 3},
        "dkv_pd",
        {"delay": 0, "refresh_interval": 3},
    ),
    ({"rows": "answer", "prompt_interval": None, "response_interval": None}, "dkv_prefill", {}),
    ({"updates": {"clusters": 4, "top_m": 2}}, "polestar", {"clusters": 4, "top_m": 2}),
    (
        {"updates": {"top_m": 2}, "prompt_interval": "3 blocks", "response_interval": "3 blocks"},
        "polestar",
        {"top_m": 2, "refresh": "drift", "refresh_blocks": 3},
    ),
]


@pytest.mark.parametrize(("pieces", "policy", "options"), EQUAL, ids=[f"{row[1]} {n}" for n, row in enumerate(EQUAL)])
def test_pieces_make_the_named_policies(runtime: Runtime, pieces: dict[str, Any], policy: str, options: dict[str, Any]):
    assert torch.equal(history(runtime, "composed", pieces), history(runtime, policy, options))


def test_pieces_make_the_greedy_policy(runtime: Runtime):
    pieces = {"rows": "upcoming", "window": 4, "prompt_interval": 2, "response_interval": 2}
    assert torch.equal(history(runtime, "composed", pieces, RANDOM), history(runtime, "dkv_greedy", {}, RANDOM))


# What a sequence recomputes, from its own count of forwards `n`, the number `k` of the step in the block, the block's
# columns [a, b), and `at`: by column, the forward that fixed its token (None: none has).
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
        "composed",
        {"prompt_interval": 4, "response_interval": 3},
        THRESHOLD,
        lambda n, k, a, b, at: set(range(a, b)) | at_times(n, 4, IN_PROMPT) | at_times(n, 3, BEHIND),
    ),
    (
        "composed",
        {"rows": "suffix", "prompt_interval": "2 blocks", "response_interval": None},
        THRESHOLD,
        lambda n, k, a, b, at: (
            set(range(a, LENGTH))
            | at_times(n, None, every())
            | (IN_PROMPT if k == 0 and (a - PROMPT) // BLOCK % 2 == 0 else set())
        ),
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
    rows_of, ragged = RecipeState.rows, []
    dates: dict[int, dict[int, int]] = {}  # by sequence, the forward of its own that fixed each column
    before: dict[int, set[int]] = {}

    def watched(state: RecipeState, step: Step) -> StepRows:
        made = rows_of(state, step)
        pending = step.canvas.pending(0, LENGTH)
        columns = made.rows.positions(step.canvas.batch, pending.device)
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
            if step.upcoming is not None:
                rows |= {step.start + c for c in step.upcoming[number].nonzero()[:, 0].tolist()}
            pads = int(step.canvas.pads[number])
            fed = columns[number] if made.rows.valid is None else columns[number][made.rows.valid[number]]
            assert {c for c in fed.tolist() if c >= pads} == {c for c in rows if c >= pads}, (number, n, step.number)
            wanted.append(rows)
        ragged.append(len({len(rows) for rows in wanted}) > 1)
        return made

    monkeypatch.setattr(RecipeState, "rows", watched)
    history(runtime, policy, options, rule)
    assert len(ragged) > 4
    if policy.startswith("dkv") and rule is THRESHOLD:
        assert any(ragged), "sequences all keep step: this shows nothing about their own clocks"


def test_a_longer_prompt_interval_with_drift_updates_renews_the_response(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
):
    # Nothing but the response is renewed where a block begins, and nothing at all in between: that is the plain policy.
    updates: dict[str, Any] = {"codec": "raw", "clusters": 6, "top_m": 1, "update_threshold": 1000}
    pieces: dict[str, Any] = {"prompt_interval": None, "response_interval": "block"}
    with_drift = history(runtime, "composed", {**pieces, "updates": updates})
    monkeypatch.setattr(Update, "_most_drifted", lambda self, *_, **__: [])
    alone = history(runtime, "composed", {**pieces, "updates": updates})
    assert torch.equal(alone, history(runtime, "composed", pieces))
    assert not torch.equal(alone, with_drift), "the most drifted cluster of the prompt changes nothing here"


def test_everything_renewed_equals_none(runtime: Runtime):
    updates: dict[str, Any] = {"codec": "raw", "top_m": 1000, "update_threshold": 0}
    pieces = {"prompt_interval": "4 blocks", "response_interval": "block", "updates": updates}
    assert torch.equal(history(runtime, "composed", pieces), history(runtime, "none", {}))


@pytest.mark.parametrize(
    ("pieces", "named"),
    [
        ({"delay": 1}, "delay"),
        ({"rows": "upcoming", "delay": 1}, "delay"),
        ({"window": 4}, "window"),
        ({"rows": "suffix", "next_block_interval": 4}, "next_block_interval"),
        ({"rows": "undecided", "next_block_interval": 4}, "next_block_interval"),
        ({"rows": "upcoming", "next_block_interval": 4}, "next_block_interval"),
        ({"rows": "answer", "response_interval": 4}, "response_interval"),
        ({"rows": "suffix", "updates": {}}, "updates"),
        ({"next_block_interval": 4, "updates": {}}, "updates"),
        ({"prompt_interval": 50, "updates": {}}, "prompt_interval"),
        ({"prompt_interval": "4 blocks", "response_interval": "2 blocks", "updates": {}}, "response_interval"),
        ({"updates": {"refresh": "drift"}}, "refresh"),
        ({"rows": "blocks"}, "did you mean|block"),
        ({"prompt_interval": "0 blocks"}, "prompt_interval"),
        ({"prompt_interval": "blocks"}, "prompt_interval"),
        ({"response_interval": 0}, "response_interval"),
        ({"updates": {"top": 1}}, "top_m"),
    ],
)
def test_what_does_not_go_together(pieces: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        make_policy("composed", **pieces)


@pytest.mark.parametrize("pieces", [{"updates": 4}, {"delay": True, "rows": "undecided"}, {"prompt_interval": 1.5}])
def test_wrong_types(pieces: dict[str, Any]):
    with pytest.raises(TypeError):
        Composed(**pieces)


@pytest.mark.parametrize(("policy", "options"), [("dkv_greedy", {}), ("composed", {"rows": "upcoming"})])
def test_an_order_that_is_not_known_before_is_refused(runtime: Runtime, policy: str, options: dict[str, Any]):
    with pytest.raises(ValueError, match="remasking = 'random' is allowed, not 'low_confidence'"):
        history(runtime, policy, options)
