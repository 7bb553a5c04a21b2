"""The bound on a text's log-probability, against the mean over all orders in which its tokens can be filled in."""

import math
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance

import tiered
from tiered.evaluation import TieredLM
from tiered.evaluation.likelihood import Likelihood, draw_masks
from tiered.runtime import Runtime

DREAM = Path(__file__).parent / "goldens" / "dream" / "dream_tiny"
PREFIX, TARGET = [5, 9, 30], [17, 8, 17, 60]


@pytest.fixture(params=["llada", "dream"])
def runtime(request: pytest.FixtureRequest, write_checkpoint) -> Runtime:
    path = write_checkpoint(tokenizer=True) if request.param == "llada" else DREAM
    return tiered.from_pretrained(path, policy="none", dtype="float32")


def any_order(runtime: Runtime, prefix: list[int], target: list[int], cfg_scale: float = 0.0) -> float:
    """The mean over all orders of Σ log p(token | prefix, tokens before it in the order), one forward a term. The bound
    equals it (RADD, arXiv 2406.03736)."""
    mask, shift = runtime.model.mask_token_id, runtime.model.shape.prediction_shift
    total = 0.0
    for order in permutations(range(len(target))):
        known: list[int] = [mask] * len(target)
        for place in order:
            row = len(prefix) + place - shift
            logits = runtime.logits(torch.tensor([prefix + known]))[0, row]
            if cfg_scale:
                free = runtime.logits(torch.tensor([[mask] * len(prefix) + known]))[0, row]
                logits = (1 + cfg_scale) * logits - cfg_scale * free
            total += float(logits.log_softmax(dim=-1)[target[place]])
            known[place] = target[place]
    return total / math.factorial(len(target))


def all_masks(length: int) -> torch.Tensor:
    return torch.tensor([[bool(number >> place & 1) for place in range(length)] for number in range(1, 2**length)])


@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_in_expectation_it_is_the_mean_over_all_orders(runtime: Runtime, cfg_scale: float):
    masks = all_masks(len(TARGET))
    chances = torch.tensor([1 / (len(TARGET) * math.comb(len(TARGET), int(mask.sum()))) for mask in masks])
    assert float(chances.sum()) == pytest.approx(1)
    losses = Likelihood(runtime, cfg_scale=cfg_scale).losses(PREFIX, TARGET, masks)
    assert -float(losses @ chances.double()) == pytest.approx(any_order(runtime, PREFIX, TARGET, cfg_scale), rel=1e-5)


@pytest.mark.parametrize("count", [1, 12])
def test_masks_are_drawn_as_the_bound_asks(count: int):
    length, drawn = 3, Counter()
    for seed in range(6000 // count):
        drawn.update(tuple(mask.tolist()) for mask in draw_masks(length, count, seed=seed))
    assert sum(drawn.values()) == 6000 and len(drawn) == 2**length - 1
    for mask, number in drawn.items():
        chance = 1 / (length * math.comb(length, sum(mask)))
        assert abs(number - 6000 * chance) < 4.5 * math.sqrt(6000 * chance * (1 - chance))


def test_numbers_of_masked_tokens_are_spread_evenly():
    for seed in range(20):
        assert Counter(draw_masks(4, 12, seed=seed).sum(dim=1).tolist()) == {1: 3, 2: 3, 3: 3, 4: 3}
        assert draw_masks(4, 12, seed=seed).equal(draw_masks(4, 12, seed=seed))
    assert not draw_masks(9, 12, seed=0).equal(draw_masks(9, 12, seed=1))


def test_a_score_comes_near_and_is_the_same_however_it_is_batched(runtime: Runtime):
    exact = any_order(runtime, PREFIX, TARGET)
    losses = Likelihood(runtime).losses(PREFIX, TARGET, draw_masks(4, 400, seed=1))
    found, _ = Likelihood(runtime, mc_num=400, batch_size=64, seed=1, check_greedy=False).score(PREFIX, TARGET)
    assert found == pytest.approx(-float(losses.mean()), rel=1e-6)
    assert abs(found - exact) < 4 * float(losses.std()) / math.sqrt(400)
    one_at_a_time, _ = Likelihood(runtime, mc_num=400, batch_size=1, seed=1, check_greedy=False).score(PREFIX, TARGET)
    assert one_at_a_time == pytest.approx(found, rel=1e-5)


def test_a_single_token_is_exact(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    expected, asked, logits = any_order(runtime, PREFIX, [17]), [], Runtime.logits
    monkeypatch.setattr(Runtime, "logits", lambda self, ids, **how: asked.append(ids) or logits(self, ids, **how))
    found, _ = Likelihood(runtime, mc_num=40, check_greedy=False).score(PREFIX, [17])
    assert found == pytest.approx(expected, rel=1e-5)
    assert [len(ids) for ids in asked] == [1]  # all 40 masks are the same


def test_whether_greedy_decoding_gives_it(runtime: Runtime):
    out = runtime.generate(torch.tensor([PREFIX]), max_new_tokens=4, block_length=4, stop_at_eos=False)
    greedy = out.sequences[0, 3:].tolist()
    other = [greedy[0], *(token - 1 for token in greedy[1:])]
    scorer = Likelihood(runtime, mc_num=1)
    assert scorer.score(PREFIX, greedy)[1] is True and scorer.score(PREFIX, other)[1] is False
    assert Likelihood(runtime, mc_num=1, check_greedy=False).score(PREFIX, greedy)[1] is False
    assert scorer.score(PREFIX, []) == (0.0, True)


@pytest.fixture
def lm(write_checkpoint) -> TieredLM:
    return TieredLM(write_checkpoint(tokenizer=True), policy="none", mc_num=8, batch_size=8, is_check_greedy=False)


def score(lm: TieredLM, *args: str) -> float:
    return lm.loglikelihood([Instance("loglikelihood", {}, args, 0)], disable_tqdm=True)[0][0]


def test_requests_are_split_by_ids_of_the_whole_text(lm: TieredLM, caplog: pytest.LogCaptureFixture):
    ids = lm.tokenizer("copy: Ada Ben Cleo")["input_ids"]
    expected, _ = lm._likelihood.score(ids[:3], ids[3:])
    assert len(ids) == 5 and score(lm, "copy: Ada", " Ben Cleo") == expected == score(lm, "copy: Ada ", "Ben Cleo")
    # An empty context, or one of spaces alone, is one token; a long one loses its beginning.
    assert score(lm, "", "Ada Ben") == lm._likelihood.score([lm.eot_token_id], lm.tokenizer("Ada Ben")["input_ids"])[0]
    spaced, _ = lm._likelihood.score([lm.eot_token_id], lm.tokenizer(" Ada Ben")["input_ids"])
    assert score(lm, " ", "Ada Ben") == spaced
    words = "Ada " * 300
    long = lm.tokenizer(words + "Ben")["input_ids"][-256:]
    assert score(lm, words, "Ben") == lm._likelihood.score(long[:-1], long[-1:])[0] and "Truncating" in caplog.text


def test_rolling_sums_windows_of_the_models_context(lm: TieredLM):
    ids = lm.tokenizer("Ada Ben Cleo " * 100)["input_ids"]
    windows = [([lm.eot_token_id], ids[:255]), (ids[44:255], ids[255:])]
    assert len(ids) == 300 and all(len(a) + len(b) <= lm.max_length for a, b in windows)
    request = Instance("loglikelihood_rolling", {}, ("Ada Ben Cleo " * 100,), 0)
    expected = sum(lm._likelihood.score(*window)[0] for window in windows)
    assert lm.loglikelihood_rolling([request], disable_tqdm=True) == [pytest.approx(expected)]


def test_uniform_noise_has_no_such_bound():
    lm = TieredLM("embedded-uniform", policy="none")
    with pytest.raises(
        NotImplementedError, match=r"'embedded-uniform' \(gidd\) has uniform noise: tasks that generate"
    ):
        score(lm, "copy: Ada", " Ben")
