"""No policy of its own: a table says before each call which policy that call runs under."""

from dataclasses import dataclass
from typing import ClassVar

from tiered.models.shape import BLOCK_CAUSAL, CANVAS, Sight
from tiered.policies.base import Policy, PolicyState


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Policy):
    """Stands for the policy that `tiered.planning.choice.TABLE` has for the prompt and the blocks of a call."""

    name: ClassVar[str] = "auto"
    sights: ClassVar[frozenset[Sight]] = CANVAS | BLOCK_CAUSAL

    def start(self) -> PolicyState:
        raise TypeError("policy 'auto' is decided before a call (tiered.planning.choice), which runs under another one")
