"""Texts of single tokens, without characters that a terminal would obey."""

import unicodedata

from transformers import PreTrainedTokenizerBase

LINE_BREAK = "⏎"


class Words(dict[int, str]):
    """The text of each token, with the space in front of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mask_token_id: int, eos_token_id: int) -> None:
        super().__init__({eos_token_id: "∎", mask_token_id: "░"})
        special = set(tokenizer.all_special_ids)
        self._tokenizer = tokenizer
        # Alone, a token would lose its space in many tokenizers; behind another it keeps it.
        self._first = next((token for token in range(len(tokenizer)) if token not in special), 0)

    def __missing__(self, token: int) -> str:
        before, both = self._decode(self._first), self._decode(self._first, token)
        text = both[len(before) :] if both.startswith(before) else self._decode(token)
        text = text.replace("\r\n", "\n").replace("\n", LINE_BREAK).replace("\t", " ")
        self[token] = "".join("�" if unicodedata.category(char)[0] == "C" else char for char in text)
        return self[token]

    def _decode(self, *tokens: int) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
