"""The stream of lookups: one table size and one number of asked keys a batch."""

import math
import random

import torch
from jaxtyping import Int
from torch import Tensor

from training.batches import Batch, collate, encode
from training.curriculum import MOST_ASKED, Curriculum
from training.tasks import KEY_TOKENS, LOOKUP_FRAME_TOKENS, PAIR_TOKENS, draw

# Small tables first and always: their guesses are good enough to teach that values come from the table.
SMALLEST = 16
CANVASES = (32, 48, 64, 96, 128)
TABLE_START = 2  # the user mark and "lookup" stand before the first pair
# Positions that stretched tables spread over at least, a little past the longest table that is learned.
REACH = 4096


def lookup_batch(seed: int, step: int, curriculum: Curriculum, tokens: int, reach: int = REACH) -> Batch:
    """The lookups of one step, about `tokens` tokens. Table sizes are log-uniform up to the curriculum's bound; some
    batches have positions spread over `reach`."""
    rng = random.Random(f"lookup/{seed}/{step}")
    size = round(math.exp(rng.uniform(math.log(SMALLEST), math.log(curriculum.lookup_high))))
    most = min(curriculum.asked_high, (size - LOOKUP_FRAME_TOKENS) // (PAIR_TOKENS + KEY_TOKENS))
    most = min(most, MOST_ASKED) if rng.random() < 0.5 else most
    asked = most if rng.random() < 0.6 else rng.randint(1, most)
    tight = rng.random() < 0.7
    answer = PAIR_TOKENS * asked
    canvas = answer + rng.randint(1, 4) if tight else next(canvas for canvas in CANVASES if canvas > answer)
    count = max(1, tokens // (size + canvas))
    pairs = [encode(draw("lookup", "train", rng, size=size, asked=asked)) for _ in range(count)]
    length = len(pairs[0][0]) + canvas
    far = rng.random() < 0.3
    positions = stretched(rng, length, canvas + 2 + KEY_TOKENS * asked, reach, count) if far else None
    return collate(pairs, length, positions)


def stretched(
    rng: random.Random,
    length: int,
    keep: int,
    reach: int,
    rows: int,
    start: int = TABLE_START,
    tokens: int = PAIR_TOKENS,
) -> Int[Tensor, "rows length"]:
    """Positions below `reach` with gaps between entries of the prompt, so that far distances occur in short contexts.

    The last `keep` tokens (question and canvas) stay together, as do the `tokens` tokens of an entry.
    """
    out = torch.arange(length).repeat(rows, 1)
    entries = (length - keep - start) // tokens
    for row in out:
        spare = round(math.exp(rng.uniform(0, math.log(max(reach - length, 1) + 1)))) - 1
        for _ in range(rng.randint(1, 6)):
            gap = rng.randint(0, spare)
            spare -= gap
            row[start + tokens * rng.randint(0, entries) :] += gap
    return out
