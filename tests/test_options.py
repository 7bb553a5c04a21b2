"""Options of `generate`: defaults, lines pasted from official scripts, and combinations."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from baselines import parity

from tiered.core.aliases import ALIASES, ALWAYS_NAMES, COMMIT_ALIASES, MASK_NAMES, resolve_aliases
from tiered.decoding.rules.base import CommitRule
from tiered.decoding.rules.drift_aware import DriftAware
from tiered.decoding.rules.quota import Quota, Sequential, Static
from tiered.decoding.rules.registry import COMMIT_RULES, in_order
from tiered.decoding.rules.threshold import Factor, Threshold
from tiered.decoding.rules.timestep import Origin, Timestep
from tiered.decoding.sampling_options import Sampling
from tiered.models.families import family_of
from tiered.models.presets import read_preset
from tiered.options import OPTION_NAMES, GenerationOptions
from tiered.planning.plan import plan
from tiered.policies.registry import make_policy

MASK = 126336
LLADA = family_of(read_preset("llada-8b")).shape(read_preset("llada-8b"))
DEFAULTS = GenerationOptions()


def options(config: Any = None, **given: Any) -> GenerationOptions:
    return GenerationOptions.of(config, given, mask_token_id=MASK, shape=LLADA)


def test_defaults():
    assert options() == options({}) == options(DEFAULTS) == DEFAULTS
    assert (DEFAULTS.max_new_tokens, DEFAULTS.block, DEFAULTS.blocks, DEFAULTS.steps_per_block) == (128, 32, 4, 32)
    assert DEFAULTS.rule == Static()
    assert (DEFAULTS.temperature, DEFAULTS.cfg_scale, DEFAULTS.seed) == (0.0, 0.0, None)
    assert DEFAULTS.stop_at_eos and not DEFAULTS.output_history


@pytest.mark.parametrize(
    ("given", "block", "blocks", "steps_per_block"),
    [
        ({"max_new_tokens": 8}, 8, 1, 8),
        ({"max_new_tokens": 1}, 1, 1, 1),
        ({"max_new_tokens": 32}, 32, 1, 32),
        ({"max_new_tokens": 64}, 32, 2, 32),
        ({"max_new_tokens": 64, "block_length": 16}, 16, 4, 16),
        ({"max_new_tokens": 64, "block_length": 64}, 64, 1, 64),
        ({"max_new_tokens": 64, "steps": 2}, 32, 2, 1),
        ({"max_new_tokens": 64, "steps": 64}, 32, 2, 32),
        ({"max_new_tokens": 96, "block_length": 32, "steps": 48}, 32, 3, 16),
        ({"max_new_tokens": 8, "steps": 12}, 8, 1, 8),
        ({"max_new_tokens": 8, "steps": 10**30}, 8, 1, 8),
        # Under Dream's rules the block is the whole answer, and more steps than tokens are another schedule.
        ({"max_new_tokens": 64, "commit": "timestep"}, 64, 1, 64),
        ({"max_new_tokens": 64, "commit": parity.rule("threshold", confidence_threshold=0.9), "steps": 8}, 64, 1, 8),
        ({"max_new_tokens": 64, "commit": "origin", "steps": 16}, 64, 1, 16),
        ({"max_new_tokens": 100, "commit": "timestep", "steps": 512}, 100, 1, 512),
        ({"max_new_tokens": 64, "commit": Timestep(), "block_length": 16, "steps": 128}, 16, 4, 32),
    ],
)
def test_steps_per_block(given: dict[str, Any], block: int, blocks: int, steps_per_block: int):
    chosen = options(**given)
    assert (chosen.block, chosen.blocks, chosen.steps_per_block) == (block, blocks, steps_per_block)


@pytest.mark.parametrize(
    ("line", "expected", "rule"),
    [
        pytest.param(
            {
                "steps": 128,
                "gen_length": 128,
                "block_length": 32,
                "temperature": 0.0,
                "cfg_scale": 0.0,
                "remasking": "low_confidence",
                "mask_id": MASK,
            },
            {"steps": 128, "max_new_tokens": 128, "block_length": 32},
            Static(),
            id="LLaDA",
        ),
        pytest.param(
            {"steps": 64, "gen_length": 64, "block_length": 32, "remasking": "low_confidence", "threshold": 0.9},
            {"steps": 64, "max_new_tokens": 64, "block_length": 32, "confidence_threshold": 0.9},
            Threshold(confidence_threshold=0.9),
            id="Fast-dLLM",
        ),
        pytest.param(
            {"gen_length": 256, "block_length": 32, "threshold": None, "factor": 1.0, "mask_id": None},
            {"max_new_tokens": 256, "block_length": 32, "factor": 1.0},
            Factor(factor=1.0),
            id="Fast-dLLM factor",
        ),
        pytest.param(
            {
                "max_new_tokens": 128,
                "return_history": True,
                "diffusion_steps": 128,
                "temperature": 0.0,
                "alg": "confidence_threshold",
                "threshold": 0.9,
                "mask_token_id": MASK,
            },
            {"steps": 128, "output_history": True, "commit": "threshold", "confidence_threshold": 0.9},
            Threshold(confidence_threshold=0.9),
            id="Fast-dLLM on Dream",
        ),
        pytest.param(
            {
                "max_new_tokens": 512,
                "output_history": True,
                "return_dict_in_generate": True,
                "steps": 512,
                "temperature": 0.2,
                "top_p": 0.95,
                "alg": "entropy",
                "alg_temp": 0.0,
            },
            {
                "max_new_tokens": 512,
                "output_history": True,
                "steps": 512,
                "temperature": 0.2,
                "top_p": 0.95,
                "commit": "timestep",
                "confidence": "entropy",
                "confidence_temperature": 0.0,
            },
            Timestep(),
            id="Dream",
        ),
        pytest.param(
            {"max_new_tokens": 32, "steps": 12, "alg": "topk_margin", "alg_temp": 0.3, "eps": 1e-2, "top_k": 20},
            {
                "max_new_tokens": 32,
                "steps": 12,
                "commit": "timestep",
                "confidence": "margin",
                "confidence_temperature": 0.3,
                "schedule_floor": 1e-2,
                "top_k": 20,
            },
            Timestep(confidence_temperature=0.3, schedule_floor=1e-2),
            id="Dream, drawn",
        ),
        pytest.param(
            {"max_new_tokens": 32, "alg": "maskgit_plus", "alg_temp": None, "mask_token_id": MASK, "eps": 1e-3},
            {"max_new_tokens": 32, "commit": "timestep", "schedule_floor": 1e-3},
            Timestep(),
            id="Dream, maskgit_plus",
        ),
        pytest.param(
            {"max_new_tokens": 32, "alg": "origin", "alg_temp": 0, "eps": 1e-3, "return_dict": True},
            {"max_new_tokens": 32, "commit": "origin", "confidence_temperature": 0, "schedule_floor": 1e-3},
            Origin(),
            id="Dream, origin",
        ),
        pytest.param(
            {"gen_length": 256, "steps": 256, "block_length": 32, "threshold": 0.9, "threshold_early": 0.6},
            {
                "max_new_tokens": 256,
                "steps": 256,
                "block_length": 32,
                "confidence_threshold": 0.9,
                "early_threshold": 0.6,
            },
            DriftAware(early_threshold=0.6),
            id="Polestar",
        ),
        pytest.param({"alg": "random"}, {"commit": "static", "remasking": "random"}, Static(), id="random"),
        pytest.param({"alg": "low_confidence"}, {"commit": "static"}, Static(), id="low_confidence"),
        pytest.param(
            {"max_denoising_steps": 48, "max_new_tokens": 64},
            {"block_steps": 48, "max_new_tokens": 64},
            Static(),
            id="DiffusionGemma",
        ),
        pytest.param(
            {
                "gen_length": 64,
                "block_length": 4,
                "denoising_steps": 2,
                "top_k": 0,
                "top_p": 1.0,
                "remasking_strategy": "low_confidence_static",
                "confidence_threshold": 0.85,
            },
            {"max_new_tokens": 64, "block_length": 4, "block_steps": 2, "top_p": 1.0, "commit": "quota"},
            Quota(),
            id="SDAR, static",
        ),
        pytest.param(
            {"remasking_strategy": "low_confidence_dynamic"},
            {"commit": "quota", "confidence_threshold": 0.85},
            Quota(confidence_threshold=0.85),
            id="SDAR, dynamic",
        ),
        pytest.param(
            {"remasking_strategy": "sequential", "confidence_threshold": 0.85},
            {"commit": "sequential"},
            Sequential(),
            id="SDAR, sequential",
        ),
    ],
)
def test_pasted_lines(line: dict[str, Any], expected: dict[str, Any], rule: object):
    chosen = options(**line)
    assert chosen == replace(DEFAULTS, **expected)
    assert chosen.rule == rule


VALUES: dict[str, Any] = {
    "max_new_tokens": 64,
    "block_length": 64,
    "steps": 64,
    "commit": "static",
    "confidence_threshold": 0.5,
    "early_threshold": 0.5,
    "output_history": True,
    "confidence_temperature": 0.5,
    "schedule_floor": 0.5,
    "min_new_tokens": 8,
    "block_steps": 8,
    "stop_tokens": (5, 6),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias(alias: str):
    name = ALIASES[alias]
    assert name in OPTION_NAMES and alias not in OPTION_NAMES
    assert resolve_aliases({alias: VALUES[name]}, OPTION_NAMES, mask_token_id=MASK) == {name: VALUES[name]}
    # The same value under both names is no contradiction.
    assert resolve_aliases({alias: VALUES[name], name: VALUES[name]}, OPTION_NAMES, mask_token_id=MASK) == {
        name: VALUES[name]
    }


@pytest.mark.parametrize("spelling", COMMIT_ALIASES)
def test_every_commit_alias(spelling: str):
    assert spelling not in COMMIT_RULES
    meant = COMMIT_ALIASES[spelling]
    assert meant["commit"] in COMMIT_RULES and set(meant) <= set(OPTION_NAMES)
    for name in ("commit", "alg"):
        assert resolve_aliases({name: spelling}, OPTION_NAMES, mask_token_id=MASK) == meant


@pytest.mark.parametrize("name", MASK_NAMES)
def test_the_mask_token_is_checked_and_dropped(name: str):
    assert options(**{name: MASK}) == options(**{name: None}) == options({name: MASK}) == DEFAULTS


@pytest.mark.parametrize("name", ALWAYS_NAMES)
def test_options_that_are_always_on_cannot_be_turned_off(name: str):
    assert options(**{name: True}) == options(**{name: None}) == DEFAULTS
    with pytest.raises(ValueError, match=f"{name} = False"):
        options(**{name: False})


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({}, Sampling()),
        ({"temperature": 0.5, "top_p": 0.9}, Sampling(temperature=0.5, top_p=0.9)),
        ({"top_k": 5, "confidence": "margin"}, Sampling(top_k=5, confidence="margin")),
        ({"alg": "entropy", "top_k": 5}, Sampling(top_k=5, confidence="entropy", tempered_confidence=True)),
        ({"alg": "origin", "temperature": 1}, Sampling(temperature=1, tempered_confidence=True)),
    ],
)
def test_sampling(given: dict[str, Any], sampling: Sampling):
    assert options(**given).sampling() == sampling


@pytest.mark.parametrize(
    ("given", "draws"),
    [
        ({}, False),
        ({"temperature": 0.1}, True),
        ({"remasking": "random"}, True),
        ({"alg": "entropy", "top_p": 0.9}, False),
        ({"alg": "entropy", "alg_temp": 0.1}, True),
        ({"alg": "origin"}, True),
    ],
)
def test_draws(given: dict[str, Any], draws: bool):
    assert options(**given).draws == draws


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"top_p": 0}, ValueError, "top_p = 0 would leave no token"),
        ({"top_p": 1.5}, ValueError, "top_p = 1.5"),
        ({"top_p": "most"}, TypeError, "top_p = 'most'"),
        ({"top_k": 0}, ValueError, "top_k = 0"),
        ({"top_k": 2.0}, TypeError, "top_k = 2.0"),
        ({"confidence": "margins"}, ValueError, "unknown confidence 'margins'; did you mean 'margin'"),
        ({"confidence_temperature": -0.5}, ValueError, "confidence_temperature = -0.5"),
        ({"confidence_temperature": False}, TypeError, "confidence_temperature = False"),
        ({"commit": "timestep", "schedule_floor": 1.0}, ValueError, "schedule_floor = 1.0"),
        ({"commit": "timestep", "steps": 10**30}, ValueError, "steps = 10{30}; an int from 1 to 1000000"),
        (
            {"commit": "timestep", "block_steps": 10**6 + 1},
            ValueError,
            "block_steps = 1000001; an int from 1 to 10{6}",
        ),
        ({"confidence_threshold": 0.5, "confidence": "margin"}, ValueError, "'threshold' allows 'probability'"),
        ({"factor": 0.5, "confidence": "entropy"}, ValueError, "'factor' allows 'probability'"),
        ({"commit": "drift_aware", "confidence": "margin"}, ValueError, "'drift_aware' allows 'probability'"),
        ({"alg": "origin", "confidence": "margin"}, ValueError, "'origin' allows 'probability'"),
        ({"alg": "origin", "alg_temp": 0.5}, ValueError, "'origin' takes schedule_floor"),
        ({"alg": "topk_margin", "confidence": "entropy"}, ValueError, "'entropy' contradicts alg = 'topk_margin'"),
        ({"alg": "entropy", "remasking": "random"}, ValueError, "not 'timestep'"),
    ],
)
def test_options_at_odds(given: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        options(**given)


def test_a_name_means_one_thing():
    assert not {*ALIASES, *ALWAYS_NAMES, *MASK_NAMES} & set(OPTION_NAMES)
    assert set(OPTION_NAMES) == {field.name for field in fields(GenerationOptions)}


def test_options_go_on_top_of_a_config():
    config = {"gen_length": 64, "steps": 64, "temperature": 0.5}
    expected = replace(DEFAULTS, max_new_tokens=64, steps=32, temperature=0.5)
    assert options(config, steps=32) == expected
    assert options(options(config), diffusion_steps=32) == expected
    assert config == {"gen_length": 64, "steps": 64, "temperature": 0.5}


def test_config_and_options_are_checked_together():
    # Neither half is valid alone: 48 is no multiple of the default block, nor 128 of 24.
    assert options({"max_new_tokens": 48}, block_length=24) == replace(DEFAULTS, max_new_tokens=48, block_length=24)
    assert options({"commit": "factor"}, factor=2.0).rule == Factor(factor=2.0)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, Static()),
        ({"commit": "static"}, Static()),
        ({"confidence_threshold": 0}, Threshold(confidence_threshold=0)),
        ({"confidence_threshold": 1.0, "commit": "threshold"}, Threshold(confidence_threshold=1.0)),
        ({"factor": 0.5}, Factor(factor=0.5)),
        ({"commit": Factor(factor=3)}, Factor(factor=3)),
        ({"commit": "drift_aware"}, DriftAware()),
        ({"commit": "drift_aware", "confidence_threshold": 0.8}, DriftAware(confidence_threshold=0.8)),
        ({"early_threshold": 0.0}, DriftAware(early_threshold=0.0)),
        ({"commit": "timestep", "confidence": "margin"}, Timestep()),
        ({"schedule_floor": 0.01}, Origin(schedule_floor=0.01)),  # Dream's own default
        (
            {"schedule_floor": 0.01, "confidence_temperature": 1},
            Timestep(schedule_floor=0.01, confidence_temperature=1),
        ),
        ({"confidence_temperature": 0.0}, Static()),
    ],
)
def test_rule(given: dict[str, Any], rule: object):
    assert options(**given).rule == rule


def test_a_rule_with_more_options_takes_no_call_from_another():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Capped(CommitRule):
        name: ClassVar[str] = "capped"
        confidence_threshold: float = 0.9
        most_per_step: int = 2

    rules: list[type[CommitRule]] = [Capped, Threshold, DriftAware, Static]
    assert in_order(rules) == in_order(rules[::-1]) == [Static, Threshold, Capped, DriftAware]


@pytest.mark.parametrize(
    ("policy", "given", "meant"),
    [
        ("dkv_decode", {"cache_reloading_step": 5}, {"refresh_interval": 5}),
        ("dkv_pd", {"cache_steps": 5}, {"refresh_interval": 5}),
        ("dkv_greedy", {"window_size": 6}, {"window": 6}),
        (
            "dllm_cache",
            {"prompt_interval_steps": 9, "gen_interval_steps": 3, "cfg_interval_steps": 2, "transfer_ratio": 0.5},
            {"prompt_interval": 9, "response_interval": 3, "guidance_interval": 2, "update_ratio": 0.5},
        ),
        (
            "elastic_cache",
            {"window_length": 4, "gamma": 0.5, "track_num": 2},
            {"window": 4, "similarity_threshold": 0.5, "tracked": 2},
        ),
    ],
)
def test_policies_know_the_names_of_official_scripts(policy: str, given: dict[str, Any], meant: dict[str, Any]):
    assert make_policy(policy, **given) == make_policy(policy, **meant) != make_policy(policy)
    with pytest.raises(ValueError, match="contradicts"):
        make_policy(policy, **meant, **dict.fromkeys(given, 11))


def test_numbers_of_numpy_become_pythons():
    # In byte counts an int16 would overflow.
    chosen = options(max_new_tokens=np.int32(64), confidence_threshold=np.float32(0.5), top_k=np.int64(3))
    assert chosen == options(max_new_tokens=64, confidence_threshold=0.5, top_k=3)
    values = [getattr(chosen, name) for name in ("max_new_tokens", "confidence_threshold", "top_k")]
    policy: Any = make_policy("dllm_cache", prompt_interval=np.int16(9), update_ratio=np.float16(0.5))
    made = plan("embedded", context=np.int16(2**10), batch=np.int8(4), policy="none")  # type: ignore[arg-type]
    values += [policy.prompt_interval, policy.update_ratio, made.sizes.context, made.sizes.batch]
    assert [type(value) for value in values] == [int, float, int, int, float, int, int]
    assert made.tiers == plan("embedded", context=2**10, batch=4, policy="none").tiers


def test_an_alias_is_of_the_policies_that_have_the_option():
    with pytest.raises(ValueError, match="gamma"):
        make_policy("dkv_decode", gamma=0.5)


@pytest.mark.parametrize("name", ["temperature", "cfg_scale", "factor"])
def test_an_int_beyond_torchs_range_becomes_a_float(name: str):
    value = getattr(GenerationOptions(**{name: 10**30}), name)
    assert isinstance(value, float) and value == 1e30
    with pytest.raises(ValueError, match="a number from"):
        GenerationOptions(**{name: 10**400})
