"""Exact match of a model on the embedded model's tasks, decoded by the runtime as a user would decode it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from training.tasks import Example, score

from tiered.core.checks import check_integer
from tiered.output import GenerationOutput

# Rows (prompt and canvas) of a batch: enough to fill the cores, few enough that a progress bar moves.
BATCH_ROWS = 2048


@dataclass(slots=True)
class Scores:
    """Results of each example, in their order: whether its answer was exactly right, its forwards and its TPF
    (end-of-sequence and padding not counted)."""

    right: list[bool] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list, repr=False)
    tokens_per_forward: list[float] = field(default_factory=list, repr=False)

    @property
    def correct(self) -> int:
        """Right answers."""
        return sum(self.right)

    @property
    def exact_match(self) -> float:
        """Share of right answers."""
        return self.correct / len(self.right)


def score_examples(
    runtime: Any,
    examples: list[Example],
    *,
    max_new_tokens: int = 32,
    batch: int | None = None,
    seed: int = 0,
    watch: Callable[[GenerationOutput], object] = lambda out: None,
    **options: Any,
) -> Scores:
    """Answer `examples` under the runtime's policy and compare.

    Args:
        runtime: a model with the embedded tokenizer, or an object with a `Runtime`'s `generate`.
        max_new_tokens: canvas of every example.
        batch: examples of a call, fewer in the last; None for as many as fill the cores.
        seed: seed of draws, such as the noise that answers begin as; the n-th shortest prompt has seed + n.
        watch: called with the output of each batch.
        **options: more options of `Runtime.generate`.
    """
    if batch is not None:
        check_integer("batch", batch, least=1)
    found: dict[int, tuple[bool, int, float]] = {}
    for own in _batches(examples, max_new_tokens, batch):
        chats = [[{"role": "user", "content": examples[number].prompt}] for number in own]
        # An example has its own seed, wherever batches end: `generate` gives the i-th sequence of a call its seed + i.
        out = runtime.generate(chats, max_new_tokens=max_new_tokens, seed=seed + len(found), **options)
        assert out.text is not None, "the runtime has no tokenizer"
        right = (score(examples[number], text) for number, text in zip(own, out.text, strict=True))
        found |= zip(own, zip(right, out.forwards, out.tokens_per_forward.tolist(), strict=True), strict=True)
        watch(out)
    return Scores(*(list(each) for each in zip(*(found[number] for number in range(len(examples))), strict=True)))


def _batches(examples: list[Example], canvas: int, most: int | None) -> Iterator[list[int]]:
    """The numbers of all examples, shortest prompts first so that little is padded. How they are batched changes no
    answer."""
    batch: list[int] = []
    lengths = [len(example.prompt) for example in examples]
    for number in sorted(range(len(examples)), key=lengths.__getitem__):
        # Characters bound tokens from above: close for tables, fourfold for names, which merely makes batches smaller.
        full = (len(batch) + 1) * (lengths[number] + canvas) > BATCH_ROWS if most is None else len(batch) == most
        if batch and full:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
