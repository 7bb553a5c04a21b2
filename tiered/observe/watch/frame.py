"""A snapshot of a call after one forward and its commit, in host arrays, and the texts of its tokens."""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from jaxtyping import Int, Int8
from transformers import PreTrainedTokenizerBase

from tiered.core.features import Account, ColumnState, Tier
from tiered.core.memory_report import TierReport
from tiered.offload.lane import Lane

LINE_BREAK = "⏎"


class TokenState(IntEnum):
    PAD = 0  # in front of a prompt
    PROMPT = 1
    NOISE = 2  # a mask, or noise that no step has rewritten
    DRAFT = 3  # open: the model's proposal, or a token that it may rewrite
    FRESH = 4  # fixed by this forward, or written over noise
    REVISED = 5  # rewritten by this forward
    FIXED = 6
    END = 7  # after the end of the answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One forward with its commit, or the canvas before the first. A sequence that has left keeps its last state."""

    blocks: int  # number of blocks of the call
    answer: tuple[int, int]  # first column of the answer, and the column after its last
    span: tuple[int, int]  # first column of the current block, and the column after its last
    tokens: Int[np.ndarray, "batch length"]  # ids; for a draft, the proposal
    states: Int8[np.ndarray, "batch length"]  # `TokenState` of every token
    column_states: Int8[np.ndarray, "batch length"]  # `ColumnState` of every column
    layers: Int[np.ndarray, "batch length"]  # number of layers that computed the column's keys and values anew
    active: np.ndarray  # [batch], True for a sequence that took part
    settled: Int[np.ndarray, " batch"]  # number of fixed tokens of each answer before its end
    forwards: Int[np.ndarray, " batch"]  # number of forwards of each sequence
    forward: int = -1  # number in the call, from 0; −1 before the first
    kind: str = ""  # `StepKind`; empty before the first
    block: int = 0
    step: int = 0  # number in the block
    correcting: bool = False  # in a second pass over the answer
    seconds: float = 0.0  # since the call began, without the view's own time
    forward_seconds: float = 0.0  # since the last frame, without the view's own time
    tiers: Mapping[Tier, TierReport] = field(default_factory=dict)
    accounts: Mapping[Tier, Mapping[Account, int]] = field(default_factory=dict)  # bytes held
    moved: Mapping[Lane, int] = field(default_factory=dict)  # bytes copied since the last frame
    moved_in_all: Mapping[Lane, int] = field(default_factory=dict)  # bytes copied since the call began

    @property
    def tokens_per_forward(self) -> float:
        """TPF so far, the mean over sequences."""
        return float((self.settled / np.maximum(1, self.forwards)).mean())

    def count(self, state: TokenState | ColumnState) -> int:
        return int((self.states == state if isinstance(state, TokenState) else self.column_states & state != 0).sum())


class Words(dict[int, str]):
    """The text of each token, with its leading space, and without characters that control a terminal."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mask_token_id: int, ends: Iterable[int]) -> None:
        super().__init__({**dict.fromkeys(ends, "∎"), mask_token_id: "░"})
        special = set(tokenizer.all_special_ids)
        self._tokenizer = tokenizer
        # Many tokenizers drop the leading space of a token alone, and keep it behind another token.
        self._first = next((token for token in range(len(tokenizer)) if token not in special), 0)

    def __missing__(self, token: int) -> str:
        before, both = self._decode(self._first), self._decode(self._first, token)
        text = both[len(before) :] if both.startswith(before) else self._decode(token)
        text = text.replace("\r\n", "\n").replace("\n", LINE_BREAK).replace("\t", " ")
        self[token] = "".join("�" if unicodedata.category(char)[0] == "C" else char for char in text)
        return self[token]

    def _decode(self, *tokens: int) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
