"""The official block-wise sampler as people write it by hand, around any function that gives logits.

It has LLaDA's schedule (arXiv 2502.09992, algorithm 5) with one token a step, or Fast-dLLM's confidence threshold
(arXiv 2505.22618, section 3.3). Tokens are by argmax, confidence is by softmax in float64, and the best token is always
committed. Two things are as in this library, so that the same work is timed. The mask token is never proposed, and an
ended sequence leaves at the end of its block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Called with the sequences that are left [batch], all columns of them [batch, columns], the block's first column, the
# column behind its last, and whether it is the block's first pass; gives logits [batch, block, vocab].
Logits = Callable[[Tensor, Tensor, int, int, bool], Tensor]


@dataclass(slots=True, kw_only=True)
class GenerationState:
    """The answers of `denoise`, and its forwards."""

    answers: Tensor  # [batch, answer] ids; padding behind an end-of-sequence token
    forwards: list[int]  # forwards of each sequence
    seconds: list[float] = field(default_factory=list)  # seconds of every forward with its commit
    first_block: int = 0  # forwards of the first block


def denoise(
    logits: Logits,
    prompts: Tensor,
    *,
    answer: int,
    block: int,
    threshold: float | None,
    mask_token: int,
    end_token: int,
    pad_token: int,
    watch: Callable[[], object] = lambda: None,
) -> GenerationState:
    """Answer `prompts` [batch, columns], padded on the left, with `answer` tokens in blocks of `block`. `threshold`:
    least confidence of a commit; None for one token a step. `watch` is called behind every forward, untimed."""
    batch, width = prompts.shape
    canvas = torch.cat([prompts, prompts.new_full((batch, answer), mask_token)], dim=1)
    done = GenerationState(answers=canvas[:, width:].clone(), forwards=[0] * batch)
    left = torch.arange(batch, device=prompts.device)
    for start in range(width, width + answer, block):
        stop, first = start + block, True
        is_open = torch.ones(len(left), block, dtype=torch.bool, device=prompts.device)
        ended = torch.zeros(len(left), dtype=torch.bool, device=prompts.device)
        while (going := is_open.any(dim=1) & ~ended).any():
            began = time.perf_counter()
            found = logits(left, canvas, start, stop, first)
            chosen, tokens = commit(found, is_open & going[:, None], threshold, mask_token)
            canvas[:, start:stop] = torch.where(chosen, tokens, canvas[:, start:stop])
            is_open &= ~chosen
            # An end-of-sequence token is committed, and so is everything in front of it.
            ended = ((canvas[:, start:stop] == end_token) & (is_open.int().cumsum(dim=1) == 0)).any(dim=1)
            done.seconds.append(time.perf_counter() - began)
            for number in left[going].tolist():
                done.forwards[number] += 1
            first = False
            watch()
        done.first_block = done.first_block or len(done.seconds)
        done.answers[left] = canvas[:, width:]
        canvas, left = canvas[~ended], left[~ended]
        if not len(left):
            break
    behind = (done.answers == end_token).cumsum(dim=1) - (done.answers == end_token).int() > 0
    done.answers[behind] = pad_token
    return done


def commit(found: Tensor, is_open: Tensor, threshold: float | None, mask_token: int) -> tuple[Tensor, Tensor]:
    """The columns to commit now, of `is_open` [batch, block], and tokens, by logits `found` [batch, block, vocab]."""
    shares = found.double().softmax(dim=-1)
    shares[..., mask_token] = -1.0
    confidence, tokens = shares.max(dim=-1)
    confidence = confidence.masked_fill(~is_open, -1.0)
    chosen = torch.zeros_like(is_open).scatter_(1, confidence.argmax(dim=1, keepdim=True), True)
    if threshold is not None:
        chosen |= confidence >= threshold
    return chosen & is_open, tokens
