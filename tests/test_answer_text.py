"""Text of an answer as far as it is final: whole characters, stop strings held back, ends."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tiered.serving.answer_text import AnswerText, token_texts

END = 0


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8, and 0 the end."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def text_of(stop: Sequence[str] = (), most: int | None = None) -> AnswerText:
    return AnswerText(cast(Any, Bytes()), ends=[END], stop=stop, most=most)


@pytest.mark.parametrize(
    ("stop", "most", "parts", "given", "ended", "tokens"),
    [
        ((), None, ["ab", "c"], ["ab", "c", ""], "length", 3),
        ((), None, ["ab\0cd"], ["ab", ""], "stop", 2),
        ((), 3, ["ab", "cd", "e"], ["ab", "c", "", ""], "length", 3),
        (("cd",), None, ["abc", "x", "cdy", "z"], ["ab", "cx", "", "", ""], "stop", 4),
        (("cd",), None, ["abc"], ["ab", "c"], "length", 3),
        (("yz", "b"), None, ["ayz"], ["a", ""], "stop", 1),
        (("ab",), None, ["a", "a", "b"], ["", "a", "", ""], "stop", 1),
        (("ab",), None, ["ab"], ["", ""], "stop", 0),
        (("\n\n",), None, ["x\n", "\ny"], ["x", "", ""], "stop", 1),
        (("c",), 3, ["abc"], ["ab", ""], "stop", 2),
    ],
)
def test_parts_of_a_text_that_are_given_out(
    stop: Sequence[str], most: int | None, parts: list[str], given: list[str], ended: str, tokens: int
):
    text = text_of(stop, most)
    assert [text.put(part.encode()) for part in parts] + [text.end()] == given
    assert (text.text, text.ended, text.tokens) == ("".join(given), ended, tokens)


def test_half_a_character_waits_for_its_rest():
    text, letters = text_of(), "é€".encode()
    assert [text.put(letters[:1]), text.put(letters[1:4]), text.put(letters[4:])] == ["", "é", "€"]


def test_half_a_character_at_the_end_is_shown_as_such():
    text = text_of()
    assert text.put("aé".encode()[:2]) == "a" and text.end() == "\N{REPLACEMENT CHARACTER}"


class Words:
    """A tokenizer whose tokens are words, with a space between two, and 0 the end."""

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(f"w{token}" for token in row if token != END) for row in rows]


@pytest.mark.parametrize(
    ("ids", "before", "texts"),
    [
        ([1, 2], None, ["w1", " w2"]),
        ([1, 2], 3, [" w1", " w2"]),
        ([1, END, 2, 2], None, ["w1", "", "w2", " w2"]),
        ([], 1, []),
    ],
)
def test_the_texts_of_tokens_join_to_that_of_all(ids: list[int], before: int | None, texts: list[str]):
    assert token_texts(cast(Any, Words()), ids, before) == texts
