"""The final text of an answer whose tokens come a few at a time."""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

_HALF = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to this


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: int | None) -> list[str]:
    """The text that each token adds to the token before it; `before`: the token before the first, or None."""
    pairs = [[*([] if head is None else [head]), token] for head, token in zip([before, *ids], ids, strict=False)]
    heads, whole, own = (
        tokenizer.batch_decode(rows, skip_special_tokens=True)
        for rows in ([pair[:-1] for pair in pairs], pairs, [[token] for token in ids])
    )
    return [
        both[len(head) :] if both.startswith(head) else text for head, both, text in zip(heads, whole, own, strict=True)
    ]


class AnswerText:
    """Returns text when later tokens cannot change it: whole characters that cannot begin a stop string.

    Attributes:
        text: text returned so far.
        ended: "stop" after an end-of-sequence token or a stop string, "length" after the last token; None before.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ends: Sequence[int],
        stop: Sequence[str] = (),
        most: int | None = None,
        special: bool = False,
    ) -> None:
        """`ends`, `stop`: tokens and strings that end an answer, and are left out of it; `most`: most tokens, None for
        no limit. `special`: whether special tokens are part of the text."""
        self._tokenizer, self._ends, self._stop, self._most = tokenizer, ends, stop, most
        self._special = special
        self._ids: list[int] = []
        self.text = ""
        self.ended: Literal["stop", "length"] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far, without the end-of-sequence token."""
        return len(self._ids)

    def put(self, ids: Sequence[int]) -> str:
        """Add the next final tokens. Returns the text that becomes final."""
        if self.ended is not None:
            return ""
        for token in ids:
            if token in self._ends:
                return self._end("stop")
            self._ids.append(token)
            if len(self._ids) == self._most:
                return self._end("length")
        return self._give(self._decoded())

    def end(self) -> str:
        """End the answer. Returns the rest of the text."""
        return "" if self.ended is not None else self._end("length")

    def _end(self, why: Literal["stop", "length"]) -> str:
        given = self._give(self._decoded(), rest=True)
        self.ended = self.ended or why
        return given

    def _give(self, whole: str, *, rest: bool = False) -> str:
        """The final part of `whole` that was not returned before; `rest`: True if `whole` is complete."""
        found = min((place for stop in self._stop if (place := whole.find(stop)) >= 0), default=None)
        if found is not None:
            whole, self.ended = whole[:found], "stop"
            while self._ids and len(self._decoded(len(self._ids) - 1)) >= found:
                self._ids.pop()  # a token of the stop string, or behind it
        elif not rest:
            whole = whole.rstrip(_HALF)
            # The end may be the first characters of a stop string.
            begun = (n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n]))
            whole = whole[: len(whole) - max(begun, default=0)]
        if not whole.startswith(self.text):  # the tokenizer's text of a token can depend on later tokens
            return ""
        given, self.text = whole[len(self.text) :], whole
        return given

    def _decoded(self, count: int | None = None) -> str:
        return str(self._tokenizer.decode(self._ids[:count], skip_special_tokens=not self._special))
