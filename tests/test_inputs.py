"""Prompts as callers pass them: text through the tokenizer, ids with padding on any side."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import tiered
from tiered.inputs import Prompts, read_inputs
from tiered.prepare import packed

PAD = 125


def read(
    inputs: Any,
    mask: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    raw: bool = False,
    **options: Any,
) -> Prompts:
    return read_inputs(
        inputs,
        {"attention_mask": mask, **options},
        tokenizer=tokenizer,
        tokenizer_missing="there is none",
        pad_token_id=PAD,
        vocab_size=128,
        raw=raw,
    )


def unpadded(prompts: Prompts) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(prompts.ids, prompts.mask, strict=True)]


@pytest.mark.parametrize(
    ("mask", "columns", "pads"),
    [
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [[1, 2, 3, 4], [5, 6, 7, 8]], [0, 0]),
        ([[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 2, 3, 4], [5, 6, 7, 8]], [2, 0]),
        ([[1, 1, 0, 0], [1, 1, 1, 1]], [[3, 4, 1, 2], [5, 6, 7, 8]], [2, 0]),
        ([[1, 0, 1, 0], [0, 1, 1, 1]], [[4, 1, 3], [6, 7, 8]], [1, 0]),
        ([[0, 0, 1, 1], [0, 1, 0, 1]], [[3, 4], [6, 8]], [0, 0]),  # padding that all have goes
        ([[0, 1, 0, 0], [0, 0, 0, 1]], [[2], [8]], [0, 0]),
    ],
)
def test_packing(mask: list[list[int]], columns: list[list[int]], pads: list[int]):
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = packed(read(ids, torch.tensor(mask)))
    assert (found.ids.tolist(), found.pads.tolist()) == (columns, pads)


@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6).filter(any), min_size=1, max_size=4),
    st.sampled_from([torch.bool, torch.long, torch.int32, torch.float32]),
)
def test_packing_keeps_tokens_and_their_order(mask: list[list[bool]], dtype: torch.dtype):
    ids = torch.arange(6 * len(mask)).view(len(mask), 6)
    prompts = read(ids, torch.tensor(mask).to(dtype))
    columns, pads, _ = packed(prompts)
    assert columns.shape[1] == max(map(sum, mask)) == max(map(len, unpadded(prompts)))
    assert [row[pad:].tolist() for row, pad in zip(columns, pads, strict=True)] == unpadded(prompts)
    assert columns.is_contiguous()
    assert ids.tolist() == torch.arange(6 * len(mask)).view(len(mask), 6).tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_stay_as_they_were_passed(dtype: torch.dtype):
    ids, mask = torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=dtype), torch.tensor([[1, 1, 0], [0, 1, 1]])
    prompts = read(ids, mask)
    assert prompts.ids.dtype == torch.long and torch.equal(prompts.ids, ids.long())
    assert prompts.mask.dtype == torch.bool and torch.equal(prompts.mask, mask.bool())
    assert read(ids).mask.all()


def test_the_first_and_the_last_id_are_allowed():
    assert read(torch.tensor([[0, 127]])).ids.tolist() == [[0, 127]]


PARTS = [{"type": "text", "text": "copy: "}, {"type": "text", "text": "Ada"}]


def chat(text: str, *turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate((text, *turns))]


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [
        ("copy: Ada", ["<|user|>copy: Ada<|assistant|>"]),
        (["copy: Ada"], ["<|user|>copy: Ada<|assistant|>"]),
        (
            ("copy: Ada", "sort: Nora Ben Ivan"),
            ["<|user|>copy: Ada<|assistant|>", "<|user|>sort: Nora Ben Ivan<|assistant|>"],
        ),
        (chat("copy: Ada"), ["<|user|>copy: Ada<|assistant|>"]),
        (
            chat("copy: Ada", "Ada", "add 1 + 2"),
            ["<|user|>copy: Ada<|assistant|>Ada<|endoftext|><|user|>add 1 + 2<|assistant|>"],
        ),
        (
            [chat("copy: Ada"), tuple(chat("sort: Nora Ben Ivan"))],
            ["<|user|>copy: Ada<|assistant|>", "<|user|>sort: Nora Ben Ivan<|assistant|>"],
        ),
        ([{"role": "user", "content": PARTS}], ["<|user|>copy: Ada<|assistant|>"]),
    ],
    ids=["string", "one string", "tuple", "chat", "turns", "chats", "parts"],
)
def test_text(tokenizer: PreTrainedTokenizerBase, inputs: Any, meant: list[str]):
    prompts = read(inputs, tokenizer=tokenizer)
    assert unpadded(prompts) == [tokenizer(text)["input_ids"] for text in meant]
    # Padded on the left, with the model's padding.
    assert (prompts.ids[~prompts.mask] == PAD).all()
    assert prompts.mask[:, -1].all()
    assert prompts.ids.shape[1] == max(map(len, unpadded(prompts)))


@pytest.mark.parametrize("inputs", [["copy: Ada"], ["copy: Ada", "sort: Nora Ben Ivan"]])
@pytest.mark.parametrize("raw", [True, False])
def test_text_that_is_continued_as_it_stands(
    tokenizer: PreTrainedTokenizerBase, inputs: list[str], raw: bool, monkeypatch: pytest.MonkeyPatch
):
    if not raw:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    prompts = read(inputs, tokenizer=tokenizer, raw=raw)
    assert unpadded(prompts) == [tokenizer(text)["input_ids"] for text in inputs]


PROMPTS = ["<|user|>copy: Ada<|assistant|>", "<|user|>sort: Nora Ben Ivan<|assistant|>"]
LISTS = [[7, 8, 9], [4, 5]]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"inputs": [7, 8, 9]}, [[7, 8, 9]]),
        ({"inputs": LISTS}, LISTS),
        ({"input_ids": LISTS, "attention_mask": [[1, 1, 1], [0, 1]]}, [[7, 8, 9], [5]]),
        ({"inputs": tuple(map(tuple, LISTS))}, LISTS),
        ({"inputs": [np.array(row, dtype=np.uint16) for row in LISTS]}, LISTS),
        ({"inputs": [torch.tensor(row) for row in LISTS]}, LISTS),
        ({"inputs": np.array([[7, 8, 9]], dtype=np.int32)[:, ::-1]}, [[9, 8, 7]]),
        ({"inputs": np.array([[7, 8, 9]]), "attention_mask": np.array([[True, True, False]])}, [[7, 8]]),
        ({"inputs": {"input_ids": LISTS, "attention_mask": None}, "token_type_ids": [[0, 0, 0], [0, 0]]}, LISTS),
        ({"input_ids": torch.tensor([[7, 8]]), "attention_mask": [[0, 1]]}, [[8]]),
    ],
)
def test_ids_of_every_kind(given: dict[str, Any], meant: list[list[int]]):
    named = {name: value for name, value in given.items() if name not in ("inputs", "attention_mask")}
    prompts = read(given.get("inputs"), given.get("attention_mask"), **named)
    assert prompts.ids.dtype == torch.long
    assert unpadded(prompts) == meant


@pytest.mark.parametrize(
    "how", [{}, {"return_tensors": "pt", "padding": True}, {"return_tensors": "np", "padding": True}]
)
def test_outputs_of_a_tokenizer_are_prompts(tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]):
    """By place and by name, with the answers of each prompt alone."""
    runtime = tiered.from_pretrained("embedded")
    encoded: Any = tokenizer(PROMPTS, return_token_type_ids=True, **how)
    options: dict[str, Any] = {"max_new_tokens": 16, "block_length": 8}
    for out in (runtime.generate(encoded, **options), runtime.generate(**encoded, **options)):
        assert out.text == ["Ada", "Ben Ivan Nora"]
    assert runtime.logits(**encoded).isfinite().all()
