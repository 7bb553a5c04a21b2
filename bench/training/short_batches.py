"""The stream of short tasks: everything but lookups, examples of about one length together."""

import random
from dataclasses import asdict
from typing import Any

from training.batches import Batch, Encoded, collate, encode
from training.curriculum import SHORT_TASKS, Curriculum
from training.tasks import draw

POOL_EXAMPLES = 640
# Sizes go below the bounds of a task too: one operation and two names teach what six and sixteen repeat.
CHAIN_SIZES, SUM_SIZES, SHORTEST_LIST = (1, 6), (4, 4), 2
# Canvas tokens, and the share of each: 0 is as tight as the answers, to spend no compute on the fill; the others are as
# long as at inference.
CANVASES, CANVAS_SHARES = (0, 32, 64), (0.77, 0.2, 0.03)


class ShortBatches:
    """Batches of about `tokens` tokens without end, cut from pools that are drawn one after the other.

    A pool follows from the seed, its number and the curriculum that it was drawn with. They are the state of the
    stream: a run that goes on sees the same batches.
    """

    def __init__(self, seed: int, tokens: int) -> None:
        self._seed, self._tokens = seed, tokens
        self._number, self._curriculum = -1, Curriculum()
        self._left: list[Batch] = []

    def next(self, curriculum: Curriculum) -> Batch:
        """The next batch; `curriculum` counts if a new pool begins."""
        if not self._left:
            self._draw(self._number + 1, curriculum)
        return self._left.pop()

    def state(self) -> dict[str, Any]:
        """The state of the stream, in plain types."""
        return {"pool": self._number, "left": len(self._left), "curriculum": asdict(self._curriculum)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        if state["pool"] >= 0:
            self._draw(state["pool"], Curriculum(**state["curriculum"]))
            del self._left[state["left"] :]

    def _draw(self, number: int, curriculum: Curriculum) -> None:
        rng = random.Random(f"short/{self._seed}/{number}")
        weights = [curriculum.weights[name] for name in SHORT_TASKS]
        names = rng.choices(SHORT_TASKS, weights, k=POOL_EXAMPLES)
        pool = [encode_one(name, rng, curriculum) for name in names]
        # Sorted by length, so that little is padded; ties by chance, so that tasks mix.
        pool.sort(key=lambda pair: (len(pair[0]) + len(pair[1]), rng.random()))
        batches = []
        while pool:
            canvas = rng.choices(CANVASES, CANVAS_SHARES)[0]
            fill = rng.randint(1, 4)
            count = length = 0
            while count < len(pool) and count * length <= self._tokens:
                prompt, answer = pool[count]
                length = max(length, len(prompt) + max(canvas, len(answer) + fill))
                count += 1
            batches.append(collate(pool[:count], length))
            del pool[:count]
        rng.shuffle(batches)
        self._number, self._curriculum, self._left = number, curriculum, batches


def encode_one(name: str, rng: random.Random, curriculum: Curriculum) -> Encoded:
    """One training example of a short task."""
    low, high = {"chain": CHAIN_SIZES, "add": SUM_SIZES}.get(name, (SHORTEST_LIST, curriculum.list_high))
    size, options = rng.randint(low, high), {}
    # Smaller operands, and totals that only rise, in about half of the cases: the carry is learned on its own.
    if name == "add" and rng.random() < 0.5:
        options["digits"] = rng.randint(1, 3)
    if name == "chain" and rng.random() < 0.4:
        options["rising"] = 1
    return encode(draw(name, "train", rng, size=size, **options))
