"""Text and ids as the harness wants them: prompts that leave room for their answer, chats, and the ends of answers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tiered.serving.answer_text import AnswerText

logger = logging.getLogger(__name__)


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, eos_token_id: int, add_bos_token: bool = False
) -> list[int]:
    """Ids of `text`, which may have gone through a chat template.

    A text that begins with the tokenizer's beginning-of-sequence token gets no second one; `add_bos_token` adds it to
    the others. An empty text is that token, or `eos_token_id` if the tokenizer has none.
    """
    bos = str(tokenizer.bos_token or "")
    if add_bos_token and not text.startswith(bos):
        text = bos + text
    ids = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]
    return list(ids) or [tokenizer.convert_tokens_to_ids(bos) if bos else eos_token_id]  # type: ignore[arg-type]


def encode_pair(encoded: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of both, split where the ids of the whole text split. Spaces at the context's end begin the continuation,
    because a token carries the space in front of it. An empty context is one token, as in `encode`."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        prefix, whole = encoded(""), encoded(continuation)
        return prefix, whole[1:] if whole[:1] == prefix else whole
    prefix, whole = encoded(kept), encoded(kept + continuation)
    return whole[: len(prefix)], whole[len(prefix) :]


def fit(prompts: Sequence[list[int]], rooms: Sequence[int]) -> list[list[int]]:
    """The last `rooms[i]` ids of prompt i: in few-shot prompts the question stands at the end. One warning counts the
    prompts and tokens that were cut."""
    cuts = {i: len(ids) - room for i, (ids, room) in enumerate(zip(prompts, rooms, strict=True)) if len(ids) > room}
    if cuts:
        worst = max(cuts, key=lambda i: cuts[i])
        logger.warning(
            "%d of %d prompts leave no room for their answer in the model's context and lose tokens from the left: "
            "%d tokens in all, at most %d (request %d, of %d tokens). Fewer few-shot examples or a smaller "
            "max_gen_toks keep them whole.",
            len(cuts), len(prompts), sum(cuts.values()), cuts[worst], worst, len(prompts[worst]),
        )  # fmt: skip
    return [ids[len(ids) - room :] if len(ids) > room else ids for ids, room in zip(prompts, rooms, strict=True)]


def template(tokenizer: PreTrainedTokenizerBase, chosen: bool | str | None) -> str | None:
    """The template of `--apply_chat_template`: the tokenizer's own, or None.

    Raises:
        ValueError: the tokenizer has no template, or `chosen` is a name: the harness passes it for the results alone,
            and not when it applies a template.
    """
    if not chosen:
        return None
    if isinstance(chosen, str):
        raise ValueError(f"--apply_chat_template {chosen}: no template is chosen by name here; leave the name out")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; run without --apply_chat_template")
    return tokenizer.get_chat_template()


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    """`messages` as one prompt, at whose end the answer begins. Without `add_generation_prompt` the last message is the
    answer's own beginning (a task's `gen_prefix`), and stays open. Raises `ValueError` as `template`."""
    template(tokenizer, True)
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    if not add_generation_prompt:
        options["continue_final_message"] = True
    return str(tokenizer.apply_chat_template(list(messages), **options))


def answer_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, most: int, eos_token_id: int, until: Sequence[str]
) -> str:
    """The answer in `ids` (the canvas behind the prompt), as the harness wants it.

    Args:
        most: most tokens of the answer (`max_gen_toks`).
        eos_token_id: ends an answer.
        until: stop strings. The one that begins first cuts the text, and is no part of it.
    """
    # Decoding drops special tokens, so that a stop string such as "<|eot_id|>" would never be seen in text.
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {special[stop] for stop in until if stop in special}
    kept = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    answer = AnswerText(tokenizer, eos_token_id=eos_token_id, stop=[stop for stop in until if stop], most=most)
    answer.put(ids[:kept])
    answer.end()
    return answer.text
