"""Prompts and stop strings in the bodies of OpenAI's endpoints, and the error of a refused body."""

from collections.abc import Mapping
from typing import Any

import torch

from tiered.inputs import Inputs, message_text
from tiered.models.response import THINKING

_MOST_STOPS, _MOST_STOP_LENGTH = 4, 256
_ROLES = ("system", "developer", "user", "assistant")


class RefusedBody(ValueError):
    """A body that cannot be answered.

    Attributes:
        field: field of the body; None for no single field.
        status: HTTP status.
        code: OpenAI's error code; None for none.
    """

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


def check_field(field: str, check: Any, value: object, **bounds: Any) -> None:
    """Run `check` on the value of a field, and turn its error into `RefusedBody`."""
    try:
        check(field, value, **bounds)
    except (TypeError, ValueError) as error:
        raise RefusedBody(str(error), field) from None


def read_stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RefusedBody(f"stop = {value!r:.80}; a string or a list of strings is allowed", "stop")
    if len(stops) > _MOST_STOPS or any(not 0 < len(stop) <= _MOST_STOP_LENGTH for stop in stops):
        raise RefusedBody(
            f"stop has {len(stops)} strings; up to {_MOST_STOPS} of 1 to {_MOST_STOP_LENGTH} characters are allowed",
            "stop",
        )
    return stops


def read_messages(messages: object) -> list[dict[str, str]]:
    """Messages of a chat, with text alone. A template may read the thinking of an earlier answer."""
    if not isinstance(messages, list) or not messages:
        raise RefusedBody("messages must be a list of at least one message", "messages")
    return [_message(message) for message in messages]


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RefusedBody(f"a message is an object, not {message!r:.80}", "messages")
    role, thinking = message.get("role"), message.get(THINKING)
    own = {THINKING: thinking} if role == "assistant" and thinking and isinstance(thinking, str) else {}
    for name, value in message.items():
        # lm-evaluation-harness sends type = text.
        if name not in ("role", "content", "name", *own) and value and (name, value) != ("type", "text"):
            raise RefusedBody(f"{name} in a message is not supported here, and not ignored: leave it out", "messages")
    if role not in _ROLES:
        raise RefusedBody(f"role = {role!r:.80}; allowed: {', '.join(_ROLES)}", "messages")
    return {"role": "system" if role == "developer" else role, "content": _text(message.get("content")), **own}


def _text(content: object) -> str:
    try:
        return message_text(content)
    except TypeError as error:
        raise RefusedBody(str(error), "messages") from None


def read_prompts(prompt: object) -> list[Inputs]:
    """Prompts of completions: strings, or ids as tensors."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            return [*prompt]
        ids = [prompt] if all(_is_id(each) for each in prompt) else prompt
        if all(isinstance(each, list) and each and all(_is_id(one) for one in each) for each in ids):
            return [torch.tensor([each]) for each in ids]
    raise RefusedBody(
        "prompt must be a string, token ids, or a list of strings or of lists of ids, none of them empty", "prompt"
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
