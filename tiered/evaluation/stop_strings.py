"""Where an answer ends: at a token count, at a special token that is a stop string, at any other stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def cut_text(text: str, until: Sequence[str]) -> str:
    """`text` up to the first character of any stop string. Where two overlap, the one that begins first counts,
    whatever their order; "" stops nothing."""
    return text[: min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=len(text))]


def answer_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, most: int, eos_token_id: int, until: Sequence[str]
) -> str:
    """The answer in `ids` as the harness wants it.

    Args:
        tokenizer: decodes, without special tokens.
        ids: of the whole canvas behind the prompt.
        most: so many tokens count at most (`max_gen_toks`).
        eos_token_id: ends an answer.
        until: stop strings; they are no part of it, and neither is what follows.
    """
    # Decoding drops special tokens, so that a stop string such as "<|eot_id|>" would never be seen in text.
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {eos_token_id, *(special[stop] for stop in until if stop in special)}
    kept = list(ids[:most])
    end = next((at for at, token in enumerate(kept) if token in ends), len(kept))
    return cut_text(str(tokenizer.decode(kept[:end], skip_special_tokens=True)), until)
