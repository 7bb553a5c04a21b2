"""The inspector and streamer that makes a `Frame` after every forward of a call, without changing the call."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.canvas import PENDING, PROMPT, Canvas
from tiered.core.features import Account, ColumnState, Tier
from tiered.core.ledger import Ledger
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.models.shape import ModelShape
from tiered.observe.watch.frame import Frame, TokenState
from tiered.policies.base import PolicyState, Step, StepKind
from tiered.policies.polestar.policy import Drifting
from tiered.tiers.stats import ENDS


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A hook whose errors end the view but not the call. Its time is subtracted from the call's."""

    @wraps(method)
    def hook(self: "Watcher", /, *args: Any, **kwargs: Any) -> None:
        if self.failed:
            return
        self.entered = entered = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed = True
            with suppress(Exception):  # the terminal may be gone
                self.give_up(error)
        finally:
            self.own_seconds += time.perf_counter() - entered

    return hook


class Watcher:
    """`inspector` and `streamer` of one call of `Runtime.generate`.

    Attributes:
        failed: True after an error has ended the view.
        seconds, own_seconds: seconds of the call up to the last frame, without the hooks, and seconds of the hooks.
        entered: start time of the last hook, in seconds.
    """

    def __init__(
        self, ledger: Ledger, show: Callable[[Frame], None], give_up: Callable[[Exception], None], stop_at_eos: bool
    ) -> None:
        """
        Args:
            ledger: ledger of the runtime.
            show: called with every frame.
            give_up: called with the error if a frame cannot be made or shown; no frame follows.
            stop_at_eos: option of the call.
        """
        self.give_up, self.failed = give_up, False
        self.seconds = self.own_seconds = self.entered = 0.0
        self._ledger, self._show, self._stop_at_eos = ledger, show, stop_at_eos

    def device_bytes(self, shape: ModelShape, *, sequences: int, length: int, dtype: str) -> Mapping[Account, int]:
        """Bytes of a count of layers for each column, and of the columns and ones added to it at a time."""
        return {Account.ACTIVATIONS: (2 * torch.int16.itemsize + torch.int64.itemsize) * sequences * length}

    @_guarded
    def begin(self, canvas: Canvas, forward: Forward, policy: PolicyState) -> None:
        """See `tiered.decoding.observers.CallInspector`."""
        self._canvas, self._forward, self._policy = canvas, forward, policy
        # With guidance, a forward has twice the canvas's sequences; the view shows the first half.
        self._counts = torch.zeros(canvas.batch, canvas.length, dtype=torch.int16, device=canvas.tokens.device)
        forward.rows_probe = self._count_rows
        self._tokens = canvas.tokens.cpu().numpy().copy()
        self._written = np.zeros(self._tokens.shape, dtype=bool)  # a forward has fixed or changed the token
        of_prompt = canvas.committed_at.cpu().numpy() == PROMPT
        states = np.where(of_prompt, TokenState.PROMPT, TokenState.NOISE).astype(np.int8)
        for row, pads in enumerate(canvas.pad_counts):
            states[row, :pads] = TokenState.PAD
        self._began, self.own_seconds = self.entered, 0.0
        self._complete(
            Frame(
                blocks=canvas.blocks,
                answer=(canvas.prompt_length, canvas.prompt_length + canvas.answers.shape[1]),
                span=canvas.block_span(0),
                tokens=self._tokens.copy(),
                states=states,
                column_states=np.zeros_like(states),
                layers=np.zeros_like(states, dtype=np.int16),
                active=np.ones(canvas.batch, dtype=bool),
                settled=np.zeros(canvas.batch, dtype=int),
                forwards=np.zeros(canvas.batch, dtype=int),
            )
        )

    @_guarded
    def after_forward(self, step: Step, kind: StepKind, *_: object) -> None:
        """See `tiered.decoding.observers.Inspector`. The frame follows after the commit (`put_draft`)."""
        self._step, rows, before = step, step.canvas.numbers, self._frame
        counts = self._counts[: step.canvas.batch].to("cpu", copy=True).numpy()
        self._counts.zero_()
        states = self._policy.column_states(step) if isinstance(self._policy, Drifting) else None
        states = np.zeros(counts.shape, dtype=np.int8) if states is None else states.copy()
        states[counts > 0] |= ColumnState.RECOMPUTED
        if (streamed := self._forward.store.streamed_from) is not None:
            states[:, streamed:] |= ColumnState.STREAMED
        real = before.states[rows] != TokenState.PAD
        column_states, layers = np.zeros_like(before.column_states), np.zeros_like(before.layers)
        column_states[rows], layers[rows] = states * real, counts * real  # a finished sequence has no cache
        again = step.number == 0 and step.block == 0 and before.forward >= 0
        self._frame = replace(
            before,
            column_states=column_states,
            layers=layers,
            forward=before.forward + 1,
            kind=str(kind),
            block=step.block,
            span=(step.start, step.stop),
            step=step.number,
            correcting=before.correcting or again,
        )

    def put(self, value: Tensor) -> None:
        """Do nothing: a frame has shown these tokens already."""

    @_guarded
    def put_draft(self, value: Tensor) -> None:
        """Complete the frame with the block after the commit and the proposals for its open tokens."""
        frame, step, canvas, rows = self._frame, self._step, self._canvas, self._canvas.numbers
        tokens = canvas.tokens.cpu().numpy()
        drafted = tokens.copy()
        for row, count in enumerate(canvas.open_columns(step.block)):  # the block's first columns may be of the prompt
            drafted[row, step.stop - count : step.stop] = value[rows[row], :count]
        clocks, active = np.array(step.forwards), np.array(step.active)
        fresh = (canvas.committed_at.cpu().numpy() == clocks[:, None]) & active[:, None]
        states, settled = frame.states.copy(), frame.settled.copy()
        states[np.isin(states, (TokenState.FRESH, TokenState.REVISED))] = TokenState.FIXED
        states[rows], settled[rows] = self._committed(tokens, drafted, fresh)
        shown, took_part, forwards = frame.tokens.copy(), np.zeros_like(frame.active), frame.forwards.copy()
        shown[rows], took_part[rows], forwards[rows] = drafted, active, clocks + active
        self._tokens[rows] = tokens
        new = {"tokens": shown, "states": states, "active": took_part, "settled": settled, "forwards": forwards}
        self._complete(replace(frame, **new))

    def end(self) -> None:
        """Do nothing."""

    def _committed(
        self, tokens: Int[np.ndarray, "rows length"], drafted: Int[np.ndarray, "rows length"], fresh: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token states of the sequences on the canvas, and each one's number of settled tokens. `fresh`: True for a
        token that this forward fixed."""
        rows, answer, model = self._canvas.numbers, slice(*self._frame.answer), self._forward.model
        states, at = self._frame.states[rows], self._canvas.committed_at.cpu().numpy()
        written, changed, open_ = self._written[rows], tokens != self._tokens[rows], at == PENDING
        mine = np.where(open_, TokenState.NOISE, TokenState.FIXED)
        # A rule that rewrites leaves written tokens open; under others an open token is a mask with a proposal.
        mine[open_ & np.where(tokens == model.mask_token_id, drafted != tokens, written | changed)] = TokenState.DRAFT
        mine[fresh | changed] = TokenState.FRESH
        mine[changed & written] = TokenState.REVISED
        mine = np.where(at == PROMPT, states, mine)
        self._written[rows] = written = written | changed | ~open_
        settled = ((written if self._frame.correcting else ~open_) & (at != PROMPT))[:, answer]
        ends = settled & np.isin(tokens[:, answer], model.ends)
        if self._stop_at_eos:
            ended = np.logical_or.accumulate(ends & ~np.logical_or.accumulate(open_[:, answer], axis=1), axis=1)
            mine[:, answer][:, 1:][ended[:, :-1]] = TokenState.END
        states[:, answer] = mine[:, answer]
        return states, (settled & ~np.logical_or.accumulate(ends, axis=1)).sum(axis=1)

    def _count_rows(self, rows: Rows, sequences: int) -> None:
        """Count a layer for the rows whose keys and values it computes, without a device-to-host read."""
        if not self.failed:
            columns = rows.index.expand(sequences, -1)[: len(self._counts)]
            ones = torch.ones_like(columns, dtype=torch.int16)
            self._counts.scatter_add_(1, columns, ones if rows.valid is None else ones * rows.valid[: len(columns)])

    def _complete(self, frame: Frame) -> None:
        # The ledger counts features and weights.
        before, counted = frame.moved_in_all, self._ledger.moved
        moved = {lane: counted[way] for lane, way in ENDS.items() if way in counted}
        last, self.seconds = self.seconds, max(0.0, self.entered - self._began - self.own_seconds)
        self._frame = replace(
            frame,
            seconds=self.seconds,
            forward_seconds=self.seconds - last,
            tiers=self._ledger.report().tiers,
            accounts={tier: self._ledger.accounts(tier) for tier in Tier},
            moved_in_all=moved,
            moved={lane: nbytes - before.get(lane, 0) for lane, nbytes in moved.items()},
        )
        self._show(self._frame)
