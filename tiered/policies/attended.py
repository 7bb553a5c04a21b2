"""A cache whose steps renew what the answer looks at: the rows outside the block with most attention from its pending
rows, in the last layer of the last step. Under guidance the conditional half decides for both.

Related: d²Cache (arXiv 2509.23094, section 4) also recomputes rows by attention. It takes a rollout over maps of all
rows and layers. Here one layer's attention of the block is summed, which takes no map, and the number of rows is fixed,
so that nothing is read back from the device.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from tiered.core.buffers import FLOAT32, Buffer, dtype_name
from tiered.core.checks import check_integer
from tiered.core.features import Account
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.attention_received import attention_received, summed_chunk
from tiered.forward.forward import Forward
from tiered.forward.forward_bytes import part_rows
from tiered.forward.sizes import CallShape
from tiered.kernels.host_values import on_device
from tiered.policies.base import Needs, Pass, Policy, PolicyState, Step, StepKind
from tiered.policies.row_schedule import REFRESH_EVERY_4, row_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended(Policy):
    """`fast_dllm_dual`, and in every step the rows that the answer attends to.

    Attributes:
        attended_rows: rows outside the block that a step recomputes. With all of them answers equal those of `none`.
        refresh_blocks: blocks from one that begins with a refresh to the next; "auto" to decide before a call.
    """

    name: ClassVar[str] = "attended"
    attended_rows: int = 32
    refresh_blocks: int | Literal["auto"] = REFRESH_EVERY_4

    def __post_init__(self) -> None:
        check_integer("attended_rows", self.attended_rows, least=1)
        if self.refresh_blocks != "auto":
            check_integer("refresh_blocks", self.refresh_blocks, least=1)

    def needs(self, sizes: CallShape) -> Needs:
        return Needs(buffers=partial(_buffers, sizes), reads_keys=True)

    def start(self) -> PolicyState:
        return _Attending(self)


class _Attending(PolicyState):
    """The rows of `fast_dllm_dual`, and beside them those that received most attention in the last forward of their
    sequence."""

    def __init__(self, policy: Attended) -> None:
        self._policy = policy
        self._rows = row_schedule("fast_dllm_dual", refresh_blocks=policy.refresh_blocks).start()
        self._received: Float32[Tensor, "batch length"] | None = None

    def rows(self, step: Step) -> Pass:
        pass_, canvas, here = self._rows.rows(step), step.canvas, on_device(step.active, step.canvas.tokens.device)
        if self._received is None:
            self._received = torch.zeros(canvas.batch, canvas.length, device=canvas.tokens.device)
        if pass_.rows.count + self._policy.attended_rows >= canvas.length:
            pass_ = step.over(0, canvas.length, StepKind.REFRESH)
        elif pass_.kind is not StepKind.REFRESH:
            own = pass_.rows.within
            outside = self._received.clone()
            if (filled := canvas.key_mask()) is not None:  # padding is chosen when nothing else is left
                outside.masked_fill_(~filled, -1.0)
            outside[:, own.start : own.stop] = -2.0
            chosen = outside.topk(self._policy.attended_rows, dim=1).indices
            index = torch.cat([pass_.rows.index.expand(canvas.batch, -1), chosen], dim=1)
            whole = tuple(canvas.length - pads <= index.shape[1] for pads in canvas.pad_counts)
            pass_ = replace(pass_, rows=Rows.at(index), kind=StepKind.UPDATE, refreshed=whole)
        pending = here[:, None] & (step.rewrites | canvas.pending(step.start, step.stop))
        asking = torch.zeros_like(self._received, dtype=torch.bool)
        asking[:, step.first_row : step.last_row] = pending
        # What a waiting sequence has looked at counts in its next forward.
        self._received = self._received.masked_fill(here[:, None], 0)
        return replace(pass_, watch=partial(self._watch, asking))

    def keep(self, sequences: list[int]) -> None:
        if self._received is not None:
            self._received = self._received[sequences]

    @spanned(Op.WATCH)
    def _watch(
        self,
        asking: Bool[Tensor, "batch length"],
        forward: Forward,
        rows: Rows,
        queries: Float[Tensor, "sequences heads rows head_dim"],
    ) -> None:
        """Add the attention of those of `rows` that are `asking`."""
        assert self._received is not None, "`rows` comes first"
        (batch, length), shape = asking.shape, forward.model.shape
        last = shape.layers - 1
        dtype = dtype_name(queries.dtype)
        sizes = CallShape(shape=shape, batch=len(queries), context=length, block_length=rows.count, dtype=dtype)
        # A noise mask hides no column from the block.
        self._received += attention_received(
            queries[:batch],
            rows.columns(asking) if rows.is_span else asking.gather(1, rows.index[:batch]),
            forward.keys(last)[:batch],
            forward.limits.of(slice(batch)).key_mask,
            summed_chunk(sizes, rows=rows.count, held=_held(sizes)),
            soft_cap=shape.soft_cap,
            sink_keys=forward.model.sink_keys(last),
        )


def _buffers(sizes: CallShape) -> list[Buffer]:
    """Buffers of the policy's state and of its look at the last layer."""
    activations, columns = Account.ACTIVATIONS, (sizes.batch, sizes.context)
    most = min(sizes.block_length, part_rows(sizes.sequences))
    summed = _held(sizes) + summed_chunk(sizes, rows=most, held=_held(sizes)).nbytes(sizes)
    return [
        Buffer("attention received", activations, (2, *columns), "float32"),
        Buffer("rows that ask", activations, (2, *columns), "bool"),
        Buffer("attention of pending rows", activations, (summed,), phase="attention of pending rows"),
    ]


def _held(sizes: CallShape) -> int:
    """Bytes held while the attention of a block is summed: normed rows of the layer and their queries, a sum, and the
    sum so far."""
    shape, rows = sizes.shape, min(sizes.context, part_rows(sizes.sequences)) * sizes.sequences
    passing = rows * (shape.width + shape.heads_width) * sizes.element
    return passing + 2 * sizes.batch * sizes.context * FLOAT32
