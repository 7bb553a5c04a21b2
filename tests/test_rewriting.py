"""Rules for noise that makes tokens: which tokens are rewritten, when a block ends, and which pairs are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from workloads.staleness import measure_staleness

import tiered
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.rules.registry import COMMIT_RULES
from tiered.decoding.rules.rewriting import Adaptive, Ancestral, RewritingState, draw, posterior
from tiered.decoding.sampling_options import Sampling
from tiered.forward.passes import Pass
from tiered.models.noise import Noise
from tiered.policies.base import PolicyState, Step, StepKind
from tiered.policies.registry import POLICIES, policies_for
from tiered.policies.row_schedule import RowSchedule
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
VOCAB, MASK = 12, 3
SIZES: dict[str, Any] = {"max_new_tokens": 32, "block_length": 8, "stop_at_eos": False}


def process(shift: float) -> Noise:
    return Noise(shift=shift, min_log_snr=-9.0, max_log_snr=9.0, vocab_size=VOCAB, mask_token_id=MASK)


UNIFORM, MIXED, MASKS = process(1000.0), process(0.5), process(-1000.0)


@pytest.fixture(scope="module")
def uniform() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "gidd" / "gidd_tiny_unif", policy="none", dtype="float32")


@pytest.fixture(scope="module")
def masked(masked_gidd: Callable[..., Path]) -> Runtime:
    """The same weights, taken for a model of masks."""
    return tiered.from_pretrained(masked_gidd(), policy="none", dtype="float32")


@pytest.fixture(scope="module")
def llada() -> Runtime:
    return tiered.from_pretrained(GOLDENS / "llada" / "llada_tiny", policy="none", dtype="float32")


def prompt(length: int = 20, rows: int = 1) -> Tensor:
    return torch.randint(4, 500, (rows, length), generator=torch.Generator().manual_seed(7))


def open_block(tokens: Tensor, noise: Noise, *, temperature: float = 0.0, seed: int = 0) -> OpenBlock:
    logits = 3 * torch.randn(*tokens.shape, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[..., MASK] = -torch.inf
    return OpenBlock(
        logits=logits,
        tokens=tokens,
        pending=torch.ones_like(tokens, dtype=torch.bool),
        remaining=[tokens.shape[1]] * len(tokens),
        process=noise,
        mask_token_id=MASK,
        sampling=Sampling(temperature=temperature),
        streams=Generators(5, len(tokens), torch.device("cpu")),
    )


def begun(rule: Adaptive | Ancestral, steps: int, tokens: Tensor) -> RewritingState:
    state = rule.start(steps, Generators(5, len(tokens), torch.device("cpu")))
    assert isinstance(state, RewritingState)
    state.begin_block(torch.ones_like(tokens, dtype=torch.bool))
    return state


@pytest.mark.parametrize("noise", [UNIFORM, MIXED, MASKS], ids=["uniform", "mixed", "masks"])
@pytest.mark.parametrize("count", [1, 3])
def test_adaptive_takes_tokens_that_the_model_would_change_most(noise: Noise, count: int):
    tokens = torch.tensor([[4, 3, 0, 3, 9, 1, 3, 7], [3, 3, 5, 6, 7, 8, 9, 10]])
    block = open_block(tokens, noise)
    chances = block.whole.double().softmax(-1)
    steps, level = 6, noise.log_snrs(6, "cosine")[6]
    state = begun(Adaptive(tokens_per_step=count), steps, tokens)
    found = state.propose(block)
    chosen = state.choose(found)
    assert torch.equal(found.tokens, chances.argmax(-1))
    of_token, of_mask = noise.probability(level)
    for row in range(2):
        gains = {
            column: (float(chances[row, column].max() - chances[row, column, token]))
            * (of_mask if token == MASK else of_token)
            for column, token in enumerate(tokens[row].tolist())
        }
        best = sorted((column for column in gains if gains[column] > 0), key=lambda column: -gains[column])[:count]
        assert sorted(best) == chosen[row].nonzero()[:, 0].tolist()


def test_log_snrs_are_the_official_ones():
    # The official arithmetic, in float32 tensors (modeling_gidd_hf.py, generate).
    for schedule in ("cosine", "linear"):
        time = torch.linspace(0.0, 1.0, 13)
        left = 1 - time if schedule == "linear" else 0.5 + 0.5 * torch.cos(time * torch.pi)
        low, high = torch.tensor(-9.0).sigmoid(), torch.tensor(9.0).sigmoid()
        clean = (high - low) * left + low
        expected = torch.log(clean / (1 - clean)).clip(-9.0, 9.0)
        torch.testing.assert_close(torch.tensor(UNIFORM.log_snrs(12, schedule)), expected, atol=2e-3, rtol=1e-4)


def transition(noise: Noise, cleaner: float, noisy: float) -> Tensor:
    """q(z_t | z_s) as a matrix [z_s, z_t], so that it takes what s leaves of a clean token to what t leaves of it."""
    marginal = {level: left(noise, level) for level in (cleaner, noisy)}
    kept = noise.clean(noisy) / noise.clean(cleaner)
    added = marginal[noisy][0] - kept * marginal[cleaner][0]  # of a clean token 0, whose own share is another
    added[0] -= noise.clean(noisy) - kept * noise.clean(cleaner)
    return kept * torch.eye(VOCAB, dtype=torch.float64) + added[None]


def left(noise: Noise, level: float) -> Tensor:
    """q(z | x) as a matrix [x, z]."""
    of_token, of_mask = noise.probability(level)
    made = torch.full((VOCAB,), of_token, dtype=torch.float64)
    made[MASK] = of_mask
    clean = noise.clean(level)
    return clean * torch.eye(VOCAB, dtype=torch.float64) + (1 - clean) * made[None]


@pytest.mark.parametrize("noise", [UNIFORM, MASKS], ids=["uniform", "masks"])
@pytest.mark.parametrize("levels", [(-3.0, -1.0), (-9.0, -8.0), (2.0, 4.0)])
def test_posterior_is_that_of_bayes(noise: Noise, levels: tuple[float, float]):
    noisy, cleaner = levels
    step = transition(noise, cleaner, noisy)
    # The chain is one: noise up to s, and on to t, is noise up to t.
    torch.testing.assert_close(left(noise, cleaner) @ step, left(noise, noisy), atol=1e-12, rtol=0)
    expected = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)).softmax(-1)
    current = torch.arange(VOCAB)
    found = posterior(expected.clone(), current, noise, noisy, cleaner).double()
    bayes = torch.stack([(expected[z].double() @ left(noise, cleaner)) * step[:, z] for z in range(VOCAB)])
    torch.testing.assert_close(
        found / found.sum(-1, keepdim=True), bayes / bayes.sum(-1, keepdim=True), atol=1e-6, rtol=1e-4
    )


def test_a_token_that_noise_does_not_make_stays():
    # Masks alone, and a model that is sure of another token: the official code divides 0 by 0 here.
    sure = torch.zeros(1, VOCAB)
    sure[0, 5] = 1.0
    weights = posterior(sure, torch.tensor([7]), MASKS, -2.0, -1.0)
    assert weights[0].nonzero()[:, 0].tolist() == [7]


def test_draws_follow_the_weights():
    weights = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).repeat(4000, 1)
    found = draw(weights, Generators(1, 1, torch.device("cpu")), 0)
    shares = found.bincount(minlength=4) / 4000
    # Four standard errors of a share are below 0.031.
    torch.testing.assert_close(shares, weights[0], atol=0.031, rtol=0)
    assert shares[1] == 0


@pytest.mark.parametrize(
    ("noise", "temperature", "ends"),
    [(UNIFORM, 0.0, "when nothing changes"), (UNIFORM, 1.0, "with the steps"), (MASKS, 1.0, "with the last mask")],
)
def test_when_a_block_ends(noise: Noise, temperature: float, ends: str):
    tokens = torch.tensor([[MASK, 4, MASK] if noise is MASKS else [5, 4, 6]])
    wrong = int((open_block(tokens, noise).whole.argmax(-1) != tokens).sum())
    state, steps = begun(Adaptive(), 9, tokens), 0
    while True:
        block = open_block(tokens, noise, temperature=temperature)  # always the same logits
        found = state.propose(block)
        chosen = state.choose(found)
        changed = chosen & (found.tokens != tokens)
        tokens = found.tokens.where(chosen, tokens)
        steps += 1
        if bool(state.finished(changed)):
            break
    wanted = {"when nothing changes": wrong + 1, "with the steps": 9, "with the last mask": 2}[ends]
    assert steps == wanted
    if noise is MASKS:
        assert tokens[0, 1] == 4


def test_masks_of_a_gidd_are_fixed_once(masked: Runtime):
    # Without the official code's steps behind the last mask.
    out = masked.generate(prompt(), commit="adaptive", block_steps=24, output_history=True, **SIZES)
    assert out.num_forwards == 32 and out.history is not None
    states = torch.stack(out.history)[:, 0, 20:]
    mask = masked.model.mask_token_id
    assert (states[1:] == mask).sum(1).tolist() == list(range(31, -1, -1))
    fixed = states[:-1] != mask
    assert torch.equal(states[1:][fixed], states[:-1][fixed])


@pytest.mark.parametrize("rule", [{}, {"confidence_threshold": 0.3}, {"factor": 1.0}, {"commit": "timestep"}])
def test_masked_rules_serve_a_gidd_of_masks(masked: Runtime, rule: dict[str, Any]):
    out = masked.generate(prompt(), **rule, **SIZES)
    assert int((out.sequences == masked.model.mask_token_id).sum()) == 0


FIXING, REWRITING = (
    ", ".join(name for name, rule in COMMIT_RULES.items() if rule.rewrites == rewrites and not rule.in_blocks)
    for rewrites in (False, True)
)
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("uniform", "none", {"commit": "static"}, REWRITING),
    ("uniform", "none", {"confidence_threshold": 0.9}, "'threshold' is for mask noise.*" + REWRITING),
    ("uniform", "none", {"factor": 1.0}, REWRITING),
    ("uniform", "none", {"alg": "entropy"}, REWRITING),
    ("uniform", "none", {"commit": "drift_aware"}, REWRITING),
    ("uniform", "none", {"remasking": "random"}, "needs the rule 'static'"),
    ("uniform", "none", {"cfg_scale": 1.0}, "cfg_scale = 1.0"),
    ("uniform", "dkv_greedy", {}, "rule for masks"),
    ("uniform", "elastic_cache", {"block_length": 32}, "looks at 16 rows .* block of|looks at 16 rows of a block"),
    ("uniform", "none", {"prior": torch.zeros(1, 31, dtype=torch.long)}, r"\(1, 31\); \(1, 32\)"),
    ("uniform", "none", {"prior": torch.full((1, 32), 512)}, "ids from 512 to 512"),
    (
        "uniform",
        "none",
        {"prior": torch.zeros(1, 32, dtype=torch.long, device="meta")},
        "prior is a meta tensor",
    ),
    ("uniform", "none", {"tokens_per_step": 0}, "tokens_per_step = 0"),
    ("uniform", "none", {"noise_schedule": "sine"}, "cosine"),
    ("uniform", "none", {"trailing_noise": 80}, "positions; the model was made for 96"),
    ("uniform", "none", {"steps": 8, "block_steps": 2}, "give one of them"),
    ("masked", "none", {"correction_steps": 2}, "trained with masks alone"),
    ("llada", "none", {"commit": "adaptive"}, FIXING),
    ("llada", "none", {"sampling_method": "ancestral"}, FIXING),
    ("llada", "none", {"prior": torch.zeros(1, 32, dtype=torch.long)}, "rule that rewrites tokens, not 'static'"),
    ("llada", "none", {"correction_steps": 2}, "trained with masks alone"),
]


@pytest.mark.parametrize(("model", "policy", "options", "message"), REFUSED)
def test_options_at_odds_are_refused(
    request: pytest.FixtureRequest, model: str, policy: str, options: dict[str, Any], message: str
):
    runtime: Runtime = request.getfixturevalue(model)
    with pytest.raises(ValueError, match=message):
        runtime.with_policy(policy).generate(prompt(), **{**SIZES, **options})


def test_a_prior_is_ids(uniform: Runtime):
    with pytest.raises(TypeError, match="LongTensor"):
        uniform.generate(prompt(), prior=torch.zeros(1, 32), **SIZES)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 19), "size"),
        (torch.full((1, 20), 2), "other than 0"),
        (torch.tensor([[1] + [0] * 19]), "clean tokens behind noisy ones"),
    ],
)
def test_a_noise_mask_is_checked(uniform: Runtime, mask: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        uniform.logits(prompt(), noise_mask=mask)


def test_a_noise_mask_is_of_families_that_have_one(llada: Runtime):
    with pytest.raises(ValueError, match="llada"):
        llada.logits(prompt(), noise_mask=torch.ones(1, 20))


@pytest.mark.parametrize("model", ["uniform", "llada"])
def test_answers_do_not_end_too_early(request: pytest.FixtureRequest, model: str):
    runtime: Runtime = request.getfixturevalue(model)
    first = runtime.generate(prompt(), **SIZES, seed=0).sequences[0, 20]
    # The model's first token is the end of sequence now.
    previous, runtime.model.eos_token_id = runtime.model.eos_token_id, int(first)
    try:
        out = runtime.generate(prompt(), min_new_tokens=11, **SIZES, seed=0)
        assert not (out.sequences[0, 20:31] == first).any()
        free = runtime.generate(prompt(), min_length=0, **SIZES, seed=0)
        assert (free.sequences[0, 20:31] == first).any()
    finally:
        runtime.model.eos_token_id = previous


def test_noise_follows_the_seed(uniform: Runtime):
    def history(**options: Any) -> Tensor:
        out = uniform.generate(prompt(rows=2), output_history=True, block_steps=3, **SIZES, **options)
        assert out.history is not None
        return torch.stack(out.history)

    first = history(seed=4)
    assert torch.equal(first, history(seed=4))
    assert not torch.equal(first[0], history(seed=6)[0])
    assert torch.equal(first[0, 1, 20:], history(seed=5)[0, 0, 20:])
    torch.manual_seed(0)
    drawn = history()
    torch.manual_seed(0)
    assert torch.equal(drawn, history())
    assert uniform.model.mask_token_id not in first[0, :, 20:].tolist()[0]
    given = torch.randint(4, 500, (2, 32), generator=torch.Generator().manual_seed(1))
    assert torch.equal(history(prior=given)[0, :, 20:], given)


def test_correction_goes_on_until_nothing_changes(uniform: Runtime):
    plain = uniform.generate(prompt(), block_steps=4, seed=1, **SIZES)
    out = uniform.generate(prompt(), block_steps=4, correction_steps=3, seed=1, output_history=True, **SIZES)
    assert out.num_forwards > plain.num_forwards and out.history is not None
    states = torch.stack(out.history)[:, 0, 20:]
    done = [number for number, state in enumerate(states) if torch.equal(state, plain.sequences[0, 20:])]
    assert done and done[0] < len(states) - 1  # the plain answer, and something behind it
    # An answer as prior, with all steps of a correction, is that correction.
    again = uniform.generate(prompt(), prior=plain.sequences[:, 20:], block_steps=3, **SIZES)
    assert torch.equal(again.sequences, out.sequences)


def test_a_correction_costs_what_a_step_of_the_policy_costs(uniform: Runtime):
    # Caches serve the correction too: a forward that begins no block has the block's rows alone.
    options = {"block_steps": 4, "tokens_per_step": 2, "seed": 1, **SIZES}
    dual = uniform.with_policy("fast_dllm_dual")
    plain, out = dual.generate(prompt(), **options), dual.generate(prompt(), correction_steps=3, **options)
    corrections = out.rows_per_step[plain.num_forwards :]
    assert out.rows_per_step[: plain.num_forwards] == plain.rows_per_step
    assert corrections.count(52.0) == 4 and set(corrections) == {52.0, 8.0}
    assert len(corrections) <= 4 * 3


def test_a_corrected_answer_is_streamed_once(uniform: Runtime):
    blocks: list[Tensor] = []

    class Collecting:
        def put(self, value: Tensor) -> None:
            blocks.append(value)

        def end(self) -> None:
            blocks.append(torch.empty(1, 0, dtype=torch.long))

    out = uniform.generate(prompt(), block_steps=4, correction_steps=3, seed=1, streamer=Collecting(), **SIZES)
    assert [block.shape[1] for block in blocks] == [20, 8, 8, 8, 8, 0]
    assert torch.equal(torch.cat(blocks, dim=1), out.sequences)


def test_corrected_sequences_may_have_ended_early(uniform: Runtime):
    end = int(uniform.generate(prompt(rows=2), block_steps=4, seed=1, **SIZES).sequences[0, 22])
    previous, uniform.model.eos_token_id = uniform.model.eos_token_id, end
    try:
        options = {**SIZES, "stop_at_eos": True, "block_steps": 4, "correction_steps": 3}
        both = uniform.generate(prompt(rows=2), seed=1, **options)
        for row in range(2):
            alone = uniform.generate(prompt(rows=2)[row : row + 1], seed=1 + row, **options)
            assert torch.equal(both.sequences[row], alone.sequences[0])
            assert both.forwards[row] == alone.num_forwards
    finally:
        uniform.model.eos_token_id = previous


# All but policies that must know the commits of a step, which no rule that rewrites does.
# `none` keeps one layer at a time: it has no cache to compare.
FOR_REWRITING = sorted(
    name for name in policies_for("canvas") if name not in ("auto", "none") and not POLICIES[name]().needs_order()
)


@pytest.mark.parametrize("policy", FOR_REWRITING)
def test_final_rows_are_exact_under_every_policy(uniform: Runtime, policy: str):
    # The noise mask keeps final rows from seeing others, and every block begins with them recomputed.
    ids, mask = prompt(rows=2), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    report = measure_staleness(
        uniform.with_policy(policy),
        ids,
        attention_mask=mask,
        block_steps=6,
        tokens_per_step=2,
        seed=0,
        **SIZES,
    )
    final = slice(0, 3)  # prompt, past, previous
    there = report.rows[:, final] > 0
    for distances in (report.keys, report.values):
        assert distances[:, :, final].transpose(0, 2, 1)[there].max() < 1e-6
    if policy not in ("none", "dkv_prefill", "dkv_decode", "dkv_pd", "fast_dllm_prefix"):
        noisy = report.rows[:, 4:] > 0
        assert report.keys[:, :, 4:].transpose(0, 2, 1)[noisy].max() > 1e-4


class _Watched(PolicyState):
    def __init__(self, seen: list[Tensor]) -> None:
        self._seen = seen

    def rows(self, step: Step) -> Pass:
        return step.over(0, step.canvas.length, StepKind.REFRESH)

    def observe(self, step: Step, committed: Tensor) -> None:
        self._seen.append(committed.clone())


def test_policies_get_changed_tokens_alone(uniform: Runtime):
    # Polestar's trigger counts them.
    seen: list[Tensor] = []

    class Watching(RowSchedule):
        def start(self) -> PolicyState:
            return _Watched(seen)

    out = uniform.with_policy(Watching(name="none", rows="all")).generate(
        prompt(), block_steps=12, tokens_per_step=8, seed=0, output_history=True, **SIZES
    )
    assert out.history is not None
    counted = sum(int(changed.sum()) for changed in seen)
    states = torch.stack(out.history)[:, 0]
    assert counted == int((states[1:] != states[:-1]).sum())
    assert counted < 8 * len(seen)  # tokens that were chosen
