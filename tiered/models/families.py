"""The model families: what reads their config.json, and what loads their weights."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tiered.models.dream_config import dream_shape
from tiered.models.gidd_config import gidd_shape
from tiered.models.llada_config import llada_shape
from tiered.models.shape import ModelShape
from tiered.names import unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        name: as people write it; for cards and error messages.
        shape: reads the sizes and the weights' names out of a config.json.
        loader: where the family's model class is, as "module:name"; None for a family that can be planned, not loaded.
    """

    name: str
    shape: Callable[[Mapping[str, object]], ModelShape]
    loader: str | None = None

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
        "llada": Family(name="LLaDA", shape=llada_shape, loader="tiered.models.llada:LLaDA"),
        "Dream": Family(name="Dream", shape=dream_shape, loader="tiered.models.dream:Dream"),
        "gidd": Family(name="GIDD", shape=gidd_shape, loader="tiered.models.gidd:Gidd"),
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
