"""The config.json files of released models, for planning before a download. No weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Preset → the Hugging Face checkpoints that have this config.
PRESETS: Mapping[str, tuple[str, ...]] = {
    "llada-8b": ("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"),
    "dream-7b": ("Dream-org/Dream-v0-Instruct-7B", "Dream-org/Dream-v0-Base-7B"),
    # Sizes from its model card; bytes of its weights as others measured them.
    "llada-moe-7b": ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "inclusionAI/LLaDA-MoE-7B-A1B-Base"),
    "gidd-unif-3b": ("dvruette/gidd-unif-3b",),
    "gidd-mask-3b": ("dvruette/gidd-mask-3b",),
    "gidd-unif-10b": ("dvruette/gidd-unif-10b",),
    # Sizes of Qwen3-8B, from which its training continued (arXiv 2510.06303).
    "sdar-8b": ("JetLM/SDAR-8B-Chat",),
    # Both as in the authors' trainer (inclusionAI/dFactory, configs/model_configs).
    "llada2-mini": ("inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA2.1-mini"),
    "llada2-flash": ("inclusionAI/LLaDA2.0-flash", "inclusionAI/LLaDA2.1-flash"),
    # Both as quoted by public repositories.
    "diffusion-gemma": ("google/diffusiongemma-26B-A4B-it",),
    "nemotron-8b": ("nvidia/Nemotron-Labs-Diffusion-8B",),
}

ALIASES: Mapping[str, str] = {"llada-1.5": "llada-8b", "gidd-3b": "gidd-unif-3b", "gidd-10b": "gidd-unif-10b"}

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Every name that `read_preset` takes, aliases last."""
    return [*PRESETS, *ALIASES]


def preset_of(name: str) -> str | None:
    """The preset of `name`: itself, an alias, or a checkpoint's id on the Hugging Face hub; None if there is none."""
    name = ALIASES.get(name, name)
    if name in PRESETS:
        return name
    return next((preset for preset, checkpoints in PRESETS.items() if name in checkpoints), None)


def read_preset(name: str) -> dict[str, Any]:
    """The config.json of `name`, which `preset_of` must know."""
    return json.loads((_FOLDER / f"{preset_of(name)}.json").read_text(encoding="utf-8"))
