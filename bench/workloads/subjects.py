"""A model and its prompts: an embedded model and lookups, or a random model and random tokens."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from measuring.study import Axes
from training import tasks

import tiered
from tiered.core.checks import unknown_name
from tiered.inputs import Inputs
from tiered.models.presets import preset_names
from tiered.offload.device import pick_device
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY, paths, random_model, weights
from workloads.variants import Variant, all_variants

RANDOM = "random"
SIZES: Axes = {"model": [RANDOM], "width": [512], "layers": [8]}  # the axes of a model


def points_of(axes: Axes, *names: str) -> Iterator[dict[str, Any]]:
    """Settings: each of `axes["model"]` under all values of the axes `names`, those of the last one next to each other.
    Raises `ValueError` for an unknown policy, and for an answer that leaves no room for a prompt."""
    for name in axes.get("policy", ()):
        variant_named(name)
    for model, values in product(_models(axes), product(*(axes[name] for name in names))):
        settings = model | dict(zip(names, values, strict=True))
        if settings.get("positions", settings["answer"] + 1) <= settings["answer"]:
            raise ValueError(f"positions = {settings['positions']}; more than answer = {settings['answer']} is allowed")
        yield settings


def _models(axes: Axes) -> Iterator[dict[str, Any]]:
    """A model's settings: the hash of its weights, the sizes of a random one, or the name of a planned one alone."""
    for model in axes["model"]:
        if model != RANDOM:
            yield {"model": model} if model in preset_names() else weights(model)
        for width, layers in product(axes["width"], axes["layers"]) if model == RANDOM else ():
            if width < 64 or width % 64 or layers < 1:
                raise ValueError(f"width = {width}, layers = {layers}; a multiple of 64, and 1 or more are allowed")
            yield {"model": RANDOM, "width": width, "layers": layers}


def local(axes: Axes) -> dict[str, Any]:
    """The paths of the models: a study's `local`."""
    return {"paths": paths([model for model in axes["model"] if model not in (RANDOM, *preset_names())])}


def variant_named(name: str) -> Variant:
    """A policy with the call that it is made for. Raises `ValueError`."""
    known = {variant.name: variant for variant in all_variants()}
    if name not in known:
        raise unknown_name("policy", name, known)
    return known[name]


def loaded(settings: Mapping[str, Any], paths: Mapping[str, str], positions: int) -> Runtime:
    """The model of `settings` without a cache; a random one for up to `positions`."""
    device, dtype = settings["device"], settings.get("dtype", "float32")
    if settings["model"] != RANDOM:
        return tiered.from_pretrained(paths[settings["model"]], policy="none", dtype=dtype, device=device)
    model = random_model(settings["width"], settings["layers"], positions)
    return Runtime(
        model.to(device=pick_device(device), dtype=getattr(torch, dtype)), policy=make_policy("none"), name=RANDOM
    )


def prompts(settings: Mapping[str, Any], context: int, batch: int = 1) -> Inputs:
    """Prompts of `context` tokens each; ids [batch, context] for a random model."""
    seed = settings["seed"]
    if settings["model"] == RANDOM:
        draws = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCABULARY - 2, (batch, context), generator=draws)
    examples = [tasks.sample("lookup", "test", seed + number, size=context) for number in range(batch)]
    return [[{"role": "user", "content": example.prompt}] for example in examples]
