"""A pass: what goes through the layers once, and the types of what may look at it or change it on its way."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.parts import Border, Part

_NOT_YET = torch.empty(0, 0, 0)


class StepKind(StrEnum):
    """What a forward was for; the output object counts forwards by kind."""

    REFRESH = "refresh"  # every row
    UPDATE = "update"  # rows beside those of a step, because the policy chose to renew them
    STEP = "step"  # only the rows that any step of the policy needs
    PREFILL = "prefill"  # a part of the prompts, written once for all
    COMMIT = "commit"  # a finished block, written as it stays


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes through the layers once; a policy makes it by the methods of `Step`.

    Attributes:
        ids: tokens of the canvas; of its first sequences, if the others stay as they are.
        rows: which go through, in any order. Valid ones are written.
        output: part of `rows` whose logits come out; a layer may drop all others once nothing reads them, so the last
            layer asks no query for them. Of a span they are the needed rows (`Step`). Scattered, they are any of them;
            a token that none of them predicts is no candidate in this step. Every active sequence needs a row that
            predicts a pending token, and rows that predict all of them if the rule rewrites tokens.
        kind: what the forward is for.
        final: columns in front of which tokens are final, of all sequences or of each. In a family with a noise mask
            they read each other alone; where contexts are causal, each reads those in front of it alone.
        program: how rows go through a layer; None for `Forward.dense`.
        reads: parts of keys and values that rows read beside those of the canvas.
        guided: under classifier-free guidance, the sequences that see their masked prompts in this forward; the others
            take the difference of their last forward with it. If none does, the forward goes over the first half of
            the batch alone. None for all, in every forward.
        refreshed: the sequences whose rows are all recomputed. None for all of them in a forward of kind `REFRESH`,
            else for none.
        hidden: the residual stream of the rows, which a layer may update in place; empty before the first layer.
        computed: rows that the layer before has recomputed, if it passed others on as they were cached; None for all.
    """

    ids: Int[Tensor, "sequences length"]
    rows: Rows
    output: slice
    kind: StepKind = StepKind.REFRESH
    final: Border = 0
    program: "LayerProgram | None" = None
    reads: tuple[Part, ...] = ()
    guided: tuple[bool, ...] | None = None
    refreshed: tuple[bool, ...] | None = None
    hidden: Float[Tensor, "batch rows width"] = _NOT_YET
    computed: int | None = None

    @property
    def count(self) -> int:
        """Rows of all sequences."""
        return len(self.ids) * self.rows.count


# Called with the `Forward`, the layer, and what enters it; returns what leaves it.
LayerProgram = Callable[[Any, int, Pass], Pass]
# Called with rows, their queries, the layer's keys, and the key mask, False at keys that may not be read.
AttentionProbe = Callable[[Rows, Tensor, Tensor, Tensor | None], None]
# Called with rows, and of how many sequences, the first ones.
RowsProbe = Callable[[Rows, int], None]
# Called with the branches of a part of the rows.
BranchKeeper = Callable[[Feature, slice, Tensor], None]
# Called with how many rows' work in a layer was done, of all sequences together.
Between = Callable[[float], None]


@runtime_checkable
class LayerWeights(Protocol):
    """Weights of layers that may be elsewhere than on the device."""

    def enter(self, layer: int) -> None:
        """Make the weights of `layer` usable from now on, and those of no other layer."""
