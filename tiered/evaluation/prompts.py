"""From a request's context, which is text, to the ids of a prompt that leaves room for the answer."""

import logging
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, eos_token_id: int, add_bos_token: bool = False
) -> list[int]:
    """Ids of `text`, which may have gone through a chat template.

    A text that begins with the tokenizer's own beginning-of-sequence token gets no second one. `add_bos_token` puts it
    in front of the others. An empty text is that token alone, or `eos_token_id` where the tokenizer has none: the
    harness asks for a prompt of one token there.
    """
    bos = str(tokenizer.bos_token or "")
    if add_bos_token and not text.startswith(bos):
        text = bos + text
    ids = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]
    return list(ids) or [tokenizer.convert_tokens_to_ids(bos) if bos else eos_token_id]  # type: ignore[arg-type]


def encode_pair(encoded: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of both, with the border where it is in the whole text. Spaces at the context's end begin the continuation,
    since a token carries the space in front of it; an empty context is one token, as in `encode`."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        prefix, whole = encoded(""), encoded(continuation)
        return prefix, whole[1:] if whole[:1] == prefix else whole
    prefix, whole = encoded(kept), encoded(kept + continuation)
    return whole[: len(prefix)], whole[len(prefix) :]


def fit(prompts: Sequence[list[int]], rooms: Sequence[int]) -> list[list[int]]:
    """The last `rooms[i]` ids of prompt i: in few-shot prompts the question stands at the end. One warning says how
    many were cut, and by how much."""
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
