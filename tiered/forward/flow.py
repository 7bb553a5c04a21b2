"""What goes from layer to layer, and the types of what may look at it or change it on its way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes from layer to layer.

    Attributes:
        rows: the positions of `hidden`.
        hidden: the residual stream of these rows; a layer may update it in place.
        output: the rows, by their place in `rows`, whose logits the step needs. A layer may drop all others once
            nothing reads them, so the last layer asks no query for them.
        computed: rows that the layer before has recomputed, where it passed others on as they were cached; None: all.
    """

    rows: Rows
    hidden: Float[Tensor, "batch rows width"]
    output: slice
    computed: int | None = None


# Called with the `Forward`, the layer, and what enters it.
LayerProgram = Callable[[Any, int, Flow], Flow]
# Called with rows, their queries, the layer's keys, and the key mask, False at keys that may not be read.
AttentionProbe = Callable[[Rows, Tensor, Tensor, Tensor | None], None]
# Called with rows, and of how many sequences, the first ones.
RowsProbe = Callable[[Rows, int], None]
# Called with the branches of a part of the rows.
BranchKeeper = Callable[[Feature, slice, Tensor], None]
# Called with how many rows' work in a layer was done, of all sequences together.
Between = Callable[[float], None]


@spanned(Op.RESIDUAL)
def add_branch(
    hidden: Float[Tensor, "batch rows width"], part: slice, branch: Float[Tensor, "batch part width"]
) -> None:
    """Add a branch of the rows in `part` to the residual stream, in place."""
    hidden[:, part].add_(branch)


@runtime_checkable
class LayerWeights(Protocol):
    """Weights of layers that may be elsewhere than on the device."""

    def enter(self, layer: int) -> None:
        """Make the weights of `layer` usable from now on, and those of no other layer."""
