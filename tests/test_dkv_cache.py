"""The token sequences and rows of dKV-Cache's authors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from baselines import parity
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.decoding.generators import Generators
from tiered.models.base import DiffusionModel
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens" / "llada"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDENS / "dkv_cache.json").read_text())
RECORDED = load_file(GOLDENS / "dkv_cache.safetensors")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada_tiny", policy="none", dtype="float32")


def in_order(order: Tensor) -> Callable[..., Tensor]:
    """Scores that rank columns as `order` [blocks, length] does, the row of the block that is asked for."""

    def confidence(
        _: Generators, stops: list[int], pads: list[int], start: int, stop: int, active: list[bool]
    ) -> Tensor:
        (length,) = stops
        block = (start - (length - len(order) * (stop - start))) // (stop - start)
        ranks = torch.empty(length, dtype=torch.float64)
        ranks[order[block].long()] = -torch.arange(length, dtype=torch.float64)
        return ranks[start:stop].expand(len(pads), -1).clone()

    return confidence


@pytest.mark.parametrize("case", CASES)
def test_parity_with_the_authors_code(runtime: Runtime, case: str, monkeypatch: pytest.MonkeyPatch):
    recorded = CASES[case]
    options = dict(recorded["kwargs"])
    interval, window = options.pop("cache_reloading_step", None), options.pop("window_size", None)
    if not options.pop("enable_cache"):
        runtime = runtime.with_policy("none")
    elif recorded["kind"] == "decode":
        runtime = runtime.with_policy(parity.policy("dkv_decode", refresh_interval=interval))
    else:
        runtime = runtime.with_policy(parity.policy("dkv_greedy", refresh_interval=interval, window=window))
        monkeypatch.setattr(Generators, "confidence", in_order(RECORDED[f"{case}.denoising_index"]))
    out = runtime.generate(RECORDED[f"{case}.prompt"].long(), stop_at_eos=False, output_history=True, **options)
    assert out.history is not None
    assert torch.equal(torch.stack(out.history).int(), RECORDED[f"{case}.history"])
    assert torch.equal(out.sequences, RECORDED[f"{case}.final"].long())
    assert out.rows_per_step == recorded["fwd_seq_lens"]


def by_hand(model: DiffusionModel, prompt: Tensor, block: int, wanted: Callable[[int, list[int]], set[int]]) -> Tensor:
    """All canvases of one sequence, one token a step; `wanted` says the rows of forward n, from the forwards that fixed
    each column (a large number: none has)."""
    first, length, shape = prompt.shape[1], prompt.shape[1] + 32, model.shape
    shift = shape.prediction_shift
    ids = torch.cat([prompt, prompt.new_full((1, 32), model.mask_token_id)], dim=1)
    empty = (1, shape.kv_heads, length, shape.head_dim)
    buffer = [(torch.zeros(empty), torch.zeros(empty)) for _ in range(shape.layers)]
    fixed, history = [-1] * first + [10**6] * 32, [ids.clone()]
    for forward in range(32):
        rows = torch.tensor(sorted(wanted(forward, fixed) if forward else range(length)))
        probability = parity.logits_of(model, ids, rows, buffer)[0].double().softmax(dim=-1)
        stop = first + (forward // block + 1) * block
        best = zip((-probability.amax(dim=1)).tolist(), (rows + shift).tolist(), strict=True)
        column = min((rank, c) for rank, c in best if c < stop and fixed[c] == 10**6)[1]
        ids[0, column] = probability[rows.tolist().index(column - shift)].argmax()
        fixed[column] = forward
        history.append(ids.clone())
    return torch.stack(history)


def late(delay: int) -> Callable[[int, list[int]], set[int]]:
    return lambda forward, fixed: {c for c in range(24, 56) if fixed[c] >= forward - delay}


ANSWER, ALL = set(range(24, 56)), set(range(56))
BY_HAND: dict[str, tuple[str, dict[str, Any], Callable[[int, list[int]], set[int]]]] = {
    "decode": ("dkv_decode", {"refresh_interval": 5}, lambda n, at: late(1)(n, at) | (set() if n % 5 else ALL)),
    "decode, no delay": ("dkv_decode", {"refresh_interval": None, "delay": 0}, late(0)),
    "decode, long delay": (
        "dkv_decode",
        {"refresh_interval": 7, "delay": 3},
        lambda n, at: late(3)(n, at) | (set() if n % 7 else ALL),
    ),
    "prefill": ("dkv_prefill", {}, lambda n, at: ANSWER),
    "pd": ("dkv_pd", {"refresh_interval": 4}, lambda n, at: late(1)(n, at) | (set() if n % 4 else ANSWER)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("block", [32, 8])
@pytest.mark.parametrize("variant", BY_HAND)
def test_the_paper_s_variants_by_hand(runtime: Runtime, variant: str, block: int):
    policy, options, wanted = BY_HAND[variant]
    prompt = torch.randint(0, 480, (1, 24), generator=torch.Generator().manual_seed(7))
    out = runtime.with_policy(policy, **options).generate(
        prompt, max_new_tokens=32, block_length=block, stop_at_eos=False, output_history=True
    )
    assert out.history is not None
    assert torch.equal(torch.stack(out.history), by_hand(runtime.model, prompt, block, wanted))


# ---- rows that predict the token behind their own ----


@pytest.fixture(scope="module")
def shifted() -> Runtime:
    return tiered.from_pretrained(GOLDENS.parent / "dream" / "dream_tiny", policy="none", dtype="float32")


def open_rows(n: int, at: list[int], block: int, delay: int = 1) -> set[int]:
    """Rows 23 to 55 that are not kept in forward n: 23 predicts the answer's first token, 55 nothing."""
    own = {row for row in range(24, 56) if at[row] >= n - delay}
    predicted = {row for row in range(23, 55) if at[row + 1] >= n - delay} | (own & {55})
    return own | predicted


SHIFTED: dict[str, tuple[str, dict[str, Any], Callable[[int, list[int], int], set[int]]]] = {
    "decode": (
        "dkv_decode",
        {"refresh_interval": 7},
        lambda n, at, block: open_rows(n, at, block) | (set() if n % 7 else ALL),
    ),
    "decode, long delay": (
        "dkv_decode",
        {"refresh_interval": None, "delay": 3},
        lambda n, at, block: open_rows(n, at, block, 3),
    ),
    "pd": (
        "dkv_pd",
        {"refresh_interval": 4},
        lambda n, at, block: open_rows(n, at, block) | (set() if n % 4 else ANSWER | {23}),
    ),
    "prefill": ("dkv_prefill", {}, lambda n, at, block: ANSWER | {23}),
}


@pytest.mark.parametrize("block", [32, 8])
@pytest.mark.parametrize("variant", SHIFTED)
def test_rows_of_two_tokens_by_hand(shifted: Runtime, variant: str, block: int):
    policy, options, wanted = SHIFTED[variant]
    prompt, counts = torch.randint(0, 480, (1, 24), generator=torch.Generator().manual_seed(7)), []

    def counted(forward: int, fixed: list[int]) -> set[int]:
        rows = wanted(forward, fixed, block)
        counts.append(len(rows))
        return rows

    expected = by_hand(shifted.model, prompt, block, counted)
    out = shifted.with_policy(policy, **options).generate(
        prompt, max_new_tokens=32, block_length=block, stop_at_eos=False, output_history=True
    )
    assert out.history is not None
    assert torch.equal(torch.stack(out.history), expected)
    assert out.rows_per_step == [56, *counts]


@pytest.mark.parametrize("policy", ["dkv_decode", "dkv_pd"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"refresh_interval": 0}, ValueError, "refresh_interval = 0"),
        ({"delay": 1.5}, TypeError, "delay = 1.5"),
        ({"parity": True}, ValueError, "unknown option of policy 'dkv_.*' 'parity'"),
        ({"shift_caching": "un"}, ValueError, "unknown option of policy 'dkv_.*' 'shift_caching'"),
    ],
)
def test_options_out_of_range(policy: str, options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make_policy(policy, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift_caching": "unright"}, "did you mean 'un_right'"),
        ({"shift_caching": None}, "shift_caching"),
        ({"shift_caching": "right"}, "'right': .* 'un' and 'un_right' are"),
    ],
)
def test_options_of_the_authors_code_out_of_range(options: dict[str, Any], message: str):
    for name in ("dkv_decode", "dkv_pd"):
        with pytest.raises(ValueError, match=message):
            parity.policy(name, **options)
