"""The tasks of the embedded model: prompts, answers and exact-match scoring, from one seeded generator.

The splits are disjoint by construction: a hash of a prompt's text names its split. The generator draws until it meets a
prompt of the split. No held-out prompt can therefore occur in training, whatever the seeds. Validation prompts steer a
training run; test prompts measure its result. Pure Python: nothing here needs a model.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation", "test"]

_NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivan Jill Kai Lena Max "
    "Nora Omar Pia Quin Rosa Sam Tara Uma Vera Will Xena Yan Zoe"
)
NAMES: tuple[str, ...] = tuple(_NAMES.split())
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEYS: tuple[str, ...] = tuple(a + b for a in LETTERS for b in LETTERS)
# More keys, for tables with more pairs than `KEYS`: a letter and a digit.
MORE_KEYS: tuple[str, ...] = tuple(a + b for a in LETTERS for b in "0123456789")

# One of this many prompts belongs to the test split, and one to the validation split.
HELD_OUT_SHARE = 32
# Tokens of a lookup prompt besides its pairs and asked keys: user mark, "lookup", "?", assistant mark.
LOOKUP_FRAME_TOKENS = 4
PAIR_TOKENS = 5
KEY_TOKENS = 2
LONG_ASKED = (13, 24)  # keys of a question whose answer fills two to four blocks
FRESH_PRINTED = (18, len(NAMES))  # keys, of two tokens each, of the answers of `FRESH_TASKS`, which fill two blocks


@dataclass(frozen=True, slots=True)
class Example:
    """One instance: the user's message, the one right answer, and the task it came from."""

    task: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One family of prompts.

    `make(rng, size)` returns (prompt, answer). `sizes` are the inclusive bounds of `size`, whose unit is `unit`.
    """

    name: str
    make: Callable[[random.Random, int], tuple[str, str]]
    sizes: tuple[int, int]
    unit: str


def split_of(prompt: str) -> Split:
    """The split that owns a prompt; a function of its text alone."""
    number = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little")
    # The two held-out halves were one split while the shipped model was trained (docs/embedded-training.md): whichever
    # half a prompt is in, the model has never been trained on it.
    held_out: dict[int, Split] = {0: "test", HELD_OUT_SHARE // 2: "validation"}
    return held_out.get(number % HELD_OUT_SHARE, "train")


def draw(task: str, split: Split, rng: random.Random, *, size: int | None = None, **options: int) -> Example:
    """The next example of `split` from the caller's random stream; `size` None draws one within the task's bounds."""
    spec = ALL_TASKS[task]
    while True:
        prompt, answer = spec.make(rng, rng.randint(*spec.sizes) if size is None else size, **options)
        if split_of(prompt) == split:
            return Example(task, prompt, answer)


def sample(task: str, split: Split, seed: int, *, size: int | None = None, **options: int) -> Example:
    """The example that (task, split, seed, size) names: the same on every machine and in every process."""
    return draw(task, split, random.Random(f"{task}/{split}/{seed}/{size}"), size=size, **options)


def score(example: Example, text: str) -> bool:
    """Exact match, with runs of white space taken as one space."""
    return " ".join(text.split()) == " ".join(example.answer.split())


def _names(rng: random.Random, count: int) -> list[str]:
    return rng.sample(NAMES, count)


def _list(rng: random.Random, size: int) -> list[str]:
    # A list longer than there are names repeats some.
    return _names(rng, size) if size <= len(NAMES) else rng.choices(NAMES, k=size)


def _copy(rng: random.Random, size: int) -> tuple[str, str]:
    text = " ".join(_list(rng, size))
    return f"copy: {text}", text


def _reverse(rng: random.Random, size: int) -> tuple[str, str]:
    items = _list(rng, size)
    return f"reverse: {' '.join(items)}", " ".join(reversed(items))


def _sort(rng: random.Random, size: int) -> tuple[str, str]:
    items = _names(rng, size)
    return f"sort: {' '.join(items)}", " ".join(sorted(items))


def _replace(rng: random.Random, size: int) -> tuple[str, str]:
    new, *items = _names(rng, size + 1)
    at = rng.randrange(size)
    answer = [*items[:at], new, *items[at + 1 :]]
    return f"replace {items[at]} with {new}: {' '.join(items)}", " ".join(answer)


def _insert(rng: random.Random, size: int) -> tuple[str, str]:
    new, *items = _names(rng, size + 1)
    at = rng.randrange(size)
    answer = [*items[: at + 1], new, *items[at + 1 :]]
    return f"insert {new} after {items[at]}: {' '.join(items)}", " ".join(answer)


def _remove(rng: random.Random, size: int) -> tuple[str, str]:
    items = _names(rng, size)
    at = rng.randrange(size)
    return f"remove {items[at]}: {' '.join(items)}", " ".join(items[:at] + items[at + 1 :])


def _add(rng: random.Random, size: int, digits: int = 0) -> tuple[str, str]:
    # The first digit of both operands is 0, so the sum has the operands' width and every digit keeps its column.
    # `digits` makes the operands smaller than the width allows.
    a, b = (rng.randrange(10 ** (digits or size - 1)) for _ in range(2))
    return f"add {a:0{size}d}+{b:0{size}d}", f"{a + b:0{size}d}"


def _chain(rng: random.Random, size: int, rising: int = 0) -> tuple[str, str]:
    # `rising` 1 leaves subtraction out, as far as the total stays below 100.
    total = rng.randrange(100)
    prompt, steps = f"chain {total:02d}", []
    for _ in range(size):
        ways = [("+", d) for d in range(1, 10) if total + d < 100] + [("-", d) for d in range(1, 10) if total >= d]
        sign, digit = rng.choice([way for way in ways if way[0] == "+"] or ways if rising else ways)
        total += digit if sign == "+" else -digit
        prompt += f"{sign}{digit}"
        steps.append(f"{sign}{digit}={total:02d}")
    return prompt, " ".join(steps)


def _lookup(rng: random.Random, size: int, asked: int = 0) -> tuple[str, str]:
    # `size` bounds the tokens of the whole prompt, chat marks included; `asked` 0 draws 1-4 keys.
    asked = asked or rng.randint(1, 4)
    count = (size - LOOKUP_FRAME_TOKENS - KEY_TOKENS * asked) // PAIR_TOKENS
    keys = KEYS if count <= len(KEYS) else KEYS + MORE_KEYS
    count = min(count, len(keys))
    if count < asked:
        raise ValueError(f"lookup: {size} tokens hold {count} pairs, fewer than the {asked} keys asked")
    pairs = [f"{key}={rng.randrange(100):02d}" for key in rng.sample(keys, count)]
    wanted = rng.sample(pairs, asked)
    return f"lookup {' '.join(pairs)} ? {' '.join(pair[:2] for pair in wanted)}", " ".join(wanted)


def _long_lookup(rng: random.Random, size: int) -> tuple[str, str]:
    return _lookup(rng, size, rng.randint(*LONG_ASKED))


def _fresh(rng: random.Random, task: str, size: int, printed: int, *, frame: int, tokens: int) -> tuple[list[str], int]:
    """The names that an answer of one of `FRESH_TASKS` prints, and the number of other entries in its prompt. `printed`
    0 draws their number. A prompt of `size` tokens has `frame` tokens beside its entries of `tokens` tokens."""
    count = (size - frame) // tokens
    printed = printed or rng.randint(FRESH_PRINTED[0], min(count, FRESH_PRINTED[1]))
    if count < printed:
        raise ValueError(f"{task}: {size} tokens hold {count} entries, fewer than the {printed} that are printed")
    return _names(rng, printed), count - printed


def _sort_marked(rng: random.Random, size: int, printed: int = 0) -> tuple[str, str]:
    # Frame: two chat marks, "sort", "with", two signs, ":".
    names, others = _fresh(rng, "sort_marked", size, printed, frame=7, tokens=2)
    marked = [f"{rng.choice('+-')} {name}" for name in names]
    entries = marked + [f"? {name}" for name in rng.choices(NAMES, k=others)]
    return f"sort with + -: {' '.join(rng.sample(entries, len(entries)))}", " ".join(sorted(marked))


def _sort_numbers(rng: random.Random, size: int, printed: int = 0) -> tuple[str, str]:
    # Frame: two chat marks, "sort", "with", a sign, ":".
    names, others = _fresh(rng, "sort_numbers", size, printed, frame=6, tokens=3)
    marked = [f"{name}{rng.randrange(10)}" for name in names]
    entries = [f"+ {key}" for key in marked] + [f"? {rng.choice(NAMES)}{rng.randrange(10)}" for _ in range(others)]
    return f"sort with +: {' '.join(rng.sample(entries, len(entries)))}", " ".join(sorted(marked))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="copy", make=_copy, sizes=(4, 16), unit="names"),
        Task(name="reverse", make=_reverse, sizes=(4, 16), unit="names"),
        Task(name="sort", make=_sort, sizes=(4, 16), unit="names"),
        Task(name="replace", make=_replace, sizes=(4, 16), unit="names"),
        Task(name="insert", make=_insert, sizes=(4, 16), unit="names"),
        Task(name="remove", make=_remove, sizes=(4, 16), unit="names"),
        Task(name="add", make=_add, sizes=(4, 4), unit="digits"),
        Task(name="chain", make=_chain, sizes=(2, 6), unit="operations"),
        Task(name="lookup", make=_lookup, sizes=(64, 512), unit="prompt tokens"),
    )
}
LONG_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="long_copy", make=_copy, sizes=(64, 120), unit="names"),
        Task(name="long_reverse", make=_reverse, sizes=(64, 120), unit="names"),
        Task(name="long_chain", make=_chain, sizes=(13, 24), unit="operations"),
        Task(name="long_lookup", make=_long_lookup, sizes=(256, 2048), unit="prompt tokens"),
    )
}
"""Tasks whose answers have 64 to 128 tokens, several blocks of 32: a block reads the tokens of the ones before."""
FRESH_SIZES = (256, 2048)
FRESH_TASKS: dict[str, Task] = {
    name: Task(name=name, make=make, sizes=FRESH_SIZES, unit="prompt tokens")
    for name, make in (("sort_marked", _sort_marked), ("sort_numbers", _sort_numbers))
}
"""Tasks whose next token follows from the prompt and all of the answer so far: each entry is printed once."""
ALL_TASKS: dict[str, Task] = TASKS | LONG_TASKS | FRESH_TASKS
