"""What every token reads like in a line of a terminal: one token at a time, and nothing that moves the cursor."""

import unicodedata

from transformers import PreTrainedTokenizerBase

LINE_BREAK = "⏎"
_UNPRINTABLE = "�"


class Words:
    """Texts of tokens, looked up once each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None

    def of(self, token: int) -> str:
        """The text of `token` with the space in front of it, if it has one; a line break is `⏎`."""
        if token not in self._known:
            self._known[token] = printable(self._text(token))
        return self._known[token]

    def _text(self, token: int) -> str:
        # Alone, a token would lose its space in many tokenizers; behind another it keeps it.
        if self._anchor is None:
            special = set(self._tokenizer.all_special_ids)
            first = next((token for token in range(len(self._tokenizer)) if token not in special), 0)
            self._anchor = first, self._decode([first])
        first, before = self._anchor
        both = self._decode([first, token])
        return both[len(before) :] if both.startswith(before) else self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence is one text"
        return text


def printable(text: str) -> str:
    """`text` without control characters, which a model may write and a terminal would obey."""
    text = text.replace("\r\n", "\n").replace("\n", LINE_BREAK).replace("\t", " ")
    return "".join(_UNPRINTABLE if unicodedata.category(char)[0] == "C" else char for char in text)
