"""The parts of a chat's answer, thinking and content, as transformers' parser splits them.

A tokenizer's `response_template` says which marks are around them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

CONTENT, THINKING = "content", "reasoning_content"
# Other names of thinking in response templates, as transformers reads them.
_THINKING = (THINKING, "thinking", "reasoning")


class Response(NamedTuple):
    """An answer without its marks.

    Attributes:
        content: text of the answer itself.
        thinking: text that the model wrote for itself; None for none.
    """

    content: str
    thinking: str | None


def response_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """The tokenizer's response template with the fields of content and thinking; None unless it has both.

    Other fields are calls of tools. Tools are not supported, so such a call stays in the content and is not lost.
    """
    template: Any = getattr(tokenizer, "response_template", None)  # classes of other packages may lack it
    if template is None:
        return None
    # An answer that ends early may lack a field.
    kept = {
        name: {**field, "optional": True} for name, field in template["fields"].items() if name in (CONTENT, *_THINKING)
    }
    return {**template, "fields": kept} if CONTENT in kept and len(kept) > 1 else None


class ResponseParts:
    """Splits an answer while its text comes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: dict[str, Any], prompt: Sequence[int]) -> None:
        """`template`: as of `response_template`; `prompt`: the chat's tokens, which may begin the thinking."""
        self._parser = tokenizer.get_response_parser(template, prefix=[*prompt])
        self._texts: dict[str, str] = {}

    @property
    def response(self) -> Response:
        """The answer so far, without white space around its parts."""
        return Response(self._texts.get(CONTENT, "").strip(), self._texts.get(THINKING, "").strip() or None)

    def put(self, text: str) -> list[tuple[str, str]]:
        """Add the next text, special tokens included. Returns pieces that become final, each with `CONTENT` or
        `THINKING`."""
        return self._pieces(self._parser.feed(text))

    def end(self) -> list[tuple[str, str]]:
        """End the answer. Returns the last pieces."""
        return self._pieces(self._parser.finalize()[1])

    def _pieces(self, events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        pieces = [
            (CONTENT if event["field"] == CONTENT else THINKING, event["text"])
            for event in events
            if event["type"] == "region_chunk"
        ]
        for part, text in pieces:
            self._texts[part] = self._texts.get(part, "") + text
        return pieces


def split_response(
    tokenizer: PreTrainedTokenizerBase, template: dict[str, Any], prompt: Sequence[int], text: str
) -> Response:
    """The parts of a whole answer; arguments as of `ResponseParts`."""
    parts = ResponseParts(tokenizer, template, prompt)
    parts.put(text)
    parts.end()
    return parts.response
