"""Reads and checks a caller's text, chats or ids as prompts for a canvas."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import jinja2.meta
import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.core.checks import check_switch, nearest

Message = Mapping[str, Any]
_SURROGATE = re.compile("[\ud800-\udfff]")
Ids = Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]]
Inputs = str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]] | Ids | Mapping[str, Any]
ENCODED = ("input_ids", "attention_mask", "token_type_ids")
_NO_CHAT = "chat_template_kwargs are for prompts that a chat template writes; leave them out"
_ALLOWED_IDS = "a LongTensor [batch, length], a numpy array or lists of ints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts as the caller padded them, on any side.

    Attributes:
        chat: whether the chat template wrote them.
    """

    ids: Int[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length"]
    chat: bool = False

    @property
    def longest(self) -> int:
        return int(self.mask.sum(dim=1).max())

    @property
    def shortest(self) -> int:
        return int(self.mask.sum(dim=1).min())

    def to(self, device: torch.device | str) -> "Prompts":
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device))

    def rows(self) -> list[list[int]]:
        """Tokens of each prompt, without padding."""
        return [row[mask].tolist() for row, mask in zip(self.ids, self.mask, strict=True)]


def read_inputs(
    inputs: Inputs | None,
    encoded: Mapping[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    tokenizer_missing: str,
    pad_token_id: int,
    vocab_size: int,
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompts:
    """Prompts of a string, a list of strings, chat messages (one chat or a list of chats), or ids.

    A string is a user's message if the tokenizer has a chat template; without one, or with `raw`, it is continued as it
    is. Ids are a tensor or a numpy array [batch, length], lists of ints (one prompt, or several, padded on the left),
    or a tokenizer's output (a mapping with `input_ids`).

    Args:
        encoded: arguments beside `inputs`, each None or absent for none. `input_ids`: ids in place of `inputs`.
            `attention_mask`: mask of the ids' shape, 0 at padding on any side; None for the mask in `inputs`, or no
            padding. `token_type_ids`: zeros, which tokenizers return; the models have no embedding for them.
        tokenizer_missing: reason in the error for text without a tokenizer.
        chat_template_kwargs: variables of the chat template; None for none.

    Raises:
        TypeError: no inputs, or two; another kind of input; a mask beside text; `raw` beside chats; variables without a
            chat.
        ValueError: an empty prompt, text that is no Unicode, ids out of range, a mask of another shape, or text without
            a tokenizer. Also a chat that the template refuses, or a variable that it does not read.
    """
    check_switch("raw", raw)
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise TypeError(f"chat_template_kwargs = {variables!r:.80}; a mapping of variables by name is allowed")
    chat = False
    given, attention_mask = _given(inputs, {name: encoded.get(name) for name in ENCODED})
    if not _are_ids(given):
        if attention_mask is not None:
            raise TypeError("attention_mask is for token ids; leave it out with text, which is padded and masked here")
        if tokenizer is None:
            raise ValueError(f"text needs a tokenizer, and {tokenizer_missing}; pass token ids instead")
        chat = bool(tokenizer.chat_template) and not raw
        if variables and not chat:
            raise TypeError(_NO_CHAT)
        rows = _encode(given, tokenizer, raw, variables)
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(f"prompt {i} is empty: {given!r:.80} has no token")
        given = rows
    elif variables:
        raise TypeError(_NO_CHAT)
    ids, filled = _padded("ids", given, pad_token_id)
    if attention_mask is None:
        return replace(_checked(ids, filled, vocab_size), chat=chat)
    mask, as_long = _padded("attention_mask", attention_mask, 0)
    if mask.shape == ids.shape and not torch.equal(filled, as_long):
        raise ValueError("attention_mask has rows of other lengths than the ids; equal lengths are allowed")
    return _checked(ids, mask, vocab_size)


def _given(inputs: object, encoded: dict[str, Any]) -> tuple[Any, Any]:
    """The one argument that holds the prompts, and its mask."""
    if inputs is not None and encoded["input_ids"] is not None:
        raise TypeError("inputs and input_ids are both given; pass only one of them")
    whole = encoded["input_ids"] if inputs is None else inputs
    if isinstance(whole, Mapping) and "input_ids" in whole:
        inputs, encoded = None, encoded | {"input_ids": None}
        for name, value in whole.items():
            if name not in encoded:
                raise TypeError(f"inputs hold {name!r}; {', '.join(encoded)} are allowed")
            if encoded[name] is not None:
                raise TypeError(f"{name} is given twice, in the inputs and as an argument; pass it once")
            encoded[name] = value
    ids, types = encoded["input_ids"], encoded["token_type_ids"]
    if inputs is None and ids is None:
        raise TypeError(f"inputs are missing; a string, strings, chat messages or ids are allowed: {_ALLOWED_IDS}")
    if ids is not None and not _are_ids(ids):
        raise TypeError(f"input_ids are {_ALLOWED_IDS}, not {type(ids).__name__}")
    if types is not None and _padded("token_type_ids", types, 0)[0].any():
        raise ValueError("token_type_ids hold values other than 0; the model has no embedding for them")
    return inputs if ids is None else ids, encoded["attention_mask"]


def _are_ids(given: object) -> bool:
    def of_numbers(item: object) -> bool:
        if isinstance(item, Sequence) and not isinstance(item, str):
            return len(item) > 0 and isinstance(item[0], Real)
        return isinstance(item, Tensor | np.ndarray)

    return of_numbers(given) or (isinstance(given, Sequence) and any(map(of_numbers, given)))


def _padded(name: str, given: Any, padding: int) -> tuple[Tensor, Bool[Tensor, "batch longest"]]:
    if isinstance(given, Tensor):
        check_readable(name, given)
        return given, torch.ones(given.shape, dtype=torch.bool)
    try:
        if isinstance(given, np.ndarray):
            return _tensor(given), torch.ones(given.shape, dtype=torch.bool)
        rows = [_tensor(row) for row in ([given] if isinstance(given[0], Real) else given)]
        lengths = [len(row) for row in rows]
        parts = torch.cat(rows).split(lengths)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise TypeError(f"{name} are {_ALLOWED_IDS}, not {given!r:.80}") from error
    if 0 in lengths:
        raise ValueError(f"prompt {lengths.index(0)} is empty: {name} have no token there")
    padded = torch.nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_value=padding, padding_side="left")
    longest = padded.shape[1]
    return padded, torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]


def _tensor(row: Any) -> Tensor:
    if isinstance(row, Tensor):
        return row
    array = np.asarray(row)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype}")
    # torch has few operations on unsigned integers.
    return torch.tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array.copy())


def _encode(
    inputs: object, tokenizer: PreTrainedTokenizerBase, raw: bool, variables: Mapping[str, Any]
) -> list[list[int]]:
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, Sequence):
        raise TypeError(f"inputs are a string, strings, chat messages or {_ALLOWED_IDS}, not {type(inputs).__name__}")
    if not inputs:
        raise ValueError("inputs are empty; at least one prompt is needed")
    if all(isinstance(item, str) for item in inputs):
        if raw or not tokenizer.chat_template:
            return [_ids(str(text), tokenizer) for text in inputs]
        for i, text in enumerate(inputs):
            if not text.strip():
                raise ValueError(f"prompt {i} is empty: {text!r:.80} is blank")
            _check_text(text)
        chats: list[Any] = [[{"role": "user", "content": text}] for text in inputs]
    else:
        chats = [inputs] if all(isinstance(item, Mapping) for item in inputs) else list(inputs)
    chats = [_checked_chat(chat) for chat in chats]
    if raw:
        raise TypeError("raw = True is for strings; chats need the chat template")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; pass the prompt as a string")
    if variables:
        _check_variables(variables, tokenizer)
    try:
        texts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **variables)
            for chat in chats
        ]
    except Exception as error:  # a template can raise any
        raise ValueError(f"the chat template refuses the chat: {error}") from error
    # The template has written the special tokens.
    return [_ids(str(text), tokenizer, add_special_tokens=False) for text in texts]


def _check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    # Marks of what an assistant wrote are transformers' own and hold no variable.
    template = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", tokenizer.get_chat_template())
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error
    own = {"messages", "raise_exception", "strftime_now", *environment.globals, *tokenizer.special_tokens_map}
    own |= inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    allowed = read - own
    for name in variables:
        if name not in allowed:
            near = nearest(name, allowed)
            hint = f"; did you mean {near!r}?" if near else f"; allowed: {', '.join(sorted(allowed)) or 'none'}"
            raise ValueError(f"chat_template_kwargs has {name!r}, which the chat template does not read{hint}")


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    _check_text(text)
    return list(tokenizer(text, **options)["input_ids"])  # type: ignore[arg-type]


def _check_text(text: str) -> None:
    lone = _SURROGATE.search(text)
    if lone:
        raise ValueError(
            f"a prompt holds {lone[0]!r} at character {lone.start()}, half of a surrogate pair; text that UTF-8 can "
            f"encode is allowed: {text!r:.80}"
        )


def message_text(content: object) -> str:
    """The text of a message: a string, or OpenAI's content parts, all of text. Raises `TypeError` for another part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TypeError(f"content is text, not {content!r:.80}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            allowed = "'text' is allowed, files, images and URLs are not"
            raise TypeError(f"a content part is of type {kind!r:.80}; {allowed}")
        texts.append(part["text"])
    return "".join(texts)


def _checked_chat(chat: object) -> list[dict[str, Any]]:
    """A chat whose messages hold text."""
    if not isinstance(chat, Sequence) or isinstance(chat, str) or not chat:
        raise TypeError(f"a chat is a non-empty list of messages with 'role' and 'content', not {chat!r:.80}")
    for message in chat:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise TypeError(f"a chat message is a mapping with 'role' and 'content', not {message!r:.80}")
    return [{**message, "content": message_text(message["content"])} for message in chat]


def check_readable(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` if `tensor`, the argument `name`, is not dense or has no values."""
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name} is a {kind} tensor; a dense one with values is allowed")


def _checked(ids: Tensor, attention_mask: Tensor, vocab_size: int) -> Prompts:
    if ids.dim() != 2 or ids.dtype not in (torch.long, torch.int):
        raise ValueError(f"ids are a LongTensor [batch, length], not {ids.dtype} {list(ids.shape)}")
    if not ids.numel():
        raise ValueError(f"the prompt is empty: ids have shape {list(ids.shape)}")
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"token id {bad} is out of range; ids in [0, {vocab_size}) are allowed")
    if attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; the ids have {list(ids.shape)}")
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("attention_mask holds values other than 0 (padding) and 1 (token)")
    mask = attention_mask.bool()
    empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"prompts {empty} are empty: their attention_mask is 0 everywhere")
    return Prompts(ids=ids.long(), mask=mask.to(ids.device))
