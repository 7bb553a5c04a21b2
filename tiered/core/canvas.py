"""The token ids of a batch while they are denoised, and the forward that fixed each of them."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels.host_values import on_device

PROMPT = -1
PENDING = 2**31 - 1


def columns_in_blocks(lengths: Sequence[int], block_length: int, new: int) -> tuple[int, int]:
    """Columns before the first block, and columns from there on, for prompts of these `lengths` with `new` tokens each.
    Blocks count from the first token of each sequence, and columns are rounded up to whole blocks."""
    front = max(length // block_length for length in lengths) * block_length
    return front, max(_blocks(length % block_length, block_length, new) for length in lengths) * block_length


def most_columns_in_blocks(columns: int, block_length: int, new: int | None, batch: int) -> tuple[int, int | None]:
    """Most columns of a canvas, and of its part from the first block on, for `batch` prompts of any lengths. `columns`:
    tokens of the longest prompt and its `new` ones; `new`: None for any number of tokens, which makes the second result
    None. A prompt that ends one token before a block takes the most columns."""
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
    """Prompts, padded on the left to one length, followed by answers that begin as noise. Every block spans the same
    columns in all sequences.

    If blocks count from the first token of each sequence, a prompt's last tokens, its *tail*, may share a block with
    its answer. Padding is then whole blocks, and some answers end a block before others.

    Attributes:
        tokens: ids; masks or other noise at open columns.
        committed_at: number of the forward, counted by sequence from 0, that fixed each token; `PROMPT` in prompts and
            their padding, `PENDING` if open. Mask tokens inside a prompt are never denoised.
        rows: all columns.
        pads, pad_counts: padding columns before each prompt, on the device and on the host.
        padded: whether any prompt is shorter than the longest.
        numbers: number in the call of each sequence that is still denoised.
        prompt_length, block_length, blocks: columns before the first block, columns of a block, number of blocks.
        tails, tail_counts: columns of a prompt in the first block, on the device (None for none) and on the host.
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
        """
        Args:
            prompts: left-padded ids on the device, of which the first `pads[b]` are padding.
            pads: on the host.
            prior: initial noise of answers, followed by that of `trailing` columns, which stays; None for masks.
            tails: number of tokens of each tail, on the host. The last columns of `prompts` are tails; ids behind a
                shorter tail have no meaning.
        """
        batch, columns = prompts.shape
        self.tails = tails if tails is None else on_device(tails, prompts.device)
        self.tail_counts = [0] * batch if tails is None else list[int](tails.tolist())
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
        if self.tails is not None:
            first = slice(self.prompt_length, columns)
            prompt = torch.arange(columns - self.prompt_length, device=prompts.device) < self.tails[:, None]
            self.tokens[:, first].masked_fill_(~prompt, mask_token_id)
            self.committed_at[:, first].masked_fill_(prompt, PROMPT)
        self.rows = Rows.span(0, self.length, self.tokens.device)
        self.pads, self.pad_counts = on_device(pads, prompts.device), list[int](pads.tolist())
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
        """The column of `answers` after the last block of each sequence."""
        return [blocks * self.block_length for blocks in self._own_blocks]

    @property
    def stops(self) -> list[int]:
        """The column after the last of each sequence. With tails, answers may end in different blocks."""
        if self.tails is None:
            return [self.length] * self.batch
        return [self.prompt_length + end for end in self.answer_ends]

    def over(self, block: int) -> list[bool]:
        """True for sequences without a block after `block`."""
        return [blocks <= block + 1 for blocks in self._own_blocks]

    def open_columns(self, block: int) -> list[int]:
        """Number of columns of `block` that are not of the prompt, by sequence."""
        return [self.block_length - (0 if block else tail) for tail in self.tail_counts]

    def block_span(self, block: int) -> tuple[int, int]:
        """First column of `block`, and the column after its last."""
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
        """RoPE position of every column, 0 at a prompt's first token. A single row if no prompt is padded."""
        # Attention depends on distances alone, but positions from the prompt's start make the arithmetic of a padded
        # sequence equal, bit for bit, to that of the sequence alone.
        return (self.rows.index - self.pads[:, None]).clamp(min=0) if self.padded else self.rows.index

    def key_mask(self) -> Bool[Tensor, "batch length"] | None:
        """False at padding; None for no padding."""
        return self.rows.index >= self.pads[:, None] if self.padded else None

    def commit(
        self,
        start: int,
        chosen: Bool[Tensor, "batch columns"],
        tokens: Int[Tensor, "batch columns"],
        forwards: Int[Tensor, " batch"],
    ) -> None:
        """Fix the `chosen` ones of `tokens`, in the columns from `start`, as of forward `forwards[b]` of sequence b."""
        columns = slice(start, start + chosen.shape[1])
        written, numbers = self.tokens[:, columns], self.committed_at[:, columns]
        torch.where(chosen, tokens, written, out=written)
        torch.where(chosen, forwards.to(numbers.dtype)[:, None], numbers, out=numbers)

    def rewrite(self, start: int, chosen: Bool[Tensor, "batch columns"], tokens: Int[Tensor, "batch columns"]) -> None:
        """Write the `chosen` ones of `tokens` to the columns from `start`; they stay open."""
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
