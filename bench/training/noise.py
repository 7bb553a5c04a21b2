"""Noise in a batch's answers: masks, or other tokens by chance."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.models.shape import ModelShape
from training.batches import ADD_ID, EQUALS_ID, MASK_ID, Batch

SUM_TOKENS = 4
MASKED_BLOCK = 32
# Loss weight of an end-of-text token behind the first one: they are trivial and many.
TAIL_WEIGHT = 0.03
# Uniform noise: share of rows as decoding block by block meets them, tokens between starts of blocks, block lengths.
BLOCK_SHARE, BLOCK_START, BLOCK_LENGTHS = 0.5, 8, (8, 32)
WHOLE_SHARE = 0.25  # share of blocks that are hidden whole, for a model that sees blocks
# Share of rows of noise alone, as every block begins, beside the few that a high level makes so.
PURE_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """A batch as the model sees it.

    Attributes:
        ids: the text, with noise.
        hidden: tokens that noise has taken.
        asked: tokens that the model is asked for: hidden ones if masks show them, else all behind `clean`.
        clean: number of final tokens at the beginning of each row; the prompt's, at least.
        weight: loss weight of every token, above 0 at `asked` alone.
    """

    ids: Int[Tensor, "batch length"]
    hidden: Bool[Tensor, "batch length"]
    asked: Bool[Tensor, "batch length"]
    clean: Int[Tensor, " batch"]
    weight: Float[Tensor, "batch length"]


Process = Callable[[Batch, torch.Generator], Noised]


def process_of(shape: ModelShape) -> Process:
    """The noise that a model of this shape is trained on."""
    if shape.block_length is not None:
        return partial(mask_in_blocks, block_length=shape.block_length)
    return partial(exchange, vocab_size=shape.vocab_size) if shape.noise == "uniform" else mask


def mask(batch: Batch, generator: torch.Generator) -> Noised:
    """Masks, as LLaDA has them (arXiv 2502.09992)."""
    hidden = _chosen(batch, generator)
    ids = batch.ids.masked_fill(hidden, MASK_ID)
    return Noised(ids=ids, hidden=hidden, asked=hidden, clean=batch.prompt, weight=_weight(batch, hidden))


def mask_in_blocks(batch: Batch, generator: torch.Generator, *, block_length: int) -> Noised:
    """Masks for a model that sees blocks. Half of the rows are as in `mask`. In the others each block has a level of
    its own, and a quarter of the blocks is hidden whole, as every block begins."""
    (rows, length), count = batch.ids.shape, -(-batch.ids.shape[1] // block_length)
    level = 1 - torch.rand(rows, count, generator=generator)
    level.masked_fill_(torch.rand(rows, count, generator=generator) < WHOLE_SHARE, 1.0)
    by_block = torch.rand(rows, length, generator=generator) < level.repeat_interleave(block_length, 1)[:, :length]
    half = torch.rand(rows, 1, generator=generator) < 0.5
    hidden = torch.where(half, by_block & (batch.places() >= 0), _chosen(batch, generator))
    ids = batch.ids.masked_fill(hidden, MASK_ID)
    return Noised(ids=ids, hidden=hidden, asked=hidden, clean=batch.prompt, weight=_weight(batch, hidden))


def exchange(batch: Batch, generator: torch.Generator, *, vocab_size: int) -> Noised:
    """Uniform noise, as in GIDD (arXiv 2503.04482): hidden tokens become any token but the mask, with one probability.

    Nothing shows which tokens are hidden, so the model is asked for all. Half of the rows are as decoding in blocks
    meets them. The answer is final in front of a border, partly hidden in the block behind it, and noise behind that.
    """
    rows, length = batch.ids.shape
    hidden = _chosen(batch, generator)

    def uniform() -> Tensor:
        return torch.rand(rows, 1, generator=generator)

    place = batch.places()
    in_blocks, starts, pure = uniform() < BLOCK_SHARE, uniform(), uniform() < PURE_SHARE
    # Up to the block in which the answer ends.
    border = (starts * (batch.answer[:, None] // BLOCK_START + 1)).long() * BLOCK_START * in_blocks
    block = torch.where(uniform() < 0.5, *BLOCK_LENGTHS)
    asked = place >= border
    hidden = (hidden | pure | (in_blocks & (place >= border + block))) & asked
    # Draws leave the mask out: tokens from the mask on are one up.
    tokens = torch.randint(vocab_size - 1, (rows, length), generator=generator)
    ids = torch.where(hidden, tokens + (tokens >= MASK_ID), batch.ids)
    clean = batch.prompt + border[:, 0]
    return Noised(ids=ids, hidden=hidden, asked=asked, clean=clean, weight=_weight(batch, asked))


def _weight(batch: Batch, asked: Bool[Tensor, "batch length"]) -> Float[Tensor, "batch length"]:
    """Loss weights. Short answers weigh more a token than long ones, or sums would be lost among lists."""
    answer = batch.answer[:, None]
    return torch.where(batch.places() > answer, TAIL_WEIGHT, 1.0) * asked / (answer + 1) ** 0.5


def _chosen(batch: Batch, generator: torch.Generator) -> Bool[Tensor, "batch length"]:
    """The tokens that noise takes: none of the prompt, and each of a row's answer with probability t ~ U(0, 1].

    A quarter of the rows hides a suffix of the answer, as decoding from the left meets it. Another quarter hides part
    of a block and all behind it, as decoding block by block meets it. Sums and values have rules of their own, below.
    The fill behind the answer's end is hidden whole, shown whole, or treated as the answer.
    """
    rows, length = batch.ids.shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator)

    place, answer = batch.places(), batch.answer[:, None]
    ratio, kind = 1 - uniform(rows, 1), uniform(rows, 1)
    noise = uniform(rows, length) < ratio
    # Sums are hidden whole half of the time: four digits leave little to infer from the others.
    sums = (answer == SUM_TOKENS) & (batch.ids[:, 1:2] == ADD_ID)
    noise = noise | (sums & (uniform(rows, 1) < 0.5))
    noise = torch.where(kind < 0.25, place >= (1 - ratio) * (answer + 1), noise)
    # Another quarter as decoding block by block meets it; an answer of one block is as it was.
    border = (uniform(rows, 1) * (answer // MASKED_BLOCK + 1)).long() * MASKED_BLOCK
    in_blocks = (place >= border) & (noise | (place >= border + MASKED_BLOCK))
    noise = torch.where((kind >= 0.25) & (kind < 0.5), in_blocks, noise)
    values, keyed = _hidden_values(batch, uniform(rows, length) < 0.5)
    noise = torch.where(keyed & (kind > 0.5), values, noise)
    # The first end goes with the fill or with the answer, by chance.
    fill = place >= answer + (uniform(rows, 1) < 0.5)
    fate = uniform(rows, 1)
    whole, shown = fate < 0.4, (fate >= 0.4) & (fate < 0.75)
    return torch.where(fill, (noise | whole) & ~shown, noise) & (place >= 0)


def _hidden_values(batch: Batch, coin: Tensor) -> tuple[Tensor, Tensor]:
    """Values that `coin` hides, both digits of one together, and rows that have any ("key=12", "+3=45").

    With keys and operations visible, a hidden value often stands beside tokens that it follows from. Independent masks
    show one digit or hide the key too, and teach far less.
    """
    inside = batch.places() >= 0
    equals = F.pad(batch.ids == EQUALS_ID, (2, 0))
    tens, ones = equals[:, 1:-1] & inside, equals[:, :-2] & inside
    keyed = ((batch.ids == EQUALS_ID) & inside).any(1, keepdim=True)
    return (tens & coin) | (ones & coin.roll(1, 1)), keyed
