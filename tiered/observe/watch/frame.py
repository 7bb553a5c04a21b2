"""Books: a snapshot of a call after one forward and its commit. Integers and arrays on the host, no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Int, Int8

from tiered.core.features import Account, ColumnState, Tier
from tiered.offload.lane import Lane


class State(IntEnum):
    """What a token of the canvas is."""

    PAD = 0  # in front of a prompt
    PROMPT = 1
    NOISE = 2  # a mask, or noise that no step has rewritten
    DRAFT = 3  # open: what the model proposes, or what it wrote and may write again
    FRESH = 4  # fixed by this forward, or written over noise
    REVISED = 5  # rewritten by this forward: it had been written before
    FIXED = 6
    END = 7  # behind the end of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """What the ledger books in one tier: bytes by account, at the peak of the call so far, and the cap (None: none)."""

    tier: Tier
    accounts: Mapping[Account, int]
    peak: int
    cap: int | None

    @property
    def held(self) -> int:
        """Bytes in all."""
        return sum(self.accounts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Copies one way: bytes since the frame before and how long copying them took, and bytes since the call began."""

    nbytes: int = 0
    busy_ns: int = 0
    total: int = 0

    @property
    def bytes_per_second(self) -> float | None:
        """While copies ran; None where none did."""
        return 1e9 * self.nbytes / self.busy_ns if self.busy_ns else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One forward with its commit, or the canvas before the first.

    Sequences that have left the call stay as they were. Arrays are [sequences of the call, columns of the canvas].

    Attributes:
        forward: its number in the call, from 0; −1 before the first.
        kind: of the step (`StepKind`); empty before the first.
        block, blocks: number of the current block, and how many there are.
        step: its number in the block.
        correcting: whether this is a second go over the answer.
        span: columns of the current block.
        answer: columns of the answer.
        tokens: ids; where a token is a draft, the proposal.
        states: `State` of every token.
        column_states: `ColumnState` of every column.
        layers: layers in which the column's keys and values were computed anew.
        edits: how often a token has changed so far.
        active: sequences that took part.
        settled: tokens of each answer so far: fixed, and in front of its end.
        forwards: that each sequence has taken part in.
        seconds: since the call began; `forward_seconds`: since the frame before. The view's own time is left out.
        tiers, copies: bytes held and moved; no `copies` where nothing can leave the device.
    """

    forward: int
    kind: str
    block: int
    blocks: int
    step: int
    correcting: bool
    span: tuple[int, int]
    answer: tuple[int, int]
    tokens: Int[np.ndarray, "batch length"]
    states: Int8[np.ndarray, "batch length"]
    column_states: Int8[np.ndarray, "batch length"]
    layers: Int[np.ndarray, "batch length"]
    edits: Int[np.ndarray, "batch length"]
    active: tuple[bool, ...]
    settled: tuple[int, ...]
    forwards: tuple[int, ...]
    seconds: float
    forward_seconds: float
    tiers: tuple[TierBytes, ...]
    copies: Mapping[Lane, Copied]

    @property
    def batch(self) -> int:
        """Sequences of the call."""
        return len(self.tokens)

    @property
    def tokens_per_forward(self) -> float:
        """TPF so far, the mean over sequences."""
        rates = [tokens / forwards for tokens, forwards in zip(self.settled, self.forwards, strict=True) if forwards]
        return sum(rates) / len(rates) if rates else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers so far over `seconds`."""
        return sum(self.settled) / self.seconds if self.seconds else 0.0

    def count(self, state: State) -> int:
        """Tokens of all sequences in this state."""
        return int((self.states == state).sum())

    def count_columns(self, state: ColumnState) -> int:
        """Columns of all sequences of which `state` is true."""
        return int((self.column_states & state != 0).sum())
