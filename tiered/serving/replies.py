"""The objects of OpenAI's API in a server's answers, whole or in chunks, and its errors."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered.core.errors import TierCapacityError
from tiered.models.response import CONTENT, THINKING, Response
from tiered.serving.prompts import RefusedBody
from tiered.serving.request import BusyError, ClosedError, RequestTimeout

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Makes the objects of one request.

    Attributes:
        model: name of the served model.
        chat: True for chat completions, False for completions.
    """

    model: str
    chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, answers: Sequence[str | Response], reasons: Sequence[str], usage: Mapping[str, int]
    ) -> dict[str, Any]:
        """The object of whole answers: texts, or messages that are split."""
        choices = [
            self._choice(index, {"message": _message(answer)}, answer, reason)
            for index, (answer, reason) in enumerate(zip(answers, reasons, strict=True))
        ]
        return self._object("chat.completion", choices) | {"usage": dict(usage)}

    def first(self, index: int) -> bytes:
        """The first chunk of a chat's choice; empty for completions."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk([self._choice(index, role, "", None)]) if self.chat else b""

    def more(self, index: int, text: str, part: str) -> bytes:
        return self._chunk([self._choice(index, {"delta": {part: text}}, text, None)])

    def last(self, index: int, reason: str) -> bytes:
        return self._chunk([self._choice(index, {"delta": {}}, "", reason)])

    def beside(self, **more: Any) -> bytes:
        return self._chunk([], **more)

    def _choice(self, index: int, of_chat: dict[str, Any], text: object, reason: str | None) -> dict[str, Any]:
        own = of_chat if self.chat else {"text": text}
        return {"index": index, **own, "logprobs": None, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(self._object("chat.completion.chunk", choices) | more)

    def _object(self, of_chat: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind, id = (of_chat, f"chatcmpl-{self.id}") if self.chat else ("text_completion", f"cmpl-{self.id}")
        return {"id": id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _message(answer: str | Response) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"role": "assistant", CONTENT: answer, "refusal": None}
    return {"role": "assistant", CONTENT: answer.content, THINKING: answer.thinking, "refusal": None}


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def error_body(message: str, kind: str, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def error_reply(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body for `error`. Internal errors are reported without their message."""
    match error:
        case RefusedBody():
            kind = "authentication_error" if error.status == 401 else "invalid_request_error"
            return error.status, error_body(str(error), kind, field=error.field, code=error.code)
        case TierCapacityError():
            body = error_body(str(error), "invalid_request_error", code="tier_capacity")
            numbers = {"needed": error.needed, "available": error.available, "tier": str(error.tier)}
            return 400, {"error": body["error"] | numbers}
        case BusyError():
            return 429, error_body(str(error), "rate_limit_error", code="too_many_waiting")
        case ClosedError():
            return 503, error_body(str(error), "server_error", code="closed")
        case RequestTimeout():
            return 504, error_body(str(error), "server_error", code="timeout")
        case TypeError() | ValueError():
            return 400, error_body(str(error), "invalid_request_error")
    return 500, error_body("internal error at this request; see the server's log", "server_error")
