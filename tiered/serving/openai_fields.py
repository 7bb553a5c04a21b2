"""Reads bodies of OpenAI's endpoints into arguments of `generate`; errors name the field.

Fields are those of OpenAI's API reference (chat completions, completions), and options of `generate` under each of
their names. The `openai` package sends the latter by `extra_body`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered.core.aliases import ALIASES, ALWAYS_NAMES, GIDD_ALIASES, MASK_NAMES, resolve_aliases
from tiered.core.checks import check_integer, check_switch, nearest
from tiered.core.errors import ContextLengthError
from tiered.decoding.rules.registry import COMMIT_OPTIONS
from tiered.inputs import Inputs
from tiered.options import OPTION_NAMES, GenerationOptions
from tiered.serving.prompts import RefusedBody, check_field, read_messages, read_prompts, read_stops

# Unsupported fields, with their values that change nothing; so does None in every field.
REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("audio", "chat_template", "moderation", "prediction", "reasoning_effort", "verbosity"), ()),
    **dict.fromkeys(("echo", "logprobs", "output_history", "store"), (False,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("documents", "functions", "tools"), ([],)),
    "logit_bias": ({},),
    "best_of": (1,),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "web_search_options": (),
}
REFUSED |= {alias: REFUSED[name] for alias, name in ALIASES.items() if name in REFUSED}
# Fields for the client's own records, which change no answer.
UNREAD = ("metadata", "prompt_cache_key", "safety_identifier", "user")
_TEMPLATE = "chat_template_kwargs"
_READ = ("model", "n", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens")
_OPTIONS = frozenset((*OPTION_NAMES, *ALIASES, *GIDD_ALIASES, *MASK_NAMES, *ALWAYS_NAMES))
_STEPS = frozenset(("steps", "block_steps"))
_OF_RULE = frozenset((*COMMIT_OPTIONS, "confidence", "remasking"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request.

    Attributes:
        body: most bytes of the body.
        prompt_tokens: most tokens of a prompt; None for the model's own limit.
        answer_tokens: most tokens of an answer, of a block and of `trailing_noise`.
        choices: most answers, prompts times `n`.
    """

    body: int = 1 << 20
    prompt_tokens: int | None = None
    answer_tokens: int = 4096
    choices: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """The contents of a body.

    Attributes:
        model: name of the model; None for the served one.
        source: field with the prompts.
        fields: the body's names of arguments of `generate`, by the library's names.
        prompts: prompts, each answered `n` times.
        raw: whether strings are continued as they are.
        template: variables of the chat template.
        options: options of `generate` under the library's names, without the seed.
        seed: seed of the first answer to each prompt, 64 bits with a sign, plus 1 for each further answer.
        n: answers to each prompt.
        most: most tokens of an answer; None for all of the canvas.
        stop: strings that end an answer and are left out of it.
        stream: whether final text is sent as it comes.
        usage: whether the stream ends with token counts.
        drafts: whether the stream also has drafts, tokens that are not final.
    """

    model: str | None
    source: str
    fields: Mapping[str, str]
    prompts: Sequence[Inputs]
    raw: bool
    template: Mapping[str, Any]
    options: Mapping[str, Any]
    seed: int | None
    n: int
    most: int | None
    stop: Sequence[str]
    stream: bool
    usage: bool
    drafts: bool

    def refusal(self, error: TypeError | ValueError) -> RefusedBody:
        """The runtime's `error` for this body, with the field that caused it."""
        if isinstance(error, ContextLengthError):
            return RefusedBody(str(error), self.source, code="context_length_exceeded")
        return RefusedBody(str(error), _field_of(str(error), self.fields, self.source))


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises `RefusedBody` if it is none."""
    try:
        read = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RefusedBody(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(read, dict):
        raise RefusedBody(f"the body is a {type(read).__name__}; a JSON object is allowed")
    return read


def read_body(
    body: Mapping[str, Any],
    *,
    chat: bool,
    defaults: Mapping[str, Any],
    limits: Limits,
    mask_token_id: int,
    block_causal: bool,
) -> ParsedRequest:
    """Read a body of `/v1/chat/completions` (`chat`) or `/v1/completions`; `defaults`: options of `generate` that it
    may override. `mask_token_id`, `block_causal`: of the model.

    Raises:
        RefusedBody: an unknown field, with the nearest name; an unsupported field, unless its value changes nothing; or
            a value that is not allowed.
    """
    source = "messages" if chat else "prompt"
    refused = REFUSED if chat else REFUSED | {_TEMPLATE: ({},)}
    known = {*refused, *UNREAD, *_READ, _TEMPLATE, source, *_OPTIONS}
    for name, value in body.items():
        if name not in known:
            near = nearest(name, known - refused.keys())
            raise RefusedBody(f"unknown field {name!r}" + (f"; did you mean {near!r}?" if near else ""), name)
        if name in refused and value is not None and not any(_same(value, allowed) for allowed in refused[name]):
            raise RefusedBody(
                f"{name} is not supported here, and not ignored: leave it out", name, code="unsupported_field"
            )
    given = {name: value for name, value in body.items() if value is not None and name not in refused}
    if source not in given:
        raise RefusedBody(f"{source} is missing", source)
    prompts = [read_messages(given[source])] if chat else read_prompts(given[source])
    n = given.get("n", 1)
    check_field("n", check_integer, n, least=1)
    if len(prompts) * n > limits.choices:
        what = f"n = {n} answers to {len(prompts)} prompts"
        raise RefusedBody(
            f"{what} are {n * len(prompts)}; at most {limits.choices} are allowed", "n" if "n" in given else source
        )
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise RefusedBody(f"model = {model!r:.80}; a string is allowed", "model")
    template = given.get(_TEMPLATE, {})
    if not isinstance(template, Mapping):
        raise RefusedBody(f"{_TEMPLATE} = {template!r:.80}; an object is allowed", _TEMPLATE)
    stream = given.get("stream", False)
    check_field("stream", check_switch, stream)
    options, most = _options(given, defaults, limits, mask_token_id, block_causal)
    seed = options.pop("seed", None)
    if seed is not None:
        check_field("seed", check_integer, seed, least=-(2**63), most=2**63 - 1)
    return ParsedRequest(
        model=model,
        source=source,
        fields=_fields(given),
        prompts=prompts,
        raw=not chat,
        template=template,
        options=options,
        seed=seed,
        n=n,
        most=most,
        stop=read_stops(given.get("stop", [])),
        stream=stream,
        **_stream_options(given.get("stream_options"), stream),
    )


def _options(
    given: Mapping[str, Any], defaults: Mapping[str, Any], limits: Limits, mask_token_id: int, block_causal: bool
) -> tuple[dict[str, Any], int | None]:
    """Options of `generate` under the library's names, and the length of an answer if an OpenAI field or the limit
    gives it. The canvas rounds that length up to whole blocks."""
    asked = {name: value for name, value in given.items() if name in _OPTIONS}
    try:
        own = resolve_aliases(asked, OPTION_NAMES, mask_token_id=mask_token_id)
    except (TypeError, ValueError) as error:
        raise RefusedBody(str(error), _field_of(str(error), {name: name for name in asked}, None)) from None
    lengths = {name: given[name] for name in ("max_completion_tokens", "max_tokens") if name in given}
    if "max_new_tokens" in own:
        lengths["max_new_tokens"] = own["max_new_tokens"]
    for name, length in lengths.items():
        check_field(name, check_integer, length, least=1)
        if length > limits.answer_tokens:
            raise RefusedBody(f"{name} = {length}; at most {limits.answer_tokens} are allowed", name)
    fields = _fields(given)
    for name, least in (("block_length", 1), ("trailing_noise", 0)):
        if name in own:
            check_field(fields[name], check_integer, own[name], least=least, most=limits.answer_tokens)
    if len({*lengths.values()}) > 1:
        raise RefusedBody(f"{lengths} are different lengths of an answer; give one", next(iter(lengths)))
    options = {name: value for name, value in defaults.items() if not _replaced(name, own)} | own
    default = options.get("max_new_tokens", GenerationOptions().max_new_tokens)
    if "max_new_tokens" in own or (not lengths and default <= limits.answer_tokens):
        return options, None
    most = next(iter(lengths.values()), limits.answer_tokens)
    if block_causal:  # `generate` rounds up behind each prompt
        return options | {"max_new_tokens": most}, most
    try:
        block = GenerationOptions(**options | {"max_new_tokens": most, "seed": None}).block
    except (TypeError, ValueError) as error:
        raise RefusedBody(str(error), _field_of(str(error), fields, None)) from None
    return options | {"max_new_tokens": -(-most // block) * block}, most


def _replaced(default: str, own: Mapping[str, Any]) -> bool:
    """True if a request's options make another choice in place of an option of the server: by a commit rule of its own,
    or another count of steps."""
    return ("commit" in own and default in _OF_RULE) or (default in _STEPS and not _STEPS.isdisjoint(own))


def _fields(given: Mapping[str, Any]) -> dict[str, str]:
    aliases = {**ALIASES, "max_completion_tokens": "max_new_tokens", "max_tokens": "max_new_tokens"}
    own = {name: aliases.get(name, name) for name in given}
    return {option: name for name, option in own.items() if option in OPTION_NAMES or option == _TEMPLATE}


def _field_of(message: str, fields: Mapping[str, str], source: str | None) -> str | None:
    """The field of the body that `message` names first; the prompt's field if it names no option."""
    named = [word for word in re.findall(r"\w+", message) if word in fields or word in OPTION_NAMES]
    return next((fields[word] for word in named if word in fields), None if named else source)


def sampler_seed(seed: int) -> int:
    """`seed` if it is in the sampler's range from 0 to 2^62, else a hash of it."""
    if 0 <= seed <= 2**62:
        return seed
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest())


def _stream_options(value: object, stream: bool) -> dict[str, bool]:
    if value is None:
        return {"usage": False, "drafts": False}
    if not isinstance(value, Mapping) or not stream:
        raise RefusedBody(
            f"stream_options = {value!r:.80}; an object is allowed, together with stream = true", "stream_options"
        )
    known = {"include_usage": "usage", "include_drafts": "drafts", "include_obfuscation": None}
    read = {"usage": False, "drafts": False}
    for name, switch in value.items():
        if name not in known:
            raise RefusedBody(f"stream_options has no {name!r}; allowed: {', '.join(known)}", "stream_options")
        check_field("stream_options", check_switch, switch)
        if (field := known[name]) is not None:
            read[field] = switch
    return read


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
