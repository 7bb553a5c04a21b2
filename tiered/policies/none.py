"""No cache: every step recomputes every row. The yardstick of exactness, and the cheapest in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tiered.core.features import Feature
from tiered.models.shape import BLOCK_CAUSAL, CANVAS, ModelShape, Sight
from tiered.policies.base import Policy, PolicyState, Step, StepKind, StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCache(Policy):
    """The official samplers' behaviour. Keys and values live in a workspace of one layer."""

    name: ClassVar[str] = "none"
    sights: ClassVar[frozenset[Sight]] = CANVAS | BLOCK_CAUSAL

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        return {Feature.KEY: 1, Feature.VALUE: 1}

    def start(self) -> PolicyState:
        return _EveryRow()


class _EveryRow(PolicyState):
    def rows(self, step: Step) -> StepRows:
        return StepRows.of_span(0, step.canvas.length, step, StepKind.REFRESH)
