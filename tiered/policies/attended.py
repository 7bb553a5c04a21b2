"""A cache whose steps renew what the answer looks at: the rows outside the block with most attention from its pending
rows in the last step. Under guidance the conditional half decides for both.

Related: d²Cache (arXiv 2509.23094, section 4) also recomputes rows by attention. It takes a rollout over maps of all
rows. Here the block's own attention is summed, which takes no map, and the number of rows is fixed, so that nothing is
read back from the device.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.core.buffers import Buffer
from tiered.core.checks import check_integer
from tiered.core.features import Account
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.attention_received import SummedChunk, attention_received, summed_chunk
from tiered.forward.forward import Forward
from tiered.forward.sizes import CallShape
from tiered.kernels.host_values import on_device
from tiered.policies.base import Needs, Pass, Policy, PolicyState, Step, StepKind
from tiered.policies.row_schedule import REFRESH_EVERY_4, row_schedule

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended(Policy):
    """`fast_dllm_dual`, and in every step the rows that the answer attends to.

    Attributes:
        attended_rows: rows outside the block that a step recomputes. With all of them answers equal those of `none`.
        attended_layers: layers whose attention counts, from the last one down.
        refresh_blocks: blocks from one that begins with a refresh to the next; "auto" to decide before a call.
    """

    name: ClassVar[str] = "attended"
    attended_rows: int = 32
    attended_layers: int = 2
    refresh_blocks: int | Literal["auto"] = REFRESH_EVERY_4

    def __post_init__(self) -> None:
        check_integer("attended_rows", self.attended_rows, least=1)
        check_integer("attended_layers", self.attended_layers, least=1)
        if self.refresh_blocks != "auto":
            check_integer("refresh_blocks", self.refresh_blocks, least=1)

    def needs(self, sizes: CallShape) -> Needs:
        return Needs(buffers=partial(_buffers, sizes), reads_keys=True)

    def start(self) -> PolicyState:
        return _Attending(self)


class _Attending(PolicyState):
    """The rows of `fast_dllm_dual`, and beside them those that received most attention in their sequence's last forward
    with pending tokens."""

    def __init__(self, policy: Attended) -> None:
        self._policy = policy
        self._rows = row_schedule("fast_dllm_dual", refresh_blocks=policy.refresh_blocks).start()
        self._received: Float32[Tensor, "batch length"] | None = None
        self._chunk: SummedChunk | None = None

    def rows(self, step: Step) -> Pass:
        pass_, canvas = self._rows.rows(step), step.canvas
        if self._received is None:
            self._received = torch.zeros(canvas.batch, canvas.length, device=canvas.tokens.device)
        if pass_.rows.count + self._policy.attended_rows >= canvas.length:
            pass_ = step.over(0, canvas.length, StepKind.REFRESH)
        elif pass_.kind is not StepKind.REFRESH:
            own = pass_.rows.within
            outside = self._received.clone()
            outside[:, own.start : own.stop] = -1.0
            chosen = outside.topk(self._policy.attended_rows, dim=1).indices
            index = torch.cat([pass_.rows.index.expand(canvas.batch, -1), chosen], dim=1)
            pass_ = replace(pass_, rows=Rows.at(index), kind=StepKind.UPDATE)
        return replace(pass_, program=partial(self._layer, step))

    def keep(self, sequences: list[int]) -> None:
        if self._received is not None:
            self._received = self._received[sequences]

    def _layer(self, step: Step, forward: Forward, layer: int, pass_: Pass) -> Pass:
        first = max(0, forward.model.shape.layers - self._policy.attended_layers)
        if layer < first:
            return forward.dense(layer, pass_)
        # Before the layer, which changes the residual stream in place.
        asking = forward.model.attention_norm(layer, pass_.hidden[:, pass_.output])
        queries = forward.queries(layer, pass_.rows[pass_.output], asking)
        del asking  # freed before the layer's own are made
        pass_ = forward.dense(layer, pass_)
        self._watch(step, forward, layer, queries[: step.canvas.batch], anew=layer == first)
        return pass_

    @spanned(Op.WATCH)
    def _watch(
        self,
        step: Step,
        forward: Forward,
        layer: int,
        queries: Float[Tensor, "batch heads block head_dim"],
        *,
        anew: bool,
    ) -> None:
        """Add the attention that `layer` gives each column from pending rows. `anew`: drop what was added before."""
        assert self._received is not None, "`rows` comes first"
        model, canvas = forward.model, step.canvas
        here = on_device(step.active, queries.device)[:, None]
        pending = here if step.rewrites else canvas.pending(step.start, step.stop) & here
        # A noise mask hides no column from the block.
        received = attention_received(
            queries,
            pending.expand(-1, queries.shape[2]),
            forward.keys(layer)[: canvas.batch],
            forward.limits.of(slice(canvas.batch)).key_mask,
            self._chunk or self._make_chunk(forward, queries),
            soft_cap=model.shape.soft_cap,
            sink_keys=model.sink_keys(layer),
        )
        if anew:
            self._received = received.where(here, self._received)
        else:
            self._received += received

    def _make_chunk(self, forward: Forward, queries: Tensor) -> SummedChunk:
        """Once in a call: sequences leave it, but none come."""
        (batch, _, block, _), shape = queries.shape, forward.model.shape
        dtype = str(queries.dtype).removeprefix("torch.")
        sizes = CallShape(shape=shape, batch=batch, context=forward.length, block_length=block, dtype=dtype)
        self._chunk = summed_chunk(sizes, rows=block, held=_held(sizes))
        return self._chunk


def _buffers(sizes: CallShape) -> list[Buffer]:
    """Buffers of the policy's state and steps."""
    shape, activations, columns = sizes.shape, Account.ACTIVATIONS, (sizes.batch, sizes.context)
    queries = (sizes.sequences, sizes.block_length, shape.heads * shape.head_dim)
    summed = _held(sizes) + summed_chunk(sizes, rows=sizes.block_length, held=_held(sizes)).nbytes(sizes)
    return [
        Buffer("attention received", activations, (2, *columns), "float32"),
        Buffer("queries of the block", activations, queries, sizes.dtype),
        Buffer("attention of pending rows", activations, (summed,), phase="attention of pending rows"),
    ]


def _held(sizes: CallShape) -> int:
    """Bytes held while the attention of a block is summed: its normed rows, and two sums."""
    return sizes.batch * (sizes.block_length * sizes.shape.width * sizes.element + 2 * sizes.context * _FLOAT32)
