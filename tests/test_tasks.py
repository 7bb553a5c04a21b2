"""The embedded model's tasks and its tokenizer."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from training.curriculum import LIST_TASKS
from training.tasks import (
    ALL_TASKS,
    FRESH_TASKS,
    LONG_TASKS,
    NAMES,
    TASKS,
    Example,
    Split,
    draw,
    sample,
    score,
    split_of,
)
from training.tokenizer import ASSISTANT, MASK, SPECIAL_TOKENS, USER, build_tokenizer, save_tokenizer, vocabulary


def test_splits_share_no_prompt():
    # The smallest space (lists of four, two operations) is where a shared prompt would show first.
    for task, size in [("copy", 4), ("chain", 2), ("add", 4), ("lookup", 32)]:
        prompts = {
            split: {sample(task, split, seed, size=size).prompt for seed in range(200)} for split in get_args(Split)
        }
        assert all(split_of(prompt) == split for split, found in prompts.items() for prompt in found)
        assert len(set.union(*prompts.values())) == sum(map(len, prompts.values()))


def test_one_prompt_in_sixteen_is_held_out():
    # The shipped model was trained on the other fifteen: a hash that moved would measure it on what it has seen.
    counts = Counter(split_of(f"copy: {number}") for number in range(20_000))
    assert counts["train"] / 20_000 == pytest.approx(15 / 16, abs=0.01)
    assert counts["validation"] / 20_000 == pytest.approx(1 / 32, abs=0.005)
    assert counts["test"] / 20_000 == pytest.approx(1 / 32, abs=0.005)
    assert split_of("copy: Jill Tara Ada Cleo") == "test"
    assert split_of("copy: Uma Max Jill Quin") == "validation"
    assert split_of("copy: Gus Zoe Tara Max") == "train"


@pytest.mark.parametrize("task", [*ALL_TASKS])
def test_a_sample_is_named_by_its_arguments(task: str):
    assert sample(task, "test", 7) == sample(task, "test", 7)
    assert len({sample(task, "test", seed).prompt for seed in range(20)}) > 15


def test_a_drawn_stream_goes_on():
    rng = random.Random(0)
    assert draw("copy", "train", rng) != draw("copy", "train", rng)


@pytest.mark.parametrize("task", LIST_TASKS)
@pytest.mark.parametrize("size", [4, 9, 16])
def test_list_answers(task: str, size: int):
    example = sample(task, "test", 1, size=size)
    head, items = example.prompt.split(":")
    words, items, answer = head.split(), items.split(), example.answer.split()
    assert len(items) == len(set(items)) == size
    if task == "copy":
        assert answer == items
    elif task == "reverse":
        assert answer == items[::-1]
    elif task == "sort":
        assert answer == sorted(items)
    elif task == "replace":
        assert answer == [words[3] if item == words[1] else item for item in items]
    elif task == "insert":
        at = items.index(words[3]) + 1
        assert answer == [*items[:at], words[1], *items[at:]]
    else:
        assert answer == [item for item in items if item != words[1]]


def test_sums_are_as_wide_as_their_operands():
    for seed in range(50):
        example = sample("add", "test", seed, size=5)
        a, b = example.prompt.removeprefix("add ").split("+")
        assert len(a) == len(b) == len(example.answer) == 5
        assert int(a) + int(b) == int(example.answer)


def test_a_chain_keeps_its_running_total_in_two_digits():
    for seed in range(50):
        example = sample("chain", "test", seed)
        expression, steps = example.prompt.removeprefix("chain "), example.answer.split()
        total = int(expression[:2])
        for step in steps:
            operation, shown = step.split("=")
            total += int(operation)
            assert 0 <= total <= 99 and shown == f"{total:02d}"
        assert expression[2:] == "".join(step.split("=")[0] for step in steps)


@pytest.mark.parametrize("size", [64, 512, 1024, 2048, 3968])
def test_a_lookup_fills_its_context(size: int):
    example = sample("lookup", "test", 3, size=size)
    table, asked = example.prompt.removeprefix("lookup ").split(" ? ")
    pairs = dict(pair.split("=") for pair in table.split())
    assert len(pairs) == len(table.split())
    assert example.answer == " ".join(f"{key}={pairs[key]}" for key in asked.split())
    assert size - 5 < len(build_tokenizer().encode(f"{USER}{example.prompt}{ASSISTANT}").ids) <= size


def test_a_lookup_too_short_for_its_keys_says_so():
    with pytest.raises(ValueError, match="fewer than the 4 keys"):
        sample("lookup", "test", 0, size=20, asked=4)


@pytest.mark.parametrize("task", FRESH_TASKS)
@pytest.mark.parametrize("size", [64, 256, 512, 1024, 2048])
def test_fresh_answers_follow_from_their_prompts(task: str, size: int):
    tokenizer = build_tokenizer()
    for seed in range(20):
        example = sample(task, "test", seed, size=size, **({"printed": 3} if size == 64 else {}))
        head, entries = example.prompt.split(": ")
        marked = [entry for entry in re.findall(r"\S \S+", entries) if entry[0] in head]
        shown = [entry[2:] for entry in marked] if task == "sort_numbers" else marked
        assert example.answer == " ".join(sorted(shown)) and len(shown) == len(set(shown))
        assert size - 3 < len(tokenizer.encode(f"{USER}{example.prompt}{ASSISTANT}").ids) <= size
        if size != 64:
            assert 32 < len(tokenizer.encode(example.answer).ids) < 128


@pytest.mark.parametrize("task", FRESH_TASKS)
def test_a_prompt_too_short_for_its_answer_says_so(task: str):
    with pytest.raises(ValueError, match=f"{task}: 64 tokens hold .* that are printed"):
        sample(task, "test", 0, size=64, printed=40)


def test_score_forgives_white_space_alone():
    example = Example("copy", "copy: Ada Ben", "Ada Ben")
    assert score(example, " Ada \n Ben ")
    assert not score(example, "Ada Ben Ben")
    assert not score(example, "AdaBen")
    assert not score(example, "Ada")


@pytest.mark.parametrize("task", [*ALL_TASKS])
def test_text_survives_the_tokenizer(task: str):
    tokenizer = build_tokenizer()
    for seed in range(20):
        example = sample(task, "test", seed)
        for text in (example.prompt, example.answer):
            ids = tokenizer.encode(text).ids
            assert vocabulary()["<|unknown|>"] not in ids
            assert tokenizer.decode(ids) == text


def test_names_digits_and_key_letters_are_single_tokens():
    tokenizer = build_tokenizer()
    assert len(tokenizer.encode(" ".join(NAMES)).ids) == len(NAMES) == len({name[0] for name in NAMES}) == 26
    assert tokenizer.encode("RT=17 QX=42").tokens == [" R", "T", "=", "1", "7", " Q", "X", "=", "4", "2"]
    assert tokenizer.encode("add 0472+0389").tokens == [" add ", *"0472", "+", *"0389"]
    assert tokenizer.encode("0861").tokens == list("0861")
    assert max(vocabulary().values()) + 1 == len(vocabulary()) <= 128


def test_answers_fit_a_canvas_of_32():
    tokenizer = build_tokenizer()
    for task, spec in TASKS.items():
        for seed in range(20):
            example = sample(task, "test", seed, size=spec.sizes[1])
            assert len(tokenizer.encode(example.answer).ids) < 32


def test_long_answers_fill_two_to_four_blocks_of_32():
    tokenizer = build_tokenizer()
    for task, spec in LONG_TASKS.items():
        for size in spec.sizes:
            for seed in range(10):
                assert 64 <= len(tokenizer.encode(sample(task, "test", seed, size=size).answer).ids) < 128


def test_a_long_list_repeats_names_and_keeps_its_order():
    items = sample("long_reverse", "test", 0, size=90).prompt.removeprefix("reverse: ").split()
    assert len(items) == 90 > len(set(items))
    assert sample("long_reverse", "test", 0, size=90).answer.split() == items[::-1]


def test_transformers_reads_the_saved_tokenizer(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path, model_max_length=4096)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    chat = [{"role": "user", "content": "copy: Ada Ben"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == f"{USER}copy: Ada Ben{ASSISTANT}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [USER, " copy", ":", " Ada", " Ben", ASSISTANT]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "copy: Ada Ben"
    assert tokenizer.mask_token_id == vocabulary()[MASK]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert all(tokenizer.convert_tokens_to_ids(token) == vocabulary()[token] for token in SPECIAL_TOKENS)
