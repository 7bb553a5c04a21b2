"""The model families: one class each, which reads config.json, names the weights and computes the forward."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.core.checks import unknown_name
from tiered.models.layout import ModelConfig
from tiered.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. `name`: for cards and error messages; `loader`: the model class, as "module:name"."""

    name: str
    loader: str

    def resolve_loader(self) -> Any:
        return pkgutil.resolve_name(self.loader)

    def read(self, config: Mapping[str, object]) -> ModelConfig:
        """Sizes, names of weights and other settings from config.json. Raises `ValueError` for a setting that the
        forward lacks."""
        return self.resolve_loader().read_config(config)

    def shape(self, config: Mapping[str, object]) -> ModelShape:
        """The sizes in `config`. Raises as `read`, so a model that cannot be loaded cannot be planned."""
        return self.read(config).shape


# By the `model_type` of config.json.
FAMILIES: Mapping[str, Family] = {
    "llada": Family(name="LLaDA", loader="tiered.models.llada:LLaDA"),
    "Dream": Family(name="Dream", loader="tiered.models.dream:Dream"),
    "diffusion_gemma": Family(name="DiffusionGemma", loader="tiered.models.diffusion_gemma:DiffusionGemma"),
    "gidd": Family(name="GIDD", loader="tiered.models.gidd:Gidd"),
    "lladamoe": Family(name="LLaDA-MoE", loader="tiered.models.llada_moe:LLaDAMoE"),
    "llada2_moe": Family(name="LLaDA2", loader="tiered.models.llada2:LLaDA2"),
    "sdar": Family(name="SDAR", loader="tiered.models.sdar:Sdar"),
    "sdar_moe": Family(name="SDAR-MoE", loader="tiered.models.sdar:SdarMoE"),
    "nemotron_labs_diffusion": Family(name="Nemotron-Labs", loader="tiered.models.nemotron:Nemotron"),
}


def family_of(config: Mapping[str, object]) -> Family:
    """The family of `config`'s `model_type`. Raises `ValueError` if `FAMILIES` has none."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError(f"config.json names no model_type; allowed: {', '.join(FAMILIES)}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_name("model_type", model_type, FAMILIES)
    # Files of the first LLaDA-MoE have LLaDA's model_type.
    return FAMILIES["lladamoe" if model_type == "llada" and "expert_intermediate_size" in config else model_type]
