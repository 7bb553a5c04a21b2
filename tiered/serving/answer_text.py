"""The text of an answer as far as it is final, from tokens that come a few at a time."""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

_HALF = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to this


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: int | None) -> list[str]:
    """The text that each token adds behind the one in front of it; `before`: in front of the first. None for none."""
    pairs = [[*([] if head is None else [head]), token] for head, token in zip([before, *ids], ids, strict=False)]
    heads, whole, own = (
        tokenizer.batch_decode(rows, skip_special_tokens=True)
        for rows in ([pair[:-1] for pair in pairs], pairs, [[token] for token in ids])
    )
    return [
        both[len(head) :] if both.startswith(head) else text for head, both, text in zip(heads, whole, own, strict=True)
    ]


class AnswerText:
    """Gives text out once nothing behind it can change it: whole characters, and none that may begin a stop string.

    Attributes:
        text: given out so far.
        ended: "stop" behind an end-of-sequence token or a stop string, "length" without room; None while text may come.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_id: int,
        stop: Sequence[str] = (),
        most: int | None = None,
    ) -> None:
        """`stop`: strings that end an answer, and are no part of it; `most`: tokens that it has at most."""
        self._tokenizer, self._eos, self._stop, self._most = tokenizer, eos_token_id, stop, most
        self._ids: list[int] = []
        self.text = ""
        self.ended: Literal["stop", "length"] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far, without the end-of-sequence token."""
        return len(self._ids)

    def put(self, ids: Sequence[int]) -> str:
        """Add the next final tokens. Returns the text that they make final."""
        if self.ended is not None:
            return ""
        for token in ids:
            if token == self._eos:
                return self._end("stop")
            self._ids.append(token)
            if len(self._ids) == self._most:
                return self._end("length")
        return self._give(self._decoded())

    def end(self) -> str:
        """No more tokens come. Returns the rest of the text."""
        return "" if self.ended is not None else self._end("length")

    def _end(self, why: Literal["stop", "length"]) -> str:
        given = self._give(self._decoded(), rest=True)
        self.ended = self.ended or why
        return given

    def _give(self, whole: str, *, rest: bool = False) -> str:
        """The part of `whole` that is final and was not given; `rest`: nothing comes behind `whole`."""
        found = min((place for stop in self._stop if (place := whole.find(stop)) >= 0), default=None)
        if found is not None:
            whole, self.ended = whole[:found], "stop"
            while len(self._ids) > 1 and len(self._decoded(len(self._ids) - 1)) >= found:
                self._ids.pop()  # behind the text, or of the stop string
        elif not rest:
            whole = whole.rstrip(_HALF)
            # The end may be the first characters of a stop string.
            begun = (n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n]))
            whole = whole[: len(whole) - max(begun, default=0)]
        if not whole.startswith(self.text):  # the tokenizer's text of the first tokens depends on those behind them
            return ""
        given, self.text = whole[len(self.text) :], whole
        return given

    def _decoded(self, count: int | None = None) -> str:
        return str(self._tokenizer.decode(self._ids[:count], skip_special_tokens=True))
