"""From logits to candidates: the token, its confidence, and the random streams behind both."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.base import Candidates
from tiered.decoding.sampling import drawn_from, propose
from tiered.decoding.sampling_options import CONFIDENCES, Sampling

CPU = torch.device("cpu")
MASK = 4


def random_logits(*shape: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(scale)


def proposed(
    logits: Tensor,
    pending: Tensor | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    times: int = 1,
    **options: Any,
) -> Candidates:
    """The candidates of the last of `times` steps; `logits` stay as they are, `options` are those of `Sampling`."""
    pending = torch.ones(logits.shape[:2], dtype=torch.bool) if pending is None else pending
    streams, sampling = Generators(seed, len(logits), CPU), Sampling(temperature=temperature, **options)
    for _ in range(times - 1):
        propose(opened(logits, pending, sampling, streams))
    return propose(opened(logits, pending, sampling, streams))


def opened(logits: Tensor, pending: Tensor, sampling: Sampling, streams: Generators) -> OpenBlock:
    remaining = pending.sum(dim=1).tolist()
    return OpenBlock(
        logits=logits.clone(), tokens=torch.full_like(pending, MASK, dtype=torch.long), pending=pending,
        remaining=remaining, mask_token_id=MASK, sampling=sampling, streams=streams,
    )  # fmt: skip


def softmax_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Probability of `tokens`, in float64 throughout, the mask token's share included."""
    return logits.double().softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_never_proposed(temperature: float):
    logits = random_logits(2, 50, 8)
    logits[..., MASK] = 30.0  # the argmax everywhere
    found = proposed(logits, temperature=temperature)
    assert (found.tokens != MASK).all()
    if not temperature:
        others = logits.clone()
        others[..., MASK] = -math.inf
        assert torch.equal(found.tokens, others.argmax(-1))
    # It keeps its share of the probability: if the model wants a mask, no other token is certain.
    assert found.confidence.max() < 1e-4
    torch.testing.assert_close(found.confidence, softmax_at(logits, found.tokens), rtol=1e-5, atol=0)


def test_the_argmax_without_temperature():
    logits = random_logits(3, 20, 40)
    logits[..., MASK] = -10.0
    assert torch.equal(proposed(logits).tokens, logits.argmax(-1))


def test_of_equal_logits_the_first_is_taken():
    assert (proposed(torch.zeros(1, 3, 8)).tokens == 0).all()


@given(st.integers(0, 2**32), st.sampled_from([0.1, 1.0, 10.0, 100.0]), st.sampled_from([0.0, 0.8]))
def test_confidence_is_the_softmax(seed: int, scale: float, temperature: float):
    logits = random_logits(2, 5, 300, seed=seed, scale=scale)
    found = proposed(logits, temperature=temperature, seed=seed)
    # Of the logits without noise, whatever the temperature.
    torch.testing.assert_close(found.confidence, softmax_at(logits, found.tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("doubt", [1e-1, 1e-3, 1e-6, 1e-9, 1e-12])
def test_doubt_is_exact_near_certainty(doubt: float):
    """1 − p has the accuracy of a float32 number, not that of 1 − (a float32 number)."""
    vocab = 1000
    logits = torch.zeros(1, 4, vocab)
    logits[:, torch.arange(4), torch.tensor([0, 1, 500, 999])] = math.log((vocab - 1) * (1 - doubt) / doubt)
    found = proposed(logits)
    # The probability by the rounded logit, in float64; behind 1 − p, a float64 near 1 has steps of 1.1e-16.
    exact = (vocab - 1) / ((vocab - 1) + logits.double().amax(-1).exp())
    torch.testing.assert_close(1 - found.confidence, exact, rtol=2e-6, atol=2e-16)
    assert exact[0, 0] == pytest.approx(doubt, rel=1e-5)


def test_rows_that_are_not_pending_sort_last():
    pending = torch.tensor([[True, False, True], [False, False, True]])
    found = proposed(random_logits(2, 3, 8), pending)
    assert torch.equal(found.confidence == -math.inf, ~pending)
    assert torch.equal(found.pending, pending)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_tempered_softmax(temperature: float):
    rows = 40_000
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, 9.0, 0.5, -3.0])  # 9: the mask token
    found = proposed(row.expand(1, rows, -1), temperature=temperature)
    allowed = torch.arange(len(row)) != MASK
    expected = rows * (row[allowed].double() / temperature).softmax(-1)
    seen = found.tokens.flatten().bincount(minlength=len(row))[allowed]
    chi_square = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_square < 20.5  # 5 degrees of freedom: one seed in a thousand is above
    # Confidence tells tokens apart by the logits alone.
    torch.testing.assert_close(found.confidence, softmax_at(row.expand(1, rows, -1), found.tokens), rtol=1e-5, atol=0)


def test_noise_is_gumbel():
    noise = Generators(3, 1, CPU).gumbel(0, 1000, 100)
    assert noise.dtype == torch.float64
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("times", [1, 3])
def test_a_batch_draws_what_each_row_draws_alone(times: int):
    logits = random_logits(3, 6, 50, scale=1.0)
    pending = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    together = proposed(logits, pending, temperature=1.0, seed=7, times=times)
    for i in range(3):
        alone = proposed(logits[i : i + 1], pending[i : i + 1], temperature=1.0, seed=7 + i, times=times)
        assert torch.equal(together.tokens[i], alone.tokens[0])
        assert torch.equal(together.confidence[i], alone.confidence[0])
    other = proposed(logits, pending, temperature=1.0, seed=8, times=times)
    assert not torch.equal(together.tokens, other.tokens)


def test_ranks_are_those_of_each_row_alone():
    together = Generators(7, 2, CPU)
    alone = [Generators(7 + i, 1, CPU) for i in range(2)]
    for _ in range(2):
        scores = together.confidence([10] * 2, [0, 3], 5, 8, [True, True])
        assert torch.equal(scores[0], alone[0].confidence([10], [0], 5, 8, [True])[0])
        # Without its padding a sequence is shorter, and its block begins earlier.
        assert torch.equal(scores[1], alone[1].confidence([7], [0], 2, 5, [True])[0])


def test_a_sequence_that_waits_draws_nothing():
    waited, straight = Generators(1, 2, CPU), Generators(1, 2, CPU)
    waited.confidence([10] * 2, [0, 0], 5, 8, [True, False])
    straight.confidence([10] * 2, [0, 0], 5, 8, [True, True])
    behind, ahead = (noise.confidence([10] * 2, [0, 0], 5, 8, [True, True]) for noise in (waited, straight))
    assert torch.equal(behind[0], ahead[0])
    assert not torch.equal(behind[1], ahead[1])
    assert torch.equal(behind[1], Generators(2, 1, CPU).confidence([10], [0], 5, 8, [True])[0])

    logits, pending = random_logits(2, 4, 50, scale=1.0), torch.ones(2, 4, dtype=torch.bool)
    streams = Generators(1, 2, CPU)
    for remaining in ([4, 0], [4, 4]):
        here = pending & (torch.tensor(remaining)[:, None] > 0)
        found = propose(opened(logits, here, Sampling(temperature=1.0), streams))
    assert torch.equal(found.tokens[1], proposed(logits[1:], temperature=1.0, seed=2).tokens[0])
    assert torch.equal(found.tokens[0], proposed(logits[:1], temperature=1.0, seed=1, times=2).tokens[0])


def test_a_sequence_that_stays_keeps_its_stream():
    kept, whole = Generators(5, 3, CPU), Generators(5, 3, CPU)
    kept.keep([0, 2])
    scores, expected = (
        kept.confidence([8] * 2, [0, 0], 0, 8, [True] * 2),
        whole.confidence([8] * 3, [0] * 3, 0, 8, [True] * 3),
    )
    assert torch.equal(scores, expected[[0, 2]])
    assert torch.equal(kept.gumbel(1, 2, 5), whole.gumbel(2, 2, 5))


def test_ranks_and_noise_are_independent():
    streams = [Generators(seed, 1, CPU) for seed in range(3000)]
    ranks = torch.cat([stream.confidence([4], [0], 0, 4, [True]) for stream in streams])
    noise = torch.cat([stream.gumbel(0, 1, 4) for stream in streams])
    correlations = torch.corrcoef(torch.cat([ranks, noise], dim=1).T)[:4, 4:]
    assert correlations.abs().max() < 0.08  # four standard deviations of chance


def test_torch_seeds_a_call_without_a_seed():
    def drawn(seed: int | None) -> Tensor:
        return Generators(seed, 1, CPU).gumbel(0, 2, 5)

    torch.manual_seed(3)
    first, second = drawn(None), drawn(None)
    torch.manual_seed(3)
    assert torch.equal(drawn(None), first)
    assert not torch.equal(first, second)
    assert torch.equal(drawn(9), drawn(9))


def test_a_seed_leaves_torchs_stream_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    proposed(random_logits(2, 4, 50), temperature=1.0, seed=1)
    assert torch.equal(torch.rand(1), expected)


# ---- cuts, and other kinds of confidence ----

CUTS: dict[str, dict[str, Any]] = {
    "uncut": {},
    "top_p": {"top_p": 0.7},
    "top_p of all": {"top_p": 1.0},
    "top_k": {"top_k": 3},
    "top_k of all": {"top_k": 10**6},
    "top_p, then top_k": {"top_p": 0.95, "top_k": 6},
    "top_k, then top_p": {"top_p": 0.5, "top_k": 20},
}


def cut_distribution(
    logits: list[float], *, temperature: float = 0.0, top_p: float | None = None, top_k: int | None = None
) -> list[float]:
    """Probabilities that temperature, top_p and top_k leave, if no two logits are the same."""
    scaled = [logit / temperature if temperature else logit for logit in logits]
    weights = [math.exp(logit - max(scaled)) for logit in scaled]
    falling = sorted(range(len(weights)), key=lambda token: -weights[token])
    left, before = [], 0.0
    for token in falling[:top_k]:
        if before / sum(weights) <= (1.0 if top_p is None else top_p):
            left.append(token)
        before += weights[token]
    total = sum(weights[token] for token in left)
    return [weights[token] / total if token in left else 0.0 for token in range(len(weights))]


def confidence_in(distribution: list[float], token: int, kind: str) -> float:
    """With the mask token among the less likely ones."""
    if kind == "probability":
        return distribution[token]
    if kind == "margin":
        first, second = sorted(distribution)[:-3:-1]
        return first - second
    return sum(p * math.log(p + 1e-10) for p in distribution)


@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("cut", CUTS)
def test_tempered_confidence_is_of_the_distribution_of_draws(cut: str, temperature: float, kind: str):
    logits = random_logits(2, 30, 40, seed=len(cut), scale=1.5)
    logits[..., MASK] = -1.0  # has a share, but is never the largest
    found = proposed(logits, temperature=temperature, confidence=kind, tempered_confidence=True, seed=3, **CUTS[cut])
    for i, row in ((i, row) for i in range(2) for row in range(30)):
        left = cut_distribution(logits[i, row].tolist(), temperature=temperature, **CUTS[cut])
        token = int(found.tokens[i, row])
        assert left[token] > 0 and token != MASK
        assert temperature or left[token] == max(left)
        assert found.confidence[i, row].item() == pytest.approx(confidence_in(left, token, kind), rel=2e-5, abs=2e-6)


def test_the_cut_of_top_p_does_not_depend_on_the_order_of_the_sum(monkeypatch: pytest.MonkeyPatch):
    """CUDA adds in another order in every call."""
    logits, pending = random_logits(1, 1, 512, scale=0.1), torch.ones(1, 1, dtype=torch.bool)
    sums = logits[0, 0].sort(descending=True).values.softmax(-1).cumsum(0)

    def left() -> list[Tensor]:
        cuts = [Sampling(temperature=1.0, top_p=float(sums[at])) for at in range(0, 500, 4)]
        return [drawn_from(opened(logits, pending, cut, Generators(0, 1, CPU))) for cut in cuts]

    def from_behind(part: Tensor, dim: int) -> Tensor:
        return part.sum(dim, keepdim=True) - part.flip(dim).cumsum(dim).flip(dim) + part

    expected = left()
    monkeypatch.setattr(Tensor, "cumsum_", from_behind)
    assert all(map(torch.equal, left(), expected))


@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("cut", ["top_p", "top_k"])
def test_other_confidence_is_the_models_own(cut: str, kind: str):
    logits = random_logits(2, 30, 40, scale=1.5)
    logits[..., MASK] = -1.0
    found = proposed(logits, temperature=0.6, confidence=kind, seed=3, **CUTS[cut])
    for i, row in ((i, row) for i in range(2) for row in range(30)):
        own, token = cut_distribution(logits[i, row].tolist()), int(found.tokens[i, row])
        # The cut is of the tempered distribution, the confidence of neither.
        assert cut_distribution(logits[i, row].tolist(), temperature=0.6, **CUTS[cut])[token] > 0
        assert found.confidence[i, row].item() == pytest.approx(confidence_in(own, token, kind), rel=2e-5, abs=2e-6)


@pytest.mark.parametrize(("cut", "left"), [("top_p", 2), ("top_k", 3)])
def test_samples_follow_the_cut_distribution(cut: str, left: int):
    rows, row = 40_000, torch.tensor([0.5, 1.6, 0.0, -1.0, -9.0, 1.3, -3.0])
    expected = torch.tensor(cut_distribution(row.tolist(), temperature=0.7, **CUTS[cut])).mul(rows)
    assert (expected > 0).sum() == left
    found = proposed(row.expand(1, rows, -1), temperature=0.7, **CUTS[cut])
    seen = found.tokens.flatten().bincount(minlength=len(row))
    assert torch.equal(seen > 0, expected > 0)
    chi_square = ((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum().item()
    assert chi_square < 13.8  # at most 2 degrees of freedom: one seed in a thousand is above


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_p": 0.3}, {0}),  # the first stays, whatever its share
        ({"top_p": 0.44}, {0}),
        ({"top_p": 0.46}, {0, 1}),  # the one that exceeds it stays
        ({"top_p": 0.74}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2, 3}),  # of equals all stay
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_k": 1, "top_p": 0.99}, {0}),
    ],
)
def test_tokens_that_a_cut_leaves(options: dict[str, Any], left: set[int]):
    row = torch.tensor([0.45, 0.30, 0.10, 0.10, 1e-9, 0.05]).log()
    found = proposed(row.expand(1, 3000, -1), temperature=1.0, **options)
    assert set(found.tokens.flatten().tolist()) == left


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("height", [6.0, 30.0, 300.0])
def test_if_the_model_wants_a_mask_the_next_best_is_proposed(cut: str, temperature: float, height: float):
    logits = random_logits(2, 6, 8, scale=1.0)
    logits[..., MASK] = height
    for kind in CONFIDENCES:
        found = proposed(logits, temperature=temperature, confidence=kind, tempered_confidence=True, **CUTS[cut])
        assert (found.tokens != MASK).all() and found.confidence.isfinite().all()
        if height == 30.0 and kind != "entropy":  # the mask token keeps its share
            assert (found.confidence < 1e-6).all() and (kind == "probability" or (found.confidence < -0.99).all())


@pytest.mark.parametrize("options", [{"top_p": 1.0}, {"top_k": 40}])
def test_a_cut_that_leaves_all_draws_the_same(options: dict[str, Any]):
    logits = random_logits(2, 20, 40)
    plain, found = (proposed(logits, temperature=1.0, seed=4, **some) for some in ({}, options))
    assert torch.equal(found.tokens, plain.tokens) and torch.equal(found.confidence, plain.confidence)


@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_is_cut_as_each_row_alone(kind: str, temperature: float):
    logits = random_logits(3, 6, 50, scale=1.0)
    pending = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    options: dict[str, Any] = {"temperature": temperature, "confidence": kind, "tempered_confidence": True}
    together = proposed(logits, pending, seed=7, times=2, top_p=0.8, top_k=9, **options)
    assert torch.equal(together.confidence == -math.inf, ~pending)
    for i in range(3):
        alone = proposed(logits[i : i + 1], pending[i : i + 1], seed=7 + i, times=2, top_p=0.8, top_k=9, **options)
        assert torch.equal(together.tokens[i][pending[i]], alone.tokens[0][pending[i]])
        assert torch.equal(together.confidence[i], alone.confidence[0])


@pytest.mark.parametrize(
    ("options", "cuts", "by_row", "needs_room"),
    [
        ({}, False, False, False),
        ({"temperature": 0.5}, False, True, True),
        ({"top_p": 0.5, "top_k": 3}, False, False, False),  # the most likely token is never cut
        ({"top_p": 0.5, "temperature": 0.5}, True, True, True),
        ({"top_k": 3, "tempered_confidence": True}, True, True, True),
        ({"top_p": 1.0, "tempered_confidence": True}, False, False, False),
        ({"confidence": "margin"}, False, False, False),
        ({"confidence": "entropy"}, False, False, True),
    ],
)
def test_properties_of_sampling_options(options: dict[str, Any], cuts: bool, by_row: bool, needs_room: bool):
    sampling = Sampling(**options)
    assert (sampling.cuts, sampling.by_row, sampling.needs_room) == (cuts, by_row, needs_room)


# ---- draws of rules ----


def test_a_block_draws_as_each_row_alone_while_others_wait():
    together, alone = Generators(7, 2, CPU), Generators(8, 1, CPU)
    block, alone_block = together.of_block(), alone.of_block()
    first = block.uniform(6)
    assert torch.equal(first[1], alone_block.uniform(6)[0])
    assert not torch.equal(first[0], first[1])
    block.uniform(6)  # the first sequence goes on; alone, the second has ended its block
    second = together.of_block().uniform(6)
    assert torch.equal(second[1], alone.of_block().uniform(6)[0])
    assert not torch.equal(second[1], first[1])
    together.keep([1])
    assert torch.equal(together.of_block().gumbel(4), alone.of_block().gumbel(4))


def test_numbers_of_a_block_are_uniform_and_gumbel():
    uniform, gumbel = Generators(3, 2, CPU).of_block(), Generators(3, 2, CPU).of_block()
    numbers = uniform.uniform(50_000)
    assert numbers.dtype == torch.float64 and numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.005)
    assert torch.equal(gumbel.gumbel(50_000), -(-numbers.log()).log())


def test_numbers_of_a_rule_are_apart_from_ranks_and_noise():
    streams = [Generators(seed, 1, CPU) for seed in range(3000)]
    of_block = torch.cat([stream.of_block().gumbel(4) for stream in streams])
    ranks = torch.cat([stream.confidence([4], [0], 0, 4, [True]) for stream in streams])
    noise = torch.cat([stream.gumbel(0, 1, 4) for stream in streams])
    correlations = torch.corrcoef(torch.cat([of_block, ranks, noise], dim=1).T)[:4, 4:]
    assert correlations.abs().max() < 0.08  # four standard deviations of chance
