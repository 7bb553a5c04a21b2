"""What the bodies of OpenAI's endpoints may say here: read into what a runtime is asked, or refused by name.

The names are those of OpenAI's API reference (chat completions, completions). Options of `generate` stand beside them,
under every name that the library knows: where the `openai` package puts its `extra_body`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered.core.aliases import ALIASES, GIDD_ALIASES
from tiered.core.checks import check_integer, check_switch, nearest
from tiered.core.errors import ContextLengthError
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH
from tiered.inputs import Inputs
from tiered.options import OPTION_NAMES, own_names

# Values with which a field asks for nothing that is not there; None is one for all of them.
REFUSED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "output_history": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# For the books of whoever asks: no answer hangs on them.
UNREAD = ("metadata", "prompt_cache_key", "safety_identifier", "user")
_READ = ("model", "n", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens")
_MOST_STOPS, _MOST_STOP_LENGTH = 4, 256
_ROLES = ("system", "developer", "user", "assistant")


class RefusedBody(ValueError):
    """A request that cannot be answered as it stands.

    Attributes:
        field: of the body; None: no one field.
        status: of HTTP.
        code: for programs.
    """

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may ask for at most.

    Attributes:
        body: bytes of the body.
        prompt_tokens: of a prompt; None: as the model allows.
        answer_tokens: of an answer.
        choices: answers of a request: prompts times `n`.
    """

    body: int = 1 << 20
    prompt_tokens: int | None = None
    answer_tokens: int = 4096
    choices: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A body that was read.

    Attributes:
        source: the field that has the prompts.
        fields: names of the body's options of `generate`, by their own names.
        prompts: each to be answered `n` times.
        raw: strings are continued as they stand.
        options: of `generate`, under its own names, without the seed.
        seed: of the first answer to each prompt, 64 bits with a sign; the others count on.
        most: tokens of an answer; None: as many as the canvas has.
        stop: strings that end an answer, and are no part of it.
        stream, usage, drafts: send what is final as it comes; with the sums at the end; with what is not final.
    """

    model: str | None
    source: str
    fields: Mapping[str, str]
    prompts: Sequence[Inputs]
    raw: bool
    options: Mapping[str, Any]
    seed: int | None
    n: int
    most: int | None
    stop: Sequence[str]
    stream: bool
    usage: bool
    drafts: bool

    def refusal(self, error: TypeError | ValueError) -> RefusedBody:
        """`error`, which the runtime raised at this body, with the field that it is about."""
        if isinstance(error, ContextLengthError):
            return RefusedBody(str(error), self.source, code="context_length_exceeded")
        return RefusedBody(str(error), _field_of(str(error), self.fields, self.source))


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        RefusedBody: it is none.
    """
    try:
        read = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RefusedBody(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(read, dict):
        raise RefusedBody(f"the body is a JSON object, not {type(read).__name__}")
    return read


def read_body(
    body: Mapping[str, Any], *, chat: bool, defaults: Mapping[str, Any], limits: Limits, mask_token_id: int
) -> Wanted:
    """What a body of `/v1/chat/completions` (`chat`) or `/v1/completions` asks for; `defaults`: options of `generate`
    that it may overrule.

    Raises:
        RefusedBody: an unknown field, with the nearest name; one that is not served, unless its value asks for nothing;
            or a value that is not allowed.
    """
    source = "messages" if chat else "prompt"
    known = {*REFUSED, *UNREAD, *_READ, source, *OPTION_NAMES, *ALIASES, *GIDD_ALIASES, "mask_id"}
    for name, value in body.items():
        if name not in known:
            near = nearest(name, known - REFUSED.keys())
            raise RefusedBody(f"unknown field {name!r}" + (f"; did you mean {near!r}?" if near else ""), name)
        if name in REFUSED and value is not None and not any(_same(value, allowed) for allowed in REFUSED[name]):
            raise RefusedBody(
                f"{name} is not served here, and not ignored: leave it out", name, code="unsupported_field"
            )
    given = {name: value for name, value in body.items() if value is not None and name not in REFUSED}
    if source not in given:
        raise RefusedBody(f"{source} is missing", source)
    prompts = [_chat(given[source])] if chat else _prompts(given[source])
    n = given.get("n", 1)
    _checked("n", check_integer, n, least=1)
    if len(prompts) * n > limits.choices:
        what = f"n = {n} answers to {len(prompts)} prompts"
        raise RefusedBody(f"{what} are {n * len(prompts)}; at most {limits.choices} are allowed", "n")
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise RefusedBody(f"model = {model!r:.80} is no string", "model")
    stream = given.get("stream", False)
    _checked("stream", check_switch, stream)
    options, most = _options(given, defaults, limits, mask_token_id)
    seed = options.pop("seed", None)
    if seed is not None:
        _checked("seed", check_integer, seed, least=-(2**63), most=2**63 - 1)
    return Wanted(
        model=model, source=source, fields=_fields(given), prompts=prompts, raw=not chat, options=options, seed=seed,
        n=n, most=most, stop=_stops(given.get("stop", [])), stream=stream,
        **_stream_options(given.get("stream_options"), stream),
    )  # fmt: skip


def _options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], limits: Limits, mask_token_id: int
) -> tuple[dict[str, Any], int | None]:
    """Options of `generate` by their own names, and the tokens of an answer where they are said as OpenAI says them:
    the canvas then has as many as fill its blocks."""
    asked = {name: given[name] for name in given if name in (*OPTION_NAMES, *ALIASES, *GIDD_ALIASES, "mask_id")}
    try:
        own = own_names(asked, mask_token_id=mask_token_id)
    except (TypeError, ValueError) as error:
        raise RefusedBody(str(error), _field_of(str(error), {name: name for name in asked}, None)) from None
    lengths = {name: given[name] for name in ("max_completion_tokens", "max_tokens") if name in given}
    if "max_new_tokens" in own:
        lengths["max_new_tokens"] = own["max_new_tokens"]
    for name, length in lengths.items():
        _checked(name, check_integer, length, least=1)
        if length > limits.answer_tokens:
            raise RefusedBody(f"{name} = {length}; at most {limits.answer_tokens} are allowed", name)
    if len({*lengths.values()}) > 1:
        raise RefusedBody(f"{lengths} are different lengths of an answer; give one", next(iter(lengths)))
    options = {**defaults, **own}
    if not lengths or "max_new_tokens" in own:
        return options, None
    most = next(iter(lengths.values()))
    block = options.get("block_length")
    if block is None:
        block = min(most, DEFAULT_BLOCK_LENGTH)
    _checked("block_length", check_integer, block, least=1)
    return options | {"max_new_tokens": -(-most // block) * block}, most


def _fields(given: Mapping[str, Any]) -> dict[str, str]:
    aliases = {**ALIASES, "max_completion_tokens": "max_new_tokens", "max_tokens": "max_new_tokens"}
    own = {name: aliases.get(name, name) for name in given}
    return {option: name for name, option in own.items() if option in OPTION_NAMES}


def _field_of(message: str, fields: Mapping[str, str], source: str | None) -> str | None:
    """The field of the body that `message` names first. If it names no option at all, it is about the prompt."""
    named = [word for word in re.findall(r"\w+", message) if word in fields or word in OPTION_NAMES]
    return next((fields[word] for word in named if word in fields), None if named else source)


def sampler_seed(seed: int) -> int:
    """`seed` as the sampler takes it, from 0 to 2^62: another number is replaced by a hash of it."""
    if 0 <= seed <= 2**62:
        return seed
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())


def _stream_options(value: object, stream: bool) -> dict[str, bool]:
    if value is None:
        return {"usage": False, "drafts": False}
    if not isinstance(value, Mapping) or not stream:
        raise RefusedBody(f"stream_options = {value!r:.80} is an object, beside stream = true", "stream_options")
    known = {"include_usage": "usage", "include_drafts": "drafts", "include_obfuscation": None}
    read = {"usage": False, "drafts": False}
    for name, switch in value.items():
        if name not in known:
            raise RefusedBody(f"stream_options has no {name!r}; allowed: {', '.join(known)}", "stream_options")
        _checked("stream_options", check_switch, switch)
        if (field := known[name]) is not None:
            read[field] = switch
    return read


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RefusedBody(f"stop = {value!r:.80} is a string, or a list of strings", "stop")
    if len(stops) > _MOST_STOPS or any(not 0 < len(stop) <= _MOST_STOP_LENGTH for stop in stops):
        raise RefusedBody(
            f"stop has {len(stops)} strings; up to {_MOST_STOPS} of 1 to {_MOST_STOP_LENGTH} characters are allowed",
            "stop",
        )
    return stops


def _chat(messages: object) -> list[dict[str, str]]:
    """Messages with plain text."""
    if not isinstance(messages, list) or not messages:
        raise RefusedBody("messages is a list with a message at least", "messages")
    return [_message(message) for message in messages]


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RefusedBody(f"a message is an object, not {message!r:.80}", "messages")
    for name, value in message.items():
        # lm-evaluation-harness calls messages of text so.
        if name not in ("role", "content", "name") and value and (name, value) != ("type", "text"):
            raise RefusedBody(f"{name} in a message is not served here, and not ignored: leave it out", "messages")
    role = message.get("role")
    if role not in _ROLES:
        raise RefusedBody(f"role = {role!r:.80}; allowed: {', '.join(_ROLES)}", "messages")
    return {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RefusedBody(f"content is text, not {content!r:.80}", "messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RefusedBody(
                f"a content part is of type 'text', not {kind!r:.80}: no file, image or URL is read", "messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def _prompts(prompt: object) -> list[Inputs]:
    """Strings, or ids as tensors."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            return [*prompt]
        ids = [prompt] if all(_is_id(each) for each in prompt) else prompt
        if all(isinstance(each, list) and each and all(_is_id(one) for one in each) for each in ids):
            return [torch.tensor([each]) for each in ids]
    raise RefusedBody(
        "prompt is a string, token ids, or a list of strings or of lists of ids; none of them empty", "prompt"
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _checked(field: str, check: Any, value: object, **bounds: Any) -> None:
    try:
        check(field, value, **bounds)
    except (TypeError, ValueError) as error:
        raise RefusedBody(str(error), field) from None
