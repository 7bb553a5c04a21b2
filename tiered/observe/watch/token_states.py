"""Which state every token of an answer is in, from what the canvas was before a forward and is after its commit."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int8

from tiered.observe.watch.frame import State

# What a state is one forward later where nothing happens to it any more.
_LATER = {State.FRESH: State.FIXED, State.REVISED: State.FIXED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sequence's answer around one forward; arrays are [answer].

    Attributes:
        before, now: ids before the forward, and after its commit.
        draft: `now` with the model's proposals in the current block, where a rule fixes tokens once and for all.
        pending: True at tokens that are not fixed; `fixed_now`: fixed by this forward.
        current: True at the current block.
        written: True at tokens that were fixed or rewritten at some time before this forward.
    """

    before: Int[np.ndarray, " answer"]
    now: Int[np.ndarray, " answer"]
    draft: Int[np.ndarray, " answer"]
    pending: Bool[np.ndarray, " answer"]
    fixed_now: Bool[np.ndarray, " answer"]
    current: Bool[np.ndarray, " answer"]
    written: Bool[np.ndarray, " answer"]

    def states(self, mask_token_id: int, end: int | None) -> Int8[np.ndarray, " answer"]:
        """`State` of every token; those from column `end` on are behind the answer's end (None: it has none yet)."""
        changed, masked = self.now != self.before, self.now == mask_token_id
        states = np.full(self.now.shape, State.FIXED, dtype=np.int8)
        proposed = self.current & (self.draft != mask_token_id)
        rewritten = ~masked & (self.written | changed)
        states[self.pending] = State.NOISE
        states[self.pending & np.where(masked, proposed, rewritten)] = State.DRAFT
        states[self.fixed_now | changed] = State.FRESH
        states[changed & self.written] = State.REVISED
        if end is not None:
            states[end:] = State.END
        return states


def end_of(tokens: Int[np.ndarray, " answer"], pending: Bool[np.ndarray, " answer"], eos_token_id: int) -> int | None:
    """The column behind the end-of-sequence token that ends an answer: it is fixed and so is all in front of it."""
    fixed = int(np.argmax(pending)) if pending.any() else len(tokens)
    ends = np.flatnonzero(tokens[:fixed] == eos_token_id)
    return int(ends[0]) + 1 if len(ends) else None


def settled(tokens: Int[np.ndarray, " answer"], open_: Bool[np.ndarray, " answer"], eos_token_id: int) -> int:
    """Tokens that are not open, in front of the first end-of-sequence token among them."""
    ends = np.flatnonzero((tokens == eos_token_id) & ~open_)
    return int((~open_[: ends[0]] if len(ends) else ~open_).sum())


def later(states: Int8[np.ndarray, " columns"]) -> Int8[np.ndarray, " columns"]:
    """The same states after a forward in which the sequence has no part."""
    states = states.copy()
    for state, after in _LATER.items():
        states[states == state] = after
    return states
