"""A pass through the layers, and the types of its probes and programs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.parts import Border, Part

_NOT_YET = torch.empty(0, 0, 0)


class StepKind(StrEnum):
    """The purpose of a forward; the output object counts forwards by kind."""

    REFRESH = "refresh"  # every row
    UPDATE = "update"  # also rows that the policy chose to renew
    STEP = "step"  # only the rows that any step of the policy needs
    PREFILL = "prefill"  # a part of the prompts, written once
    COMMIT = "commit"  # also a finished block, to write its final tokens


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows that go through the layers once; a policy makes a pass by the methods of `Step`.

    Attributes:
        ids: tokens of the canvas; of its first sequences, if the others stay as they are.
        rows: rows that go through, in any order. Valid ones are written.
        output: the part of `rows` whose logits are computed. A layer may drop all others once no later one reads them,
            so the last layer computes no query of them. Of a span they are the needed rows (`Step`). Scattered, they
            are any of them; a token that none of them predicts is no candidate in this step. Every active sequence
            needs a row that predicts a pending token, and rows that predict all of them if the rule rewrites tokens.
        kind: purpose of the forward.
        final: columns in front of which tokens are final, of all sequences or of each. In a family with a noise mask
            they only read each other. If contexts are causal, each reads only those in front of it.
        program: the layer program of the rows; None for `Forward.dense`.
        reads: parts of keys and values that rows read beside those of the canvas.
        guided: under classifier-free guidance, the sequences that see their masked prompts in this forward; the others
            reuse the difference of their last forward with it. If there are none, the forward only goes over the first
            half of the batch. None for all, in every forward.
        watch: called in the last layer, before the attention of rows; None for no call.
        soft: `DiffusionModel.soft_tokens` of the output rows in the step before, if the model is conditioned on them.
            None in a block's first step.
        refreshed: the sequences whose rows are all recomputed. None for all of them in a forward of kind `REFRESH`,
            and otherwise for no sequence.
        hidden: the residual stream of the rows, which a layer may update in place; empty before the first layer.
        computed: rows that the previous layer recomputed, if it passed others on from the cache; None for all.
    """

    ids: Int[Tensor, "sequences length"]
    rows: Rows
    output: slice
    kind: StepKind = StepKind.REFRESH
    final: Border = 0
    program: "LayerProgram | None" = None
    reads: tuple[Part, ...] = ()
    guided: tuple[bool, ...] | None = None
    watch: "AttentionWatch | None" = None
    soft: Float[Tensor, "sequences output width"] | None = None
    refreshed: tuple[bool, ...] | None = None
    hidden: Float[Tensor, "batch rows width"] = _NOT_YET
    computed: int | None = None

    @property
    def count(self) -> int:
        """Rows of all sequences."""
        return len(self.ids) * self.rows.count

    @property
    def outputs(self) -> int:
        """Rows of all sequences whose logits are computed."""
        return len(self.ids) * self.rows[self.output].count


# Called with the `Forward`, the layer and its input; returns its output.
LayerProgram = Callable[[Any, int, Pass], Pass]
# Called with the `Forward`, rows, and their queries, once all keys of the layer are written.
AttentionWatch = Callable[[Any, Rows, Tensor], None]
# Called with rows, their queries, the layer's keys, and the key mask, False at keys that may not be read.
AttentionProbe = Callable[[Rows, Tensor, Tensor, Tensor | None], None]
# Called with rows, and the number of sequences (the first ones) that they are of.
RowsProbe = Callable[[Rows, int], None]
# Called with the branches of a part of the rows.
BranchKeeper = Callable[[Feature, slice, Tensor], None]
# Called with the work done in a layer, in rows of all sequences together.
Between = Callable[[float], None]
