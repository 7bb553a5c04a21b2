"""A cache whose updates renew a share of the rows outside the block by a selector, such as random rows.

All selectors renew as many rows, in the same steps, and the same rows in all layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
    LayerAttention,
    Look,
    Oldest,
    OutputDrift,
    PendingAttention,
    Random,
    RoundRobin,
    Selector,
)

LAYERS = 5  # of an embedded model
SELECTORS: Mapping[str, Callable[[int], Selector]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "oldest": Oldest,
    "attention": Attention,
    "attention_pending": PendingAttention,
    **{f"attention_layer_{number + 1}": partial(LayerAttention, layer=number) for number in range(LAYERS)},
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
    recompute the selector's rows beside it. Prompts of a call have equally many tokens.

    Attributes:
        selector: name in `SELECTORS`.
        share: share of the rows outside the block that an update renews, from 0 (no update) to 1 (all of them).
        interval: commits since the block's refresh or the last update that call for an update, of the sequence that
            commits most.
        seed: seed of the selector's draws for the first sequence; the n-th one behind it has seed + n.
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
        chosen: columns that each update renewed, by sequence.
    """

    def __init__(self, policy: Selecting, selector: Selector) -> None:
        self._policy, self._selector = policy, selector
        self._since = 0
        self.chosen: list[list[list[int]]] = []

    def rows(self, step: Step) -> Pass:
        canvas = step.canvas
        if canvas.padded:
            raise ValueError(f"pads {canvas.pad_counts}; a selector's call has prompts of equally many tokens")
        if step.number == 0:
            self._since = 0
            self._selector.begin(canvas.batch, canvas.length)
            return replace(step.over(0, canvas.length, StepKind.REFRESH), program=self._program(step))
        count = renewed_rows(self._policy.share, canvas.length - (step.stop - step.first_row))
        if self._since < self._policy.interval or not count:
            return step.over(step.first_row, step.stop, StepKind.STEP)
        self._since = 0
        return replace(
            step.over(step.first_row, step.stop, StepKind.UPDATE), program=self._program(step, renewing=count)
        )

    def observe(self, step: Step, committed: Bool[Tensor, "batch block"]) -> None:
        self._since += int(committed.sum(dim=1).max())

    def keep(self, sequences: list[int]) -> None:
        self._selector.keep(sequences)

    def _program(self, step: Step, *, renewing: int = 0) -> Callable[[Forward, int, Pass], Pass]:
        """The layers of a refresh, or of an update that renews `renewing` rows. An update chooses before its first
        layer, by the whole cache."""

        def program(forward: Forward, layer: int, pass_: Pass) -> Pass:
            if renewing and layer == 0:
                columns = self._selector.choose(Look(forward, step), renewing)
                self.chosen.append(columns.tolist())
                pass_ = _widened(forward, pass_, columns)
            return self._selector.layer(forward, layer, pass_, step)

        return program


def _widened(forward: Forward, pass_: Pass, columns: Int[Tensor, "batch chosen"]) -> Pass:
    """The pass over these columns too, behind its own."""
    own = pass_.rows.index.expand(len(columns), -1)
    valid = None if pass_.rows.valid is None else pass_.rows.valid[:, :1].expand(-1, own.shape[1] + columns.shape[1])
    rows = Rows.at(torch.cat([own, columns], dim=1), valid)
    return replace(pass_, rows=rows, hidden=forward.model.embed(rows.columns(pass_.ids)))
