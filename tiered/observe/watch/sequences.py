"""Books: what a view knows of every sequence of a call, also of those that have left it. Arrays, no tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int8

from tiered.observe.watch.frame import State


class SequenceBooks:
    """Tokens with their states and edits, and columns with theirs; arrays are [sequences of the call, columns].

    Attributes:
        correcting: whether the call goes over its answer a second time.
    """

    def __init__(
        self,
        tokens: Int[np.ndarray, "batch length"],
        pads: Sequence[int],
        *,
        answer: tuple[int, int],
        mask_token_id: int,
        eos_token_id: int,
        stop_at_eos: bool,
    ) -> None:
        """`tokens`: the canvas before the first forward; `pads`: columns of padding in front of each sequence;
        `answer`: its columns."""
        self.correcting = False
        self._answer, self._mask, self._eos, self._stop_at_eos = answer, mask_token_id, eos_token_id, stop_at_eos
        batch, _ = shape = tokens.shape
        self._tokens, self._shown = tokens.copy(), tokens.copy()
        self._states = np.full(shape, State.NOISE, dtype=np.int8)
        for row, pad in zip(self._states, pads, strict=True):
            row[:pad], row[pad : answer[0]] = State.PAD, State.PROMPT
        self._written = np.zeros(shape, dtype=bool)
        self._edits = np.zeros(shape, dtype=np.int32)
        self._column_states, self._layers = np.zeros(shape, dtype=np.int8), np.zeros(shape, dtype=np.int16)
        self._active, self._settled, self._forwards = [True] * batch, [0] * batch, [0] * batch

    def stepped(
        self,
        numbers: Sequence[int],
        column_states: Int8[np.ndarray, "alive length"],
        layers: Int[np.ndarray, "alive length"],
    ) -> None:
        """A forward has gone over the sequences `numbers`; of the others no cache is left."""
        self._column_states, self._layers = np.zeros_like(self._column_states), np.zeros_like(self._layers)
        for row, number in enumerate(numbers):
            real = self._states[number] != State.PAD
            self._column_states[number], self._layers[number] = column_states[row] * real, layers[row] * real

    def committed(
        self,
        numbers: Sequence[int],
        *,
        tokens: Int[np.ndarray, "alive length"],
        draft: Int[np.ndarray, "alive block"],
        committed_at: Int[np.ndarray, "alive length"],
        pending: int,
        span: tuple[int, int],
        clocks: Sequence[int],
        active: Sequence[bool],
    ) -> None:
        """What that forward committed.

        Args:
            numbers: of the sequences, in the call.
            tokens, committed_at: of the canvas; `pending` is what the latter has where nothing is fixed.
            draft: the columns `span` with proposals.
            clocks: number of the forward by each sequence's own count.
            active: sequences that took part.
        """
        # What was fresh one forward ago.
        self._states[np.isin(self._states, (State.FRESH, State.REVISED))] = State.FIXED
        self._active = [False] * len(self._active)
        answer = slice(*self._answer)
        for row, number in enumerate(numbers):
            shown = tokens[row].copy()
            shown[slice(*span)] = draft[row]
            now, at, written = tokens[row, answer], committed_at[row, answer], self._written[number, answer]
            open_, changed = at == pending, now != self._tokens[number, answer]
            states = self._states[number, answer]
            states[:] = np.where(open_, State.NOISE, State.FIXED)
            # Where a rule rewrites tokens, one that was written stays open; else it is the model that proposes.
            proposed = (shown != tokens[row])[answer]
            states[open_ & np.where(now == self._mask, proposed, written | changed)] = State.DRAFT
            states[((at == clocks[row]) & active[row]) | changed] = State.FRESH
            states[changed & written] = State.REVISED
            if self._stop_at_eos:
                states[_end(now, open_, self._eos) :] = State.END
            self._edits[number, answer] += changed
            written |= changed | ~open_
            self._settled[number] = _settled(now, open_ & ~written if self.correcting else open_, self._eos)
            self._tokens[number], self._shown[number] = tokens[row], shown
            self._active[number] = active[row]
            self._forwards[number] = clocks[row] + active[row]

    def figures(self) -> dict[str, Any]:
        """The fields of a `Frame` that are by sequence; copies."""
        return {
            "correcting": self.correcting,
            "answer": self._answer,
            "tokens": self._shown.copy(),
            "states": self._states.copy(),
            "column_states": self._column_states.copy(),
            "layers": self._layers.copy(),
            "edits": self._edits.copy(),
            "active": tuple(self._active),
            "settled": tuple(self._settled),
            "forwards": tuple(self._forwards),
        }


def _end(tokens: Int[np.ndarray, " answer"], open_: Bool[np.ndarray, " answer"], eos_token_id: int) -> int:
    """The column behind the end-of-sequence token that ends an answer, which is fixed as is all in front of it; without
    one the column behind the answer."""
    fixed = int(np.argmax(open_)) if open_.any() else len(tokens)
    ends = np.flatnonzero(tokens[:fixed] == eos_token_id)
    return int(ends[0]) + 1 if len(ends) else len(tokens)


def _settled(tokens: Int[np.ndarray, " answer"], open_: Bool[np.ndarray, " answer"], eos_token_id: int) -> int:
    """Tokens that are not open, in front of the first end-of-sequence token among them."""
    ends = np.flatnonzero((tokens == eos_token_id) & ~open_)
    return int((~open_[: ends[0]] if len(ends) else ~open_).sum())
