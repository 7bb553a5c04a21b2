"""Batches of clean text, and the masks that turn them into what the model has to fill in."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tiered.embedded.tasks import Example
from tiered.embedded.tokenizer import ASSISTANT, EOS, MASK, USER, build_tokenizer, vocabulary

TOKENIZER, VOCABULARY = build_tokenizer(), vocabulary()
EOS_ID, MASK_ID, EQUALS_ID, ADD_ID, CHAIN_ID = (VOCABULARY[token] for token in (EOS, MASK, "=", " add ", " chain "))
SUM_TOKENS = 4
# Loss weight of an end-of-text token behind the first one: they are trivial and many.
TAIL_WEIGHT = 0.03

Encoded = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Clean text: prompt, answer, and end-of-text tokens that fill the canvas.

    Attributes:
        ids: the text.
        prompt, answer: tokens of each prompt, and of each answer without its end.
        positions: RoPE positions, of each row or shared by all.
    """

    ids: Int[Tensor, "batch length"]
    prompt: Int[Tensor, " batch"]
    answer: Int[Tensor, " batch"]
    positions: Int[Tensor, "shared length"]

    def places(self) -> Int[Tensor, "batch length"]:
        """Place of every token in its canvas; negative in the prompt."""
        return torch.arange(self.ids.shape[1])[None] - self.prompt[:, None]


def encode(example: Example) -> Encoded:
    """Prompt ids as the chat template gives them, and answer ids without the end."""
    prompt = TOKENIZER.encode(f"{USER}{example.prompt}{ASSISTANT}").ids
    return prompt, TOKENIZER.encode(example.answer).ids


def collate(pairs: list[Encoded], length: int, positions: Int[Tensor, "shared length"] | None = None) -> Batch:
    """The pairs as rows of `length` tokens; `positions` None counts from 0."""
    rows = [prompt + answer + [EOS_ID] * (length - len(prompt) - len(answer)) for prompt, answer in pairs]
    prompt, answer = (torch.tensor([len(pair[part]) for pair in pairs]) for part in (0, 1))
    positions = torch.arange(length)[None] if positions is None else positions
    return Batch(ids=torch.tensor(rows), prompt=prompt, answer=answer, positions=positions)


def mask(batch: Batch, generator: torch.Generator) -> tuple[Int[Tensor, "batch length"], Float[Tensor, "batch length"]]:
    """The noised ids, and the loss weight of every token: above 0 at masks, 0 elsewhere.

    As LLaDA does (arXiv 2502.09992), the prompt is never masked, and a row masks each answer token with probability
    t ~ U(0, 1]. Unlike there, a quarter of the rows masks a suffix of the answer, as decoding from the left meets it;
    sums and values have rules of their own, below. The fill behind the answer's end is masked whole, shown whole, or
    treated as the answer is.
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
    values, keyed = _hidden_values(batch, uniform(rows, length) < 0.5)
    noise = torch.where(keyed & (kind > 0.5), values, noise)
    # The first end goes with the fill or with the answer, by chance.
    fill = place >= answer + (uniform(rows, 1) < 0.5)
    fate = uniform(rows, 1)
    whole, shown = fate < 0.4, (fate >= 0.4) & (fate < 0.75)
    noise = torch.where(fill, (noise | whole) & ~shown, noise) & (place >= 0)
    # Short answers weigh more a token than long ones, or sums would be lost among lists.
    weight = torch.where(place > answer, TAIL_WEIGHT, 1.0) * noise / (answer + 1) ** 0.5
    return batch.ids.masked_fill(noise, MASK_ID), weight


def _hidden_values(batch: Batch, coin: Tensor) -> tuple[Tensor, Tensor]:
    """Where `coin` hides values, both digits of one together, and which rows have any ("key=12", "+3=45").

    With keys and operations in sight, a hidden value often stands beside what it follows from. Independent masks show
    one digit or hide the key too, and teach far less.
    """
    inside = batch.places() >= 0
    equals = F.pad(batch.ids == EQUALS_ID, (2, 0))
    tens, ones = equals[:, 1:-1] & inside, equals[:, :-2] & inside
    keyed = ((batch.ids == EQUALS_ID) & inside).any(1, keepdim=True)
    return (tens & coin) | (ones & coin.roll(1, 1)), keyed
