"""NaN and infinity: one typed error from every policy, which names where they begin; and the next call works."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from official_names import official
from torch import Tensor

import tiered
from tiered.core.features import Tier
from tiered.evaluation.likelihood import Likelihood
from tiered.models.base import DiffusionModel
from tiered.policies.registry import policies_for
from tiered.runtime import Runtime

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = {
    "llada": "llada/llada_tiny_gqa",
    "dream": "dream/dream_tiny",
    "gidd": "gidd/gidd_tiny_unif",
    "llada-moe": "llada_moe/lladamoe_tiny",
}
IDS = torch.arange(34).view(2, 17)
SIZES: dict[str, Any] = {"max_new_tokens": 12, "block_length": 6}


@cache
def loaded(family: str, dtype: str = "float32") -> Runtime:
    return tiered.from_pretrained(GOLDENS / FAMILIES[family], policy="none", dtype=dtype)


def runtime_of(variant: str, family: str = "llada", dtype: str = "float32") -> Runtime:
    return loaded(family, dtype).with_policy(variant)


def values_of(model: DiffusionModel, layer: int) -> Tensor:
    """The weight that projects to the values of `layer`."""
    (name,) = [name for name in model.shape.weight_shapes if f".{layer}." in name and "v_proj.weight" in name]
    return official(model, name)


def nan(weight: Tensor):
    weight[0, 0] = math.nan


def infinite(weight: Tensor):
    weight[0, 0] = math.inf


def times(factor: float) -> Callable[[Tensor], object]:
    return lambda weight: weight.mul_(factor)


def largest(weight: Tensor):
    """Up to the largest number of float16, so that a product does not fit."""
    weight.mul_(65504 / weight.abs().max())


BROKEN: dict[str, list[tuple[Callable[[Tensor], object], str]]] = {
    # After the last damage, outputs of layers are finite in every number, but the next norm would make zeros of them.
    "float32": [(nan, "A weight"), (infinite, "A weight"), (times(1e25), "A weight")],
    "float16": [(largest, "float16 ends at 65504; load with dtype = 'bfloat16' or 'float32'")],
}


def breaks(
    runtime: Runtime, weight: Tensor, *damages: Callable[[Tensor], object], **options: Any
) -> list[tiered.NonFiniteError]:
    """The errors of a call with each damage. Before them, and once they are mended, it gives the same tokens. The books
    keep nothing."""
    options = SIZES | options
    whole, healthy, errors = weight.clone(), runtime.generate(IDS, **options).sequences, []
    held = [runtime.ledger.accounts(tier) for tier in Tier]  # host memory stays for the next call
    for damage in damages:
        try:
            damage(weight)
            with pytest.raises(tiered.NonFiniteError) as caught:
                runtime.generate(IDS, **options)
        finally:
            weight.copy_(whole)
        errors.append(caught.value)
        assert [runtime.ledger.accounts(tier) for tier in Tier] == held
    assert torch.equal(runtime.generate(IDS, **options).sequences, healthy)
    return errors


def rule_for(runtime: Runtime) -> dict[str, Any]:
    return {"remasking": "random", "seed": 3} if runtime.policy.needs_order() else {"seed": 3}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", BROKEN)
@pytest.mark.parametrize("variant", policies_for("canvas"))
def test_every_policy_names_the_layer(variant: str, dtype: str):
    runtime = runtime_of(variant, dtype=dtype)
    damages, causes = zip(*BROKEN[dtype], strict=True)
    rule = rule_for(runtime) | {"max_new_tokens": 6, "block_length": 3}
    for error, cause in zip(breaks(runtime, values_of(runtime.model, 1), *damages, **rule), causes, strict=True):
        assert error.what == "the norm of the output of layer 1" and cause in error.hint, error
        assert "forward 0 of the call, in sequences [0, 1] of the batch" in str(error)
        assert error.answers is not None and error.answers.shape == (2, 6)
        assert (error.answers == runtime.model.mask_token_id).all()


@pytest.mark.parametrize("variant", ["none", "polestar"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("dream", {}), ("dream", {"alg": "entropy"}), ("gidd", {}), ("gidd", {"commit": "ancestral"})],
)
def test_every_family(family: str, options: Mapping[str, Any], variant: str):
    runtime = runtime_of(variant, family)
    (error,) = breaks(runtime, values_of(runtime.model, 1), nan, seed=3, **options)
    assert error.what == "the norm of the output of layer 1"


HEAD = "the product of the last norm and the output weights"


@pytest.mark.parametrize(
    ("weight", "damage", "options", "what"),
    [
        ("wte.weight", nan, {"cfg_scale": 0.5}, "the norm of a token's embedding"),
        ("blocks.0.attn_norm.weight", times(math.nan), {}, "the norm of the output of layer 0"),
        ("ln_f.weight", times(math.inf), {"temperature": 0.5, "top_p": 0.9}, HEAD),
        ("ff_out.weight", nan, {"remasking": "random"}, HEAD),
        ("ff_out.weight", infinite, {"threshold": 0.9}, HEAD),
    ],
)  # fmt: skip
def test_every_part_is_named(weight: str, damage: Callable[[Tensor], object], options: dict[str, Any], what: str):
    runtime = runtime_of("fast_dllm_dual")
    (error,) = breaks(runtime, runtime.model.get_parameter(weight), damage, seed=3, **options)
    assert error.what == what


@pytest.mark.parametrize("variant", ["fast_dllm_dual", "polestar"])
def test_a_streamed_layer_is_named(variant: str):
    resident = runtime_of(variant)
    room = resident.generate(IDS, **SIZES).memory.budget.device
    assert isinstance(room, int)
    budget = tiered.MemoryBudget(device=room - 4000)
    runtime = tiered.from_pretrained(
        GOLDENS / FAMILIES["llada"], policy=resident.policy, dtype="float32", memory=budget
    )
    (error,) = breaks(runtime, values_of(runtime.model, 1), nan)
    assert error.what == "the norm of the output of layer 1"
    assert runtime.generate(IDS, **SIZES).memory.moved["host->device"] > 0


@pytest.mark.parametrize("variant", ["none", "dllm_cache", "polestar"])
def test_guidance_beyond_float32(variant: str):
    runtime = runtime_of(variant)
    with pytest.raises(tiered.NonFiniteError, match=r"sum of guided logits .* cfg_scale = 3e\+38 is too large"):
        runtime.generate(IDS, **SIZES, cfg_scale=3e38)
    assert runtime.generate(IDS, **SIZES, cfg_scale=1.0).num_forwards == 12


@pytest.mark.parametrize("variant", ["none", "fast_dllm_dual", "dkv_greedy", "dllm_cache", "elastic_cache", "polestar"])
def test_tokens_fixed_before_the_error_are_kept(variant: str):
    """A token's embedding is NaN, and only the second sequence comes to that token, late."""
    runtime = runtime_of(variant)
    healthy = runtime.generate(IDS, **SIZES, output_history=True, **rule_for(runtime)).history
    assert healthy is not None and len(healthy) == 13
    here, there = (set(sequence[17:].tolist()) for sequence in healthy[-1])
    found = [state[1, 17:].tolist() for state in healthy]
    first = {token: min(n for n, state in enumerate(found) if token in state) for token in there - here - {*range(34)}}
    last = 10 if variant == "dllm_cache" else 12  # there rows see a token some forwards later
    late = max(first, key=lambda token: first[token] if first[token] < last else -1)
    assert 2 < first[late] < last

    def damage(weight: Tensor):
        weight[late] = math.nan

    (error,) = breaks(runtime, runtime.model.get_parameter("wte.weight"), damage, **rule_for(runtime))
    (forward,) = map(int, re.findall(r"forward (\d+)", str(error)))
    assert forward >= first[late]
    assert error.what == "the norm of a token's embedding"
    assert error.answers is not None and torch.equal(error.answers, healthy[forward][:, 17:])
    if forward < 6 or variant.partition(",")[0] != "polestar":  # clustering does not name the sequence
        assert error.sequences == [1]


def test_scores_of_a_broken_model():
    runtime = runtime_of("none")
    weight = values_of(runtime.model, 1)
    whole = weight.clone()
    try:
        nan(weight)
        assert runtime.logits(IDS).isnan().all()  # as they are
        with pytest.raises(tiered.NonFiniteError, match="the bound on the log-probability is not finite"):
            Likelihood(runtime, mc_num=2).score([1, 2], [3])
    finally:
        weight.copy_(whole)
    assert math.isfinite(Likelihood(runtime, mc_num=2).score([1, 2], [3])[0])
