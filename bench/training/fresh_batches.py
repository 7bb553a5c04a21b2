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
SMALLEST, SPREAD = 24, 5  # tokens of a prompt, and how many times as long the longest one of its time is
SHARE = 0.5  # of a prompt's tokens, which its answer has at most
REACH = 4096  # positions that prompts with gaps spread over
# Where the entries of a prompt begin, and tokens of one; its key, which answers print, are the last of them.
ENTRIES = {"sort_marked": (6, 2), "sort_numbers": (5, 3)}
# How batches are noised: all behind a border is hidden; a block is hidden in part, and all behind it; keys by chance.
BEHIND, IN_BLOCKS, ENDS = 0.3, 0.5, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a batch of one of `FRESH_TASKS`.

    Attributes:
        start: column in which each key of the prompts begins.
        same: whether an entry of the prompt is the one that a key of the answer prints.
    """

    start: Int[Tensor, " entries"]
    same: Bool[Tensor, "batch printed entries"]


def fresh_task(seed: int, step: int, curriculum: Curriculum) -> str:
    """The task of a step's batch."""
    names = list(FRESH_TASKS)
    return random.Random(f"task/{seed}/{step}").choices(names, [curriculum.weights[name] for name in names])[0]


def fresh_batch(task: str, seed: int, step: int, curriculum: Curriculum, tokens: int) -> Batch:
    """About `tokens` tokens of a task; prompt lengths are log-uniform up to the curriculum's bound, and positions of
    some of them spread."""
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
    """The keys of a batch of `task`, whose prompts have one length and whose answers print equally many."""
    (first, tokens), prompt, answer = ENTRIES[task], int(batch.prompt[0]), int(batch.answer[0])
    entries = batch.ids[:, first : prompt - 1].unflatten(1, (-1, tokens))
    printed = batch.ids[:, prompt : prompt + answer].unflatten(1, (-1, KEY_TOKENS))
    same = (entries[:, None, :, -KEY_TOKENS:] == printed[:, :, None]).all(-1)
    same &= (entries[..., 0] != VOCABULARY[" ?"])[:, None]
    start = first + tokens - KEY_TOKENS + tokens * torch.arange(entries.shape[1])
    return Keys(start=start, same=same)


def seen_keys(hidden: Bool[Tensor, "batch length"], batch: Batch) -> Bool[Tensor, "batch printed"]:
    """The keys of the answers that are in sight."""
    prompt, answer = int(batch.prompt[0]), int(batch.answer[0])
    return ~hidden[:, prompt : prompt + answer].unflatten(1, (-1, KEY_TOKENS)).any(-1)


def mask_as_decoded(batch: Batch, generator: torch.Generator) -> tuple[Noised, Float[Tensor, "batch length"]]:
    """Masks as decoding from the left meets them, mostly: what is printed is in sight up to a border.

    Returns:
        The batch with weights of the keys that stand right behind one in sight, or begin the answer; and the weights
        of all other hidden tokens, whose places are guesses.
    """
    (rows, length), answer = batch.ids.shape, batch.answer[:, None]
    place = batch.places()

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator)

    kind, ratio, coin = uniform(rows, 1), 1 - uniform(rows, 1), uniform(rows, length)
    # An end is asked for in one row of six: it is one token of many, and has to be sure that no key is left.
    border = (uniform(rows, 1) * (answer + 1) * ENDS).long().clamp(max=answer)
    block = border // BLOCK * BLOCK
    in_blocks = (place >= block) & ((coin < ratio) | (place >= block + BLOCK))
    by_key = (coin < ratio).gather(1, (place.clamp(min=0) // KEY_TOKENS * KEY_TOKENS).clamp(max=length - 1))
    hidden = torch.where(kind < BEHIND, place >= border, torch.where(kind < BEHIND + IN_BLOCKS, in_blocks, by_key))
    # Of the fill, ends are shown from anywhere on, mostly soon: where they begin does not say where the answer ends.
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
    # An end where other answers of the task go on weighs as much as what they say there, or the model would go on.
    tail = place > max(int(answer.max()), KEY_TOKENS * FRESH_PRINTED[1])
    return noised, weight * ~near * torch.where(tail, TAIL_WEIGHT, 1.0)
