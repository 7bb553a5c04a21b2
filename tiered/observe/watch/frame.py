"""Books: a snapshot of a call after one forward and its commit. Integers and arrays on the host, no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from jaxtyping import Int, Int8

from tiered.core.features import Account, ColumnState, Tier
from tiered.core.memory_report import TierReport
from tiered.offload.lane import Lane


class State(IntEnum):
    """The state of a token on the canvas."""

    PAD = 0  # in front of a prompt
    PROMPT = 1
    NOISE = 2  # a mask, or noise that no step has rewritten
    DRAFT = 3  # open: the model's proposal, or a token that it may rewrite
    FRESH = 4  # fixed by this forward, or written over noise
    REVISED = 5  # rewritten by this forward
    FIXED = 6
    END = 7  # behind the end of the answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One forward with its commit, or the canvas before the first. A sequence that has left keeps its last state."""

    blocks: int  # of the call
    answer: tuple[int, int]  # first column of the answer, and the column behind it
    span: tuple[int, int]  # the same of the current block
    tokens: Int[np.ndarray, "batch length"]  # ids; the proposal where a token is a draft
    states: Int8[np.ndarray, "batch length"]  # `State` of every token
    column_states: Int8[np.ndarray, "batch length"]  # `ColumnState` of every column
    layers: Int[np.ndarray, "batch length"]  # number of layers that computed the column's keys and values anew
    active: np.ndarray  # [batch], True for a sequence that took part
    settled: Int[np.ndarray, " batch"]  # number of tokens of each answer that are fixed and in front of its end
    forwards: Int[np.ndarray, " batch"]  # number of forwards of each sequence
    forward: int = -1  # number in the call, from 0; −1 before the first
    kind: str = ""  # `StepKind`; empty before the first
    block: int = 0
    step: int = 0  # number in the block
    correcting: bool = False  # in a second pass over the answer
    seconds: float = 0.0  # since the call began, without the view's own time
    forward_seconds: float = 0.0  # the same since the frame before
    tiers: Mapping[Tier, TierReport] = field(default_factory=dict)
    accounts: Mapping[Tier, Mapping[Account, int]] = field(default_factory=dict)  # bytes held
    moved: Mapping[Lane, int] = field(default_factory=dict)  # bytes copied since the frame before
    moved_in_all: Mapping[Lane, int] = field(default_factory=dict)  # bytes copied since the call began

    @property
    def tokens_per_forward(self) -> float:
        """TPF so far, the mean over sequences."""
        return float((self.settled / np.maximum(1, self.forwards)).mean())

    def count(self, state: State | ColumnState) -> int:
        """Number of tokens, or of columns, in this state."""
        return int((self.states == state if isinstance(state, State) else self.column_states & state != 0).sum())
