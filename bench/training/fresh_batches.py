"""The stream of `FRESH_TASKS`: one task, one prompt length and one number of printed keys a batch."""

import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from training.batches import MASK_ID, VOCABULARY, Batch, collate, encode
from training.curriculum import Curriculum
from training.lookup_batches import stretched
from training.noise import TAIL_WEIGHT, Noised
from training.tasks import FRESH_PRINTED, FRESH_TASKS, KEY_TOKENS, draw

BLOCK, MOST_BLOCKS = 32, 4  # tokens of a block, and blocks of a canvas
SMALLEST, SPREAD = 24, 5  # least tokens of a prompt, and the longest prompt over the shortest at one step
SHARE = 0.5  # most tokens of an answer, as a share of its prompt's
REACH = 4096  # positions that prompts with gaps spread over
# First token of a prompt's entries, and tokens of one; the last of them are its key, which answers print.
ENTRIES = {"sort_marked": (6, 2), "sort_numbers": (5, 3)}
# Shares of rows that hide all behind a border, or part of a block and all behind it; others hide keys by chance.
# `ENDS`: range of borders over that of answers.
BEHIND, IN_BLOCKS, ENDS = 0.3, 0.5, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a batch of one of `FRESH_TASKS`.

    Attributes:
        start: first column of each key of the prompts.
        same: True if a key of the answer prints an entry of the prompt.
    """

    start: Int[Tensor, " entries"]
    same: Bool[Tensor, "batch printed entries"]


def fresh_task(seed: int, step: int, curriculum: Curriculum) -> str:
    """The task of a step's batch."""
    names = list(FRESH_TASKS)
    return random.Random(f"task/{seed}/{step}").choices(names, [curriculum.weights[name] for name in names])[0]


def fresh_batch(task: str, seed: int, step: int, curriculum: Curriculum, tokens: int) -> Batch:
    """About `tokens` tokens of a task. Prompt lengths are log-uniform up to the curriculum's bound; some batches have
    spread positions."""
    rng = random.Random(f"{task}/{seed}/{step}")
    high = curriculum.fresh_high[task]
    size = round(math.exp(rng.uniform(math.log(max(SMALLEST, high / SPREAD)), math.log(high))))
    most = max(2, min(FRESH_PRINTED[1], int(size * SHARE) // KEY_TOKENS))
    printed = most if rng.random() < 0.3 else rng.randint(2, most)
    tight = KEY_TOKENS * printed + rng.randint(1, 4)
    canvas = tight if rng.random() < 0.6 else BLOCK * rng.randint(-(-tight // BLOCK), MOST_BLOCKS)
    count = max(1, tokens // (size + canvas))
    pairs = [encode(draw(task, "train", rng, size=size, printed=printed)) for _ in range(count)]
    length = len(pairs[0][0]) + canvas
    far = rng.random() < 0.3
    return collate(pairs, length, stretched(rng, length, canvas + 2, REACH, count, *ENTRIES[task]) if far else None)


def keys_of(task: str, batch: Batch) -> Keys:
    """The keys of a batch of `task`. Its prompts have one length, and its answers print equally many keys."""
    (first, tokens), prompt, answer = ENTRIES[task], int(batch.prompt[0]), int(batch.answer[0])
    entries = batch.ids[:, first : prompt - 1].unflatten(1, (-1, tokens))
    printed = batch.ids[:, prompt : prompt + answer].unflatten(1, (-1, KEY_TOKENS))
    same = (entries[:, None, :, -KEY_TOKENS:] == printed[:, :, None]).all(-1)
    same &= (entries[..., 0] != VOCABULARY[" ?"])[:, None]
    start = first + tokens - KEY_TOKENS + tokens * torch.arange(entries.shape[1])
    return Keys(start=start, same=same)


def seen_keys(hidden: Bool[Tensor, "batch length"], batch: Batch) -> Bool[Tensor, "batch printed"]:
    """True for keys of the answers that are visible."""
    prompt, answer = int(batch.prompt[0]), int(batch.answer[0])
    return ~hidden[:, prompt : prompt + answer].unflatten(1, (-1, KEY_TOKENS)).any(-1)


def mask_as_decoded(batch: Batch, generator: torch.Generator) -> tuple[Noised, Float[Tensor, "batch length"]]:
    """Masks, mostly as decoding from the left meets them: printed keys are visible up to a border.

    Returns:
        The batch, with weights of keys that stand right behind a visible one or begin the answer. And the weights of
        all other hidden tokens, which are guesses.
    """
    (rows, length), answer = batch.ids.shape, batch.answer[:, None]
    place = batch.places()

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator)

    kind, ratio, coin = uniform(rows, 1), 1 - uniform(rows, 1), uniform(rows, length)
    # One row of six asks for the end: it is one token of many, and has to be sure that no key is left.
    border = (uniform(rows, 1) * (answer + 1) * ENDS).long().clamp(max=answer)
    block = border // BLOCK * BLOCK
    in_blocks = (place >= block) & ((coin < ratio) | (place >= block + BLOCK))
    by_key = (coin < ratio).gather(1, (place.clamp(min=0) // KEY_TOKENS * KEY_TOKENS).clamp(max=length - 1))
    hidden = torch.where(kind < BEHIND, place >= border, torch.where(kind < BEHIND + IN_BLOCKS, in_blocks, by_key))
    # Half of the rows show the fill from a random place on, mostly an early one, which does not show the answer's end.
    spare = length - batch.prompt[:, None] - answer
    shown, start = uniform(rows, 1) < 0.5, answer + (uniform(rows, 1) ** 2 * (spare + 1)).long()
    blocks = (kind >= BEHIND) & (kind < BEHIND + IN_BLOCKS) & (place >= block + BLOCK)
    hidden = torch.where(place >= answer, ~shown | (place < start) | blocks, hidden) & (place >= 0)
    seen = F.pad(seen_keys(hidden, batch), (1, 0), value=True).repeat_interleave(KEY_TOKENS, 1)
    prompt = int(batch.prompt[0])
    near = torch.zeros_like(hidden)
    width = min(seen.shape[1], length - prompt)
    near[:, prompt : prompt + width] = seen[:, :width]
    near &= place <= answer
    weight = hidden / (answer + 1) ** 0.5
    noised = Noised(
        ids=batch.ids.masked_fill(hidden, MASK_ID),
        hidden=hidden,
        asked=hidden,
        clean=batch.prompt,
        weight=weight * near,
    )
    # Where other answers of the task go on, an end weighs as much as their tokens, or the model would go on.
    tail = place > max(int(answer.max()), KEY_TOKENS * FRESH_PRINTED[1])
    return noised, weight * ~near * torch.where(tail, TAIL_WEIGHT, 1.0)
