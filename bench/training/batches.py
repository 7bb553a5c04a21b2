"""Batches of clean text: prompts, answers, and the fill of their canvases."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from training.tasks import Example
from training.tokenizer import ASSISTANT, EOS, MASK, USER, build_tokenizer, vocabulary

TOKENIZER, VOCABULARY = build_tokenizer(), vocabulary()
EOS_ID, MASK_ID, EQUALS_ID, ADD_ID, CHAIN_ID = (VOCABULARY[token] for token in (EOS, MASK, "=", " add ", " chain "))

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
