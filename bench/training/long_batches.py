"""The stream of answers that fill several blocks: long lists and chains, one task and one canvas a batch."""

import random

from training.batches import Batch, collate, encode
from training.curriculum import LONG_STREAM, Curriculum
from training.tasks import TASKS, draw

BLOCK = 32


def long_batch(seed: int, step: int, curriculum: Curriculum, tokens: int) -> Batch:
    """The long answers of one step, about `tokens` tokens; half of the batches are near the longest size."""
    rng = random.Random(f"long/{seed}/{step}")
    name = rng.choices(LONG_STREAM, [curriculum.weights[name] for name in LONG_STREAM])[0]
    low, high = TASKS[name.removeprefix("long_")].sizes[1], curriculum.long_size(name)
    top = rng.randint(low, high) if rng.random() < 0.5 else high
    pairs, longest, total = [], (0, 0), 0
    while not pairs or total < tokens:
        pairs.append(encode(draw(name, "train", rng, size=rng.randint(max(low, top - top // 8), top))))
        longest = max(longest[0], len(pairs[-1][0])), max(longest[1], len(pairs[-1][1]))
        total = len(pairs) * sum(longest)
    # Whole blocks, as at inference, or as tight as the answers.
    canvas = -(-(longest[1] + 1) // BLOCK) * BLOCK if rng.random() < 0.5 else longest[1] + rng.randint(1, 4)
    return collate(pairs, longest[0] + canvas)
