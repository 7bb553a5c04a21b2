"""A cache whose updates renew a share of the rows outside the block by a selector, such as random rows.

All selectors renew as many rows, in the same steps, and the same rows in all layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.checks import check_integer, check_number, unknown_name
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.policies.base import Policy, PolicyState, Step, StepKind
from workloads.oracles import Oracle, OutputOracle
from workloads.selectors import (
    Attention,
    Drift,
    DriftAttention,
    FirstDrift,
    Look,
    Oldest,
    OutputDrift,
    PendingAttention,
    Random,
    RoundRobin,
    Selector,
)

SELECTORS: Mapping[str, Callable[[int], Selector]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "oldest": Oldest,
    "attention": Attention,
    "attention_pending": PendingAttention,
    "drift": Drift,
    "drift_output": OutputDrift,
    "drift_first": FirstDrift,
    "drift_attention": DriftAttention,
    "oracle": Oracle,
    "oracle_output": OutputOracle,
}


def renewed_rows(share: float, outside: int) -> int:
    """Rows that an update renews of so many `outside` the block: at least one, unless `share` is 0."""
    return min(outside, max(1, round(share * outside))) if share else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selecting(Policy):
    """A block begins with a refresh, and a step recomputes the block, as in `fast_dllm_dual`. Steps that are an update
    recompute the selector's rows beside it. A call has one sequence.

    Attributes:
        selector: name in `SELECTORS`.
        share: of the rows outside the block that an update renews, from 0 (no update) to 1 (all of them).
        interval: commits since the block's refresh or the last update that call for an update.
        seed: of what the selector draws.
    """

    name: ClassVar[str] = "selecting"
    selector: str
    share: float
    interval: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.selector not in SELECTORS:
            raise unknown_name("selector", self.selector, SELECTORS)
        check_number("share", self.share, least=0.0, most=1.0)
        check_integer("interval", self.interval, least=1)

    def start(self) -> "Renewing":
        return Renewing(self, SELECTORS[self.selector](self.seed))


class Renewing(PolicyState):
    """Counts commits, and lets the selector choose.

    Attributes:
        chosen: columns that each update renewed.
    """

    def __init__(self, policy: Selecting, selector: Selector) -> None:
        self._policy, self._selector = policy, selector
        self._since = 0
        self.chosen: list[list[int]] = []

    def rows(self, step: Step) -> Pass:
        canvas = step.canvas
        if canvas.batch != 1:
            raise ValueError(f"{canvas.batch} sequences; a selector's call has one")
        if step.number == 0:
            self._since = 0
            self._selector.begin(canvas.length)
            return replace(step.over(0, canvas.length, StepKind.REFRESH), program=self._program(step))
        count = renewed_rows(self._policy.share, canvas.length - (step.stop - step.first_row))
        if self._since < self._policy.interval or not count:
            return step.over(step.first_row, step.stop, StepKind.STEP)
        self._since = 0
        return replace(
            step.over(step.first_row, step.stop, StepKind.UPDATE), program=self._program(step, renewing=count)
        )

    def observe(self, step: Step, committed: Bool[Tensor, "batch block"]) -> None:
        self._since += int(committed.sum())

    def _program(self, step: Step, *, renewing: int = 0) -> Callable[[Forward, int, Pass], Pass]:
        """The layers of a refresh, or of an update that is `renewing` so many rows. An update chooses before its first
        layer, by all that the cache holds."""

        def program(forward: Forward, layer: int, pass_: Pass) -> Pass:
            if renewing and layer == 0:
                columns = self._selector.choose(Look(forward, step), renewing)
                self.chosen.append(columns.tolist())
                pass_ = _widened(forward, pass_, columns)
            return self._selector.layer(forward, layer, pass_, step)

        return program


def _widened(forward: Forward, pass_: Pass, columns: Int[Tensor, " chosen"]) -> Pass:
    """The pass over these columns too, behind its own."""
    rows = Rows.at(torch.cat([pass_.rows.index[0], columns])[None])
    return replace(pass_, rows=rows, hidden=forward.model.embed(rows.columns(pass_.ids)))
