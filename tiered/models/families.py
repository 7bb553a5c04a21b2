"""The model families: what reads their config.json, and what loads their weights."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tiered.core.checks import unknown_name
from tiered.models.config_fields import ModelConfig
from tiered.models.dream_config import read_dream_config
from tiered.models.gidd_config import read_gidd_config
from tiered.models.llada_config import read_llada_config
from tiered.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        name: as people write it; for cards and error messages.
        read: reads a config.json: sizes, the weights' names, and what else the forward needs.
        loader: where the family's model class is, as "module:name"; None for a family that can be planned, not loaded.
    """

    name: str
    read: Callable[[Mapping[str, object]], ModelConfig]
    loader: str | None = None

    def shape(self, config: Mapping[str, object]) -> ModelShape:
        """The sizes in `config`, all of which is read: what cannot be loaded cannot be planned.

        Raises:
            ValueError: anything in it that the forward does not have.
        """
        return self.read(config).shape

    def resolve_loader(self) -> Any:
        """What `loader` names. Imported here and not before: a plan needs neither the model nor torch.

        Raises:
            ValueError: the family has no loader yet.
        """
        if self.loader is None:
            loadable = [family.name for family in FAMILIES.values() if family.loader]
            raise ValueError(f"{self.name} can be planned, but not loaded yet; loadable: {', '.join(loadable)}")
        return pkgutil.resolve_name(self.loader)


# By the `model_type` of config.json.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llada": Family(name="LLaDA", read=read_llada_config, loader="tiered.models.llada:LLaDA"),
        "Dream": Family(name="Dream", read=read_dream_config, loader="tiered.models.dream:Dream"),
        "gidd": Family(name="GIDD", read=read_gidd_config, loader="tiered.models.gidd:Gidd"),
    }
)


def family_of(config: Mapping[str, object]) -> Family:
    """The family that `config`'s `model_type` names.

    Raises:
        ValueError: no `model_type`, or one that is not in `FAMILIES`.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError(f"config.json names no model_type; allowed: {', '.join(FAMILIES)}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_name("model_type", model_type, FAMILIES)
    return FAMILIES[model_type]
