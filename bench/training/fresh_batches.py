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
from training.noise import TAIL_WEIGHT, Noised
from training.tasks import FRESH_ANSWER, FRESH_SHARE, FRESH_TASKS, LETTERS, draw

BLOCK = 32
SMALLEST = 40  # tokens of a prompt that holds what an answer of the share prints
LETTERS_OF = {"sort_marked": 2, "sort_values": 2, "merge": 3, "follow": 2}  # tokens of a printed key
# How batches are noised: all behind a border is hidden; a block is hidden in part, and all behind it; keys by chance.
BEHIND, IN_BLOCKS = 0.4, 0.3
# First letter of a key → its number, and letters behind it; -1 for other tokens.
FIRST, LATER = (torch.full((len(VOCABULARY),), -1) for _ in range(2))
for _number, _letter in enumerate(LETTERS):
    FIRST[VOCABULARY[f" {_letter}"]] = LATER[VOCABULARY[_letter]] = _number


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a batch of one of `FRESH_TASKS`.

    Attributes:
        letters: tokens of a key.
        start: column in which each key of the prompts' lists begins, keys that entries name among them.
        code: number of each.
        printed: number of each key of the answers.
    """

    letters: int
    start: Int[Tensor, "batch keys"]
    code: Int[Tensor, "batch keys"]
    printed: Int[Tensor, "batch printed"]


def fresh_task(seed: int, step: int, curriculum: Curriculum) -> str:
    """The task of a step's batch."""
    names = list(FRESH_TASKS)
    return random.Random(f"task/{seed}/{step}").choices(names, [curriculum.weights[name] for name in names])[0]


def fresh_batch(task: str, seed: int, step: int, curriculum: Curriculum, tokens: int) -> Batch:
    """About `tokens` tokens of a task; prompt lengths are log-uniform up to the curriculum's bound."""
    rng, letters = random.Random(f"{task}/{seed}/{step}"), LETTERS_OF[task]
    size = round(math.exp(rng.uniform(math.log(SMALLEST), math.log(curriculum.fresh_high[task]))))
    most = max(2, min(FRESH_ANSWER[1], int(size * FRESH_SHARE)) // letters)
    printed = most if rng.random() < 0.5 else rng.randint(2, most)
    canvas = letters * printed + rng.randint(1, 4)
    if rng.random() < 0.3:
        canvas = -(-canvas // BLOCK) * BLOCK
    count = max(1, tokens // (size + canvas))
    pairs = [encode(draw(task, "train", rng, size=size, printed=printed)) for _ in range(count)]
    return collate(pairs, len(pairs[0][0]) + canvas)


def keys_of(task: str, batch: Batch) -> Keys:
    """The keys of a batch of `task`, whose prompts have one length and whose answers print equally many."""
    letters, prompt, answer = LETTERS_OF[task], int(batch.prompt[0]), int(batch.answer[0])
    first, later = FIRST[batch.ids], LATER[batch.ids]
    # A key begins at a letter with a space in front, or behind a sign.
    begins = (first >= 0) | ((later >= 0) & F.pad((first < 0) & (later < 0), (1, 0), value=True)[:, :-1])
    code = torch.zeros_like(batch.ids)
    for at in range(letters):
        code = code * len(LETTERS) + F.pad(torch.where(first >= 0, first, later).clamp(min=0), (0, at))[:, at:]
    colon = batch.ids == VOCABULARY[":"]
    in_list = begins & (batch.places() < 0) & (colon.cumsum(1) > 0)
    start = in_list.nonzero(as_tuple=True)[1].view(len(code), -1)
    return Keys(
        letters=letters, start=start, code=code.gather(1, start), printed=code[:, prompt : prompt + answer : letters]
    )


def seen_keys(hidden: Bool[Tensor, "batch length"], batch: Batch, letters: int) -> Bool[Tensor, "batch printed"]:
    """The keys of the answers that are in sight."""
    prompt, answer = int(batch.prompt[0]), int(batch.answer[0])
    return ~hidden[:, prompt : prompt + answer].unflatten(1, (-1, letters)).any(-1)


def mask_as_decoded(
    batch: Batch, letters: int, generator: torch.Generator
) -> tuple[Noised, Float[Tensor, "batch length"]]:
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
    border = (uniform(rows, 1) * (answer + 1)).long()
    block = border // BLOCK * BLOCK
    in_blocks = (place >= block) & ((coin < ratio) | (place >= block + BLOCK))
    by_key = (coin < ratio).gather(1, (place.clamp(min=0) // letters * letters).clamp(max=length - 1))
    hidden = torch.where(kind < BEHIND, place >= border, torch.where(kind < BEHIND + IN_BLOCKS, in_blocks, by_key))
    # The fill behind the answer's end is hidden whole, or shown whole; the first end with either.
    shown, with_end = uniform(rows, 1) < 0.3, uniform(rows, 1) < 0.5
    fill = place >= answer + with_end
    hidden = torch.where(fill, ~shown, hidden) & (place >= 0)
    seen = F.pad(seen_keys(hidden, batch, letters), (1, 0), value=True).repeat_interleave(letters, 1)
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
    return noised, weight * ~near * torch.where(place > answer, TAIL_WEIGHT, 1.0)
