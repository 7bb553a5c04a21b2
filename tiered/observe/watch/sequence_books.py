"""Books: what a view knows of every sequence of a call, also of those that have left it. Arrays, no tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int8

from tiered.observe.watch.frame import State
from tiered.observe.watch.token_states import Answer, end_of, later, settled


class SequenceBooks:
    """Tokens with their states and edits, and columns with their places; arrays are [sequences of the call, columns].

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
        self._places, self._layers = np.zeros(shape, dtype=np.int8), np.zeros(shape, dtype=np.int16)
        self._active, self._settled, self._forwards = [True] * batch, [0] * batch, [0] * batch

    def passed(
        self,
        numbers: Sequence[int],
        places: Int8[np.ndarray, "alive length"],
        layers: Int[np.ndarray, "alive length"],
    ) -> None:
        """A forward has gone over the sequences `numbers`; of the others no cache is left."""
        self._places, self._layers = np.zeros_like(self._places), np.zeros_like(self._layers)
        for row, number in enumerate(numbers):
            real = self._states[number] != State.PAD
            self._places[number], self._layers[number] = places[row] * real, layers[row] * real

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
        first, last = self._answer
        self._states = np.stack([later(row) for row in self._states])
        self._active = [False] * len(self._active)
        for row, number in enumerate(numbers):
            shown = tokens[row].copy()
            shown[slice(*span)] = draft[row]
            open_ = committed_at[row, first:last] == pending
            columns = np.arange(first, last)
            answer = Answer(
                before=self._tokens[number, first:last],
                now=tokens[row, first:last],
                draft=shown[first:last],
                pending=open_,
                fixed_now=(committed_at[row, first:last] == clocks[row]) & active[row],
                current=(span[0] <= columns) & (columns < span[1]),
                written=self._written[number, first:last],
            )
            end = end_of(answer.now, open_, self._eos) if self._stop_at_eos else None
            self._states[number, first:last] = answer.states(self._mask, end)
            changed = answer.now != answer.before
            self._edits[number, first:last] += changed
            self._written[number, first:last] |= changed | ~open_
            unsettled = open_ & ~self._written[number, first:last] if self.correcting else open_
            self._settled[number] = settled(answer.now, unsettled, self._eos)
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
            "places": self._places.copy(),
            "layers": self._layers.copy(),
            "edits": self._edits.copy(),
            "active": tuple(self._active),
            "settled": tuple(self._settled),
            "forwards": tuple(self._forwards),
        }
