"""The token ids of a batch while they are denoised, and which of them are fixed."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.rows import Rows

PROMPT = -1
PENDING = 2**31 - 1


def columns_in_blocks(lengths: Sequence[int], block_length: int, new: int) -> tuple[int, int]:
    """Columns in front of the first block, and from there on, of prompts of these `lengths` with `new` tokens behind
    each, rounded up to whole blocks. Blocks count from the first token of each sequence."""
    front = max(length // block_length for length in lengths) * block_length
    return front, max(_blocks(length % block_length, block_length, new) for length in lengths) * block_length


def most_columns_in_blocks(columns: int, block_length: int, new: int | None, batch: int) -> tuple[int, int | None]:
    """Columns of the canvas, and of them from the first block on, that `columns` of the longest of `batch` prompts and
    its `new` tokens become at most, whatever the lengths of the other prompts. A prompt that ends one token before a
    block takes the most. `new`: None for any number of tokens; the answer's columns are None then."""
    last = block_length - 1
    if new is None:
        return -(-(columns + (last if batch > 1 else 0)) // block_length) * block_length, None
    longest = columns - new
    front, answer = columns_in_blocks([longest, min(longest, last)][:batch], block_length, new)
    return front + answer, answer


def _blocks(tail: int, block_length: int, new: int) -> int:
    return -(-(tail + new) // block_length)


def is_any(ids: Int[Tensor, "*rows"], tokens: Sequence[int]) -> Bool[Tensor, "*rows"]:
    """True where an id is one of `tokens`, which are few and on the host."""
    return reduce(or_, (ids == token for token in tokens))


class Canvas:
    """Prompts, padded on the left to one length, and answers behind them that begin as noise; every block spans the
    same columns.

    If blocks count from the first token of each sequence, a prompt's last tokens, its *tail*, may share a block with
    the first of its answer. Padding is then whole blocks, and some answers end a block before others.

    Attributes:
        tokens: ids; masks or other noise at open columns.
        committed_at: which forward of its own sequence fixed each token (0: the first); `PROMPT` in prompts and their
            padding, `PENDING` if no forward has. Mask tokens inside a prompt are never denoised.
        rows: all columns.
        pads, pad_counts: padding columns in front of each prompt, on the device and on the host.
        padded: whether any prompt is shorter than the longest.
        numbers: number in the call of each sequence that is still denoised.
        prompt_length, block_length, blocks: columns in front of the first block, columns of a block, number of blocks.
        tails, tail_counts: columns of the first block that are a prompt's, on the device (None for none) and the host.
    """

    def __init__(
        self,
        prompts: Int[Tensor, "batch prompt"],
        pads: Int[Tensor, " batch"],
        *,
        max_new_tokens: int,
        block_length: int,
        mask_token_id: int,
        trailing: int = 0,
        prior: Int[Tensor, "batch noise"] | None = None,
        tails: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """`prompts`: left-padded ids, `pads[b]` of them padding. `prior`: the noise that answers begin as, and that of
        `trailing` columns behind them, which stays; None for masks. `tails`: tokens of each tail. The last columns of
        `prompts` are tails, and the ids behind a shorter one have no meaning."""
        batch, columns = prompts.shape
        self.tails, self.tail_counts = tails, [0] * batch if tails is None else list[int](tails.tolist())
        self.prompt_length = columns - max(self.tail_counts)
        self.block_length = block_length
        self._own_blocks = [max_new_tokens // block_length] * batch
        if tails is not None:
            self._own_blocks = [_blocks(tail, block_length, max_new_tokens) for tail in self.tail_counts]
        self.blocks = max(self._own_blocks)
        answer = max_new_tokens if tails is None else self.blocks * block_length
        self._answer = slice(self.prompt_length, self.prompt_length + answer)
        if prior is None:
            prior = prompts.new_full((batch, self._answer.stop + trailing - columns), mask_token_id)
        self.tokens = torch.cat([prompts, prior], dim=1)
        self.committed_at = torch.full_like(self.tokens, PROMPT, dtype=torch.int32)
        self.committed_at[:, self.prompt_length :] = PENDING
        if tails is not None:
            first = slice(self.prompt_length, columns)
            prompt = torch.arange(columns - self.prompt_length, device=prompts.device) < tails[:, None]
            self.tokens[:, first].masked_fill_(~prompt, mask_token_id)
            self.committed_at[:, first].masked_fill_(prompt, PROMPT)
        self.rows = Rows.span(0, self.length, self.tokens.device)
        self.pads, self.pad_counts = pads, list[int](pads.tolist())
        self.padded = any(self.pad_counts)
        self.numbers = list(range(batch))

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def answers(self) -> Int[Tensor, "batch answer"]:
        return self.tokens[:, self._answer]

    @property
    def answer_ends(self) -> list[int]:
        """The column of `answers` behind the last block of each sequence."""
        return [blocks * self.block_length for blocks in self._own_blocks]

    @property
    def stops(self) -> list[int]:
        """The column behind the last of each sequence, which is its own where answers end in different blocks."""
        if self.tails is None:
            return [self.length] * self.batch
        return [self.prompt_length + end for end in self.answer_ends]

    def over(self, block: int) -> list[bool]:
        """True for sequences without a block behind `block`."""
        return [blocks <= block + 1 for blocks in self._own_blocks]

    def open_columns(self, block: int) -> list[int]:
        """Columns of `block` that no prompt has, by sequence."""
        return [self.block_length - (0 if block else tail) for tail in self.tail_counts]

    def block_span(self, block: int) -> tuple[int, int]:
        """First column of `block`, and the column behind its last."""
        start = self.prompt_length + block * self.block_length
        return start, start + self.block_length

    def pending(self, start: int, stop: int) -> Bool[Tensor, "batch columns"]:
        """True at columns from `start` to `stop` (exclusive) that no forward has fixed."""
        return self.committed_at[:, start:stop] == PENDING

    def ends(self, start: int, stop: int, tokens: Sequence[int]) -> Bool[Tensor, "batch columns"]:
        """True at columns from `start` to `stop` (exclusive) that a forward has fixed as one of `tokens`."""
        fixed = self.committed_at[:, start:stop]
        return is_any(self.tokens[:, start:stop], tokens) & (fixed != PENDING) & (fixed != PROMPT)

    def positions(self) -> Int[Tensor, "batch length"]:
        """RoPE position of every column: a prompt's first token is at 0. One row where no prompt is padded."""
        # A rotation depends on distances alone; positions that start at the prompt make a padded row's arithmetic the
        # same, to the bit, as that of the row alone.
        return (self.rows.index - self.pads[:, None]).clamp(min=0) if self.padded else self.rows.index

    def key_mask(self) -> Bool[Tensor, "batch length"] | None:
        """False at padding; None where there is none."""
        return self.rows.index >= self.pads[:, None] if self.padded else None

    def commit(
        self,
        start: int,
        chosen: Bool[Tensor, "batch columns"],
        tokens: Int[Tensor, "batch columns"],
        forwards: Int[Tensor, " batch"],
    ) -> None:
        """Fix `tokens` where `chosen`, in the columns from `start`, as forward `forwards[b]` of sequence b decided."""
        columns = slice(start, start + chosen.shape[1])
        self.tokens[:, columns] = tokens.where(chosen, self.tokens[:, columns])
        numbers = forwards.to(self.committed_at.dtype)[:, None]
        self.committed_at[:, columns] = numbers.where(chosen, self.committed_at[:, columns])

    def rewrite(self, start: int, chosen: Bool[Tensor, "batch columns"], tokens: Int[Tensor, "batch columns"]) -> None:
        """Put `tokens` where `chosen`, in the columns from `start`; they stay open."""
        columns = slice(start, start + chosen.shape[1])
        self.tokens[:, columns] = tokens.where(chosen, self.tokens[:, columns])

    def reopen(self) -> None:
        self.committed_at[:, self.prompt_length :] = PENDING

    def keep(self, sequences: list[int]) -> None:
        self.tokens, self.committed_at = self.tokens[sequences], self.committed_at[sequences]
        self.pads = self.pads[sequences]
        self.pad_counts = [self.pad_counts[sequence] for sequence in sequences]
        self.tails = None if self.tails is None else self.tails[sequences]
        self.tail_counts = [self.tail_counts[sequence] for sequence in sequences]
        self._own_blocks = [self._own_blocks[sequence] for sequence in sequences]
        self.numbers = [self.numbers[sequence] for sequence in sequences]
