"""The inspector and streamer that takes a `Frame` of a call after every forward. It changes nothing, and where it fails
it says so once and looks on no more."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.canvas import PENDING, Canvas
from tiered.core.features import Account, ColumnState, Tier
from tiered.core.ledger import Ledger
from tiered.core.rows import Rows
from tiered.decoding.observers import Traced
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.observe.watch.frame import Copied, Frame, TierBytes
from tiered.observe.watch.sequences import SequenceBooks
from tiered.offload.lane import Lane
from tiered.policies.base import PolicyState, Step, StepKind

P = ParamSpec("P")


def _guarded(method: "Callable[Concatenate[Watcher, P], None]") -> "Callable[Concatenate[Watcher, P], None]":
    """A hook whose errors end the view, never the call; what it takes is no time of the call's."""

    @wraps(method)
    def hook(self: "Watcher", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.failed:
            return
        self.entered = entered = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed = True
            with suppress(Exception):  # there may be nowhere to say it
                self.give_up(error)
        finally:
            self.own_seconds += time.perf_counter() - entered

    return hook


class Watcher:
    """Pass it to `Runtime.generate` as `inspector` and as `streamer`; one call each.

    Attributes:
        failed: whether an error has ended the view.
        own_seconds: that the hooks have taken; `entered`: when the last one was called.
        seconds: of the call up to the last frame, without `own_seconds`.
    """

    def __init__(
        self,
        ledger: Ledger,
        show: Callable[[Frame], None],
        give_up: Callable[[Exception], None],
        *,
        stop_at_eos: bool = True,
    ) -> None:
        """`show` gets every frame, and `give_up` the error where taking or showing one fails."""
        self.give_up, self.failed, self.own_seconds, self.entered = give_up, False, 0.0, 0.0
        self._ledger, self._show, self._stop_at_eos = ledger, show, stop_at_eos
        self._forwards = 0
        self._moved = dict.fromkeys(Lane, (0, 0))  # bytes and ns until the last frame
        self.seconds = 0.0

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """A count of layers for each column, and as much again while one is added to."""
        return {Account.ACTIVATIONS: 2 * torch.int16.itemsize * sequences * length}

    @_guarded
    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        """See `tiered.decoding.observers.CallInspector`."""
        self._canvas, self._forward, self._policy = canvas, forward, policy
        # With guidance a forward goes over twice the canvas's sequences; the first half is shown.
        self._counts = torch.zeros(canvas.batch, canvas.length, dtype=torch.int16, device=canvas.tokens.device)
        forward.rows_probe = self._count_rows
        self._books = SequenceBooks(
            canvas.tokens.cpu().numpy(),
            canvas.pads.tolist(),
            answer=(canvas.prompt_length, canvas.prompt_length + canvas.answers.shape[1]),
            mask_token_id=forward.model.mask_token_id,
            eos_token_id=forward.model.eos_token_id,
            stop_at_eos=self._stop_at_eos,
        )
        self._began, self.own_seconds = self.entered, 0.0
        self._block = 0, canvas.block_span(0), 0
        self._show(self._frame(-1, ""))

    @_guarded
    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        """See `tiered.decoding.observers.Inspector`. What the forward did is read here, what it committed later."""
        self._step, self._kind = step, kind
        batch = step.canvas.batch
        layers = self._counts[:batch].to("cpu", copy=True).numpy()
        self._counts.zero_()
        states = self._policy.column_states(step) if isinstance(self._policy, Traced) else None
        states = np.zeros(layers.shape, dtype=np.int8) if states is None else states.copy()
        states[layers > 0] |= ColumnState.RECOMPUTED
        streamed = forward.store.streamed_from
        if streamed is not None:
            states[:, streamed:] |= ColumnState.STREAMED
        self._books.stepped(step.canvas.numbers, states, layers)

    @_guarded
    def put(self, value: Tensor) -> None:
        """See `tiered.decoding.observers.Streamer`: the prompts, or a final block, which a frame has shown."""

    @_guarded
    def put_draft(self, value: Tensor) -> None:
        """The block after a commit, with proposals where nothing is fixed: the forward's frame is complete."""
        step, canvas = self._step, self._canvas
        if step.number == 0 and step.block == 0 and self._forwards:
            self._books.correcting = True
        self._block = step.block, (step.start, step.stop), step.number
        tokens = canvas.tokens.cpu()
        draft = tokens[:, step.start : step.stop].clone()
        for row, count in enumerate(canvas.open_columns(step.block)):  # behind what the prompt has of the block
            draft[row, -count:] = value[canvas.numbers[row], :count]
        self._books.committed(
            canvas.numbers,
            tokens=tokens.numpy(),
            draft=draft.numpy(),
            committed_at=canvas.committed_at.cpu().numpy(),
            pending=PENDING,
            span=(step.start, step.stop),
            clocks=step.forwards,
            active=step.active,
        )
        self._forwards += 1
        self._show(self._frame(self._forwards - 1, str(self._kind)))

    @_guarded
    def end(self) -> None:
        """See `tiered.decoding.observers.Streamer`."""

    def _count_rows(self, rows: Rows, sequences: int) -> None:
        """Count a layer at the rows whose keys and values it computes; no read from the device."""
        if self.failed:
            return
        shown = min(sequences, self._canvas.batch)
        valid = None if rows.valid is None else rows.valid[:shown]
        if rows.start is not None:
            counts = self._counts[:shown, rows.start : rows.start + rows.count]
            counts += 1 if valid is None else valid
        elif rows.index is not None:
            index = rows.index[:shown]
            ones = torch.ones_like(index, dtype=torch.int16) if valid is None else valid.short()
            self._counts[: len(index)].scatter_add_(1, index, ones)

    def _frame(self, forward: int, kind: str) -> Frame:
        seconds = max(0.0, self.entered - self._began - self.own_seconds)
        before, self.seconds = self.seconds, seconds
        block, span, number = self._block
        return Frame(
            forward=forward,
            kind=kind,
            block=block,
            blocks=self._canvas.blocks,
            step=number,
            span=span,
            seconds=seconds,
            forward_seconds=seconds - before,
            tiers=self._tiers(),
            copies=self._copies(),
            **self._books.figures(),
        )

    def _tiers(self) -> tuple[TierBytes, ...]:
        peaks, ledger = self._ledger.report().tiers, self._ledger
        return tuple(
            TierBytes(tier=tier, accounts=ledger.accounts(tier), peak=peaks[tier].peak, cap=ledger.budget.cap(tier))
            for tier in Tier
        )

    def _copies(self) -> Mapping[Lane, Copied]:
        if self._forward.tiers is None:
            return {}
        before = self._moved
        self._moved = {way: (it.nbytes, it.busy_ns) for way, it in self._forward.tiers.stats().ways.items()}
        return {
            way: Copied(nbytes=nbytes - before[way][0], busy_ns=busy_ns - before[way][1], total=nbytes)
            for way, (nbytes, busy_ns) in self._moved.items()
        }
