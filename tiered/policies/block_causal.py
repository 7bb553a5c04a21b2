"""The exact cache of block-causal families, whose rows see their block and the columns before it.

Keys and values of a finished block never change again. So the prompt's whole blocks are written once, and a step
recomputes the open block alone. A finished block is written once more, with its final tokens (SDAR, arXiv 2510.06303).
Its rows do not read the next block. So they go through the layers with the first step of that block, one forward fewer.
No feature is ever stale, so answers equal those of `none`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tiered.core.checks import check_integer
from tiered.forward.forward_bytes import PART_ROWS
from tiered.forward.sizes import CallShape
from tiered.models.shape import BLOCK_CAUSAL, Sight
from tiered.policies.base import Needs, Pass, Policy, PolicyState, Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCausal(Policy):
    """Keep keys and values of finished blocks.

    Attributes:
        prefill_rows: rows of a forward over the prompts, of all sequences together, in whole blocks and at least one
            block of each sequence. More rows read the weights less often, and need more memory for hidden states.
    """

    name: ClassVar[str] = "block_causal"
    sights: ClassVar[frozenset[Sight]] = BLOCK_CAUSAL
    prefill_rows: int = PART_ROWS

    def __post_init__(self) -> None:
        check_integer("prefill_rows", self.prefill_rows, least=1)

    def needs(self, sizes: CallShape) -> Needs:
        front, block = sizes.context - (sizes.answer or 0), sizes.block_length
        two = min(2 * block, sizes.context - front // block * block)  # unless the answer is one block
        return Needs(most_rows=max(block, two, min(front, self.chunk(sizes.sequences, block))))

    def chunk(self, sequences: int, block_length: int) -> int:
        """Rows of each sequence in a forward over the prompts."""
        return max(1, self.prefill_rows // sequences // block_length) * block_length

    def start(self) -> PolicyState:
        return _Blocks(self)


class _Blocks(PolicyState):
    def __init__(self, policy: BlockCausal) -> None:
        self._policy = policy

    def before_block(self, step: Step) -> Iterator[Pass]:
        if step.block:
            return
        sequences = step.canvas.batch * (2 if step.guidance else 1)
        chunk = self._policy.chunk(sequences, step.stop - step.start)
        for first in range(0, step.start, chunk):
            yield step.written(first, min(first + chunk, step.start), StepKind.PREFILL)

    def rows(self, step: Step) -> Pass:
        if step.block and not step.number:
            return step.over(2 * step.start - step.stop, step.stop, StepKind.COMMIT)
        return step.over(step.start, step.stop, StepKind.STEP)
