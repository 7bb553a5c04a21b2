"""Laws 1 and 3 of the design: a policy that refreshes at every step equals `none`, and padding changes nothing.

Every policy meets every commit rule and every padding, and some of the rules again on every other family. A new
policy is one row in `REFRESHED`, a rule one in `RULES`, a family one in `FAMILIES`.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drift_rules import EAGER
from torch import Tensor

import tiered
from tiered.decoding.rules.registry import COMMIT_RULES
from tiered.models.base import DiffusionModel
from tiered.options import GenerationOptions
from tiered.output import GenerationOutput
from tiered.policies import DEFAULT_POLICY
from tiered.policies.registry import POLICIES, make_policy
from tiered.runtime import Runtime

pytestmark = pytest.mark.usefixtures("few_slots")

GOLDENS = Path(__file__).parent / "goldens"
# By policy, the options with which nothing is ever stale: every row is recomputed at every step.
REFRESHED: dict[str, dict[str, Any]] = {
    "none": {},
    "fast_dllm_prefix": {"refresh_interval": 1},
    "fast_dllm_dual": {"refresh_interval": 1},
    "dllm_cache": {"prompt_interval": 1, "response_interval": 1},
    "elastic_cache": {"refresh_interval": 1},
    "dkv_decode": {"refresh_interval": 1},
    "dkv_greedy": {"refresh_interval": 1},
    "dkv_prefill": {"prompt_interval": 1},
    "dkv_pd": {"prompt_interval": 1, "refresh_interval": 1},
    "uniform": {"refresh_interval": 1},
    "attended": {"attended_rows": 1000},
    "polestar": {"codec": "raw", "top_m": 1000, "update_threshold": 0},
    "block_causal": {},
}
RULES: dict[str, dict[str, Any]] = {
    "one a step": {},
    "two a step": {"steps": 6},
    "uneven": {"steps": 8},
    "random": {"remasking": "random", "seed": 3},
    "random, uneven": {"remasking": "random", "seed": 4, "steps": 8},
    "threshold": {"confidence_threshold": 0.3},
    "factor": {"factor": 1.0},
    "drift-aware": {"commit": EAGER},
    "guidance": {"cfg_scale": 0.7, "steps": 6},
    "sampled": {"temperature": 0.8, "seed": 5},
    "by time, drawn": {"commit": "timestep", "confidence": "margin", "confidence_temperature": 0.3, "seed": 2},
    "by time, cut": {"commit": "origin", "temperature": 0.8, "top_p": 0.9, "seed": 6, "steps": 6},
}
REWRITING: dict[str, dict[str, Any]] = {
    "adaptive": {"tokens_per_step": 2, "block_steps": 6, "seed": 3},
    "adaptive, sampled": {"tokens_per_step": 2, "block_steps": 5, "temperature": 0.8, "top_k": 20, "seed": 4},
    "ancestral": {"commit": "ancestral", "block_steps": 5, "seed": 5},
    "corrected": {"tokens_per_step": 3, "block_steps": 3, "correction_steps": 3, "seed": 6},
}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "quota": {"steps": 4},
    "quota, above": {"confidence_threshold": 0.3, "block_steps": 3},
    "quota, sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "threshold": 0.5, "seed": 3},
    "quota, guided": {"commit": "quota", "cfg_scale": 0.7},
    "sequential": {"commit": "sequential", "steps": 4},
    "edited": {"threshold": 0.3, "editing_threshold": 0.2, "max_post_steps": 3},
    "edited, sampled": {"threshold": 0.3, "editing_threshold": 0.3, "temperature": 0.8, "top_k": 40, "seed": 7},
}
RANDOM: dict[str, dict[str, Any]] = {
    "entropy bound": {"entropy_bound": 3.0, "t_max": 0.3, "t_min": 0.1, "block_steps": 6, "seed": 8},
    "stable": {
        "entropy_bound": 6.0,
        "stop_entropy": 2.0,
        "stability_threshold": 0,
        "block_steps": 6,
        "seed": 9,
    },
}
# By family, its recorded checkpoint, or a config.json whose weights are random (512 tokens or more); and the rules that
# it meets; where a policy takes none of them, it meets "random".
FAMILIES: dict[str, tuple[str | Mapping[str, Any], tuple[str, ...]]] = {
    "llada": ("llada/llada_tiny_gqa", tuple(RULES)),
    "dream": ("dream/dream_tiny", ("two a step", "threshold", "sampled", "guidance")),
    "gidd": ("gidd/gidd_tiny_unif", tuple(REWRITING)),
    "llada-moe": ("llada_moe/lladamoe_tiny", ("two a step", "factor", "sampled", "guidance")),
    "sdar": ("sdar/sdar_tiny", (*IN_BLOCKS, "one a step", "random", "threshold", "by time, drawn")),
    "sdar-moe": ("sdar_moe/sdar_moe_tiny", ("quota", "quota, sampled", "edited")),
    "llada2": ("llada2/llada2_tiny", ("quota, above", "quota, guided", "edited", "edited, sampled")),
    "diffusion-gemma": ("diffusion_gemma/dgemma_tiny", tuple(RANDOM)),
}
RULES |= REWRITING | IN_BLOCKS | RANDOM
# Families whose answers are rewritten: of uniform noise.
UNIFORM = {family for family, (_, rules) in FAMILIES.items() if set(rules) <= set(REWRITING)}
# Families whose rows see their block and what is in front of it.
SEES_BLOCKS = {"sdar", "sdar-moe", "llada2", "diffusion-gemma"}
# Caches that are stale. Under the noise mask the prefix cache is exact.
STALE = {
    family: ("fast_dllm_prefix", "fast_dllm_dual")[family in UNIFORM :]
    for family in FAMILIES
    if family not in SEES_BLOCKS
}
LENGTHS, SIDES = (17, 9, 12), ("left", "right", "scattered")
SIZES: dict[str, Any] = {"max_new_tokens": 12, "block_length": 6}


def rules_of(family: str, policy: str) -> list[str]:
    """The rules of the family that go with the policy."""
    rules = FAMILIES[family][1]
    if not make_policy(policy).needs_order():
        return list(rules)
    # A policy that recomputes what comes next must know it before the step, which no rule that rewrites does.
    return [] if family in UNIFORM else [rule for rule in rules if "random" in rule] or ["random"]


CASES = [
    (family, policy, rule)
    for family, policy in itertools.product(FAMILIES, REFRESHED)
    if ("blocks" if family in SEES_BLOCKS else "canvas") in make_policy(policy).sights
    for rule in rules_of(family, policy)
]


@pytest.fixture(scope="module")
def runtimes(random_model: Callable[[Mapping[str, Any]], DiffusionModel]) -> dict[str, Runtime]:
    def runtime(source: str | Mapping[str, Any]) -> Runtime:
        if isinstance(source, str):
            return tiered.from_pretrained(GOLDENS / source, dtype="float32")
        return Runtime(random_model(source), policy=make_policy(DEFAULT_POLICY))

    return {family: runtime(source) for family, (source, _) in FAMILIES.items()}


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 480, (length,), generator=generator) for length in LENGTHS]


def padded(side: str) -> tuple[Tensor, Tensor]:
    """The prompts as one batch, padding on one side, or scattered among the tokens."""
    longest = max(LENGTHS)
    ids, mask = torch.full((len(LENGTHS), longest), 499), torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    generator = torch.Generator().manual_seed(12)
    for row, prompt in enumerate(prompts()):
        columns = {
            "left": torch.arange(longest - len(prompt), longest),
            "right": torch.arange(len(prompt)),
            "scattered": torch.randperm(longest, generator=generator)[: len(prompt)].sort().values,
        }[side]
        ids[row, columns], mask[row, columns] = prompt, 1
    return ids, mask


def answers(out: GenerationOutput, prompt: int) -> Tensor:
    """What was asked for; where rows see blocks there is more, up to the end of the block."""
    return out.sequences[:, prompt : prompt + SIZES["max_new_tokens"]]


# Options with which a policy leaves rows out of canvases as small as these.
FEW: dict[str, dict[str, Any]] = {
    "attended": {"attended_rows": 4},
    "polestar": {"clusters": 3, "top_m": 1, "update_threshold": 0},
}


def test_every_policy_is_under_the_laws():
    assert set(REFRESHED) == set(POLICIES) - {"auto"}


def test_every_rule_is_under_the_laws(runtimes: dict[str, Runtime]):
    shapes = {family: runtime.model.shape for family, runtime in runtimes.items()}
    meant = {
        GenerationOptions.of(
            None,
            {**SIZES, **options},
            mask_token_id=0,
            shape=shapes[next(of for of in FAMILIES if name in FAMILIES[of][1])],
        ).rule
        for name, options in RULES.items()
    }
    assert {rule.name for rule in meant} == set(COMMIT_RULES)


def history(runtime: Runtime, rule: str) -> Tensor:
    """Every canvas on the way to the answers."""
    ids, mask = padded("left")
    out = runtime.generate(ids, attention_mask=mask, stop_at_eos=False, output_history=True, **RULES[rule], **SIZES)
    assert out.history is not None
    return torch.stack(out.history)


@pytest.fixture(scope="module")
def exact(runtimes: dict[str, Runtime]) -> Callable[[str, str], Tensor]:
    """The history under `none`, which all policies have in common: made once."""
    return cache(lambda family, rule: history(runtimes[family].with_policy("none"), rule))


TILED = [case for case in CASES if case[1] in ("none", "elastic_cache") and case[0] != "diffusion-gemma"]


@pytest.mark.parametrize(("family", "policy", "rule"), TILED)
def test_logits_in_tiles_change_no_answer(
    runtimes: dict[str, Runtime],
    exact: Callable[[str, str], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    policy: str,
    rule: str,
):
    # Two rows whole, or a hundred tokens of all rows. The rule that draws by tiles has recorded draws of its own.
    whole = exact(family, rule)
    for name, size in (("WHOLE_LOGITS", 1100), ("TILE_LOGITS", 100), ("VOCABULARY_TILE", 100)):
        monkeypatch.setattr(f"tiered.models.shape.{name}", size)
    runtime = runtimes[family].with_policy(policy, **REFRESHED[policy])
    if policy == "none":
        monkeypatch.setattr("tiered.forward.forward.head", None)  # which makes whole logits
    assert torch.equal(history(runtime, rule), whole)


# Updates renew every row too, but a rule that measures drift compares them with the step before, where after a refresh
# it has nothing to compare. tests/test_polestar_laws.py has this case against an uncached model that it compares too.
COMPARED = ("polestar", "drift-aware")


@pytest.mark.parametrize(
    ("family", "policy", "rule"), [case for case in CASES if case[1] != "none" and case[1:] != COMPARED]
)
def test_a_policy_that_refreshes_every_step_equals_none(
    runtimes: dict[str, Runtime], exact: Callable[[str, str], Tensor], family: str, policy: str, rule: str
):
    fresh = history(runtimes[family].with_policy(policy, **REFRESHED[policy]), rule)
    assert torch.equal(fresh, exact(family, rule))


@pytest.mark.parametrize(("family", "policy", "rule"), CASES)
def test_a_padded_batch_answers_as_each_row_alone(runtimes: dict[str, Runtime], family: str, policy: str, rule: str):
    # Stale caches on purpose: padding must change nothing in what is cached, either. The sides and the rows take turns,
    # so that a policy meets each row on each side under some rule.
    turn = rules_of(family, policy).index(rule)
    side, row = SIDES[turn % 3], (turn + turn // 3 + 1) % 3
    runtime = runtimes[family].with_policy(policy, **FEW.get(policy, {}))
    options: dict[str, Any] = {"stop_at_eos": False, **RULES[rule], **SIZES}
    seed = options.pop("seed", None)
    ids, mask = padded(side)
    out = runtime.generate(ids, attention_mask=mask, seed=seed, **options)
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    alone = runtime.generate(prompts()[row][None], seed=None if seed is None else seed + row, **options)
    assert torch.equal(answers(out, ids.shape[1])[row], answers(alone, LENGTHS[row])[0])
    assert out.forwards[row] == alone.num_forwards
    torch.testing.assert_close(out.tokens_per_forward[row : row + 1], alone.tokens_per_forward)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_padded_batch_are_those_of_each_row_alone(runtimes: dict[str, Runtime], family: str, side: str):
    runtime, (ids, mask) = runtimes[family], padded(side)
    block: dict[str, Any] = {"block_length": 4} if family in SEES_BLOCKS else {}
    logits = runtime.logits(ids, mask, **block)
    for row, prompt in enumerate(prompts()):
        alone = runtime.logits(prompt[None], **block)[0]
        torch.testing.assert_close(logits[row, mask[row].bool()], alone, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("family", STALE)
def test_stale_caches_do_differ_from_none(runtimes: dict[str, Runtime], family: str):
    # Else the laws above would hold of a cache that is never read.
    runtime, (ids, mask) = runtimes[family], padded("left")
    options: dict[str, Any] = {"attention_mask": mask, "stop_at_eos": False, "seed": 0, **SIZES}
    exact = runtime.with_policy("none").generate(ids, **options).sequences
    for policy in STALE[family]:
        stale = runtime.with_policy(policy).generate(ids, **options)
        assert not torch.equal(stale.sequences, exact)
