"""The `gen_kwargs` of a request as options of `generate`, and the text of its answer."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from transformers import PreTrainedTokenizerBase

from tiered.core.aliases import ALIASES, ALWAYS_NAMES, GIDD_ALIASES, MASK_NAMES, resolve_aliases
from tiered.models.base import DiffusionModel
from tiered.options import OPTION_NAMES, GenerationOptions

# Options of autoregressive generation, with the value that changes nothing.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}
_OWN_NAMES = (*OPTION_NAMES, "max_gen_toks", "max_tokens", "max_completion_tokens")
_REQUEST_NAMES = (*_OWN_NAMES, "until", "do_sample", *NEUTRAL)
MODEL_NAMES = (*_OWN_NAMES, *ALIASES, *GIDD_ALIASES, *MASK_NAMES, *ALWAYS_NAMES)


def request_options(
    gen_kwargs: Mapping[str, Any], defaults: Mapping[str, Any], model: DiffusionModel
) -> tuple[dict[str, Any], int, list[str]]:
    """Options of `Runtime.generate`, `max_gen_toks` and the stop strings of a request. `max_new_tokens` is
    `max_gen_toks` rounded up to whole blocks. `defaults`: options under the library's names, and `max_gen_toks`.

    Raises:
        TypeError, ValueError: an unknown name (with the nearest valid one), or a bad value.
    """
    mask, in_blocks = model.mask_token_id, model.shape.block_causal
    given = resolve_aliases(gen_kwargs, _REQUEST_NAMES, mask_token_id=mask, block_causal=in_blocks)
    for name, allowed in NEUTRAL.items():
        if (value := given.pop(name, allowed)) != allowed:
            raise ValueError(f"gen_kwargs: {name} = {value!r} is not for diffusion models; {allowed} is allowed")
    until = handle_stop_sequences(given.pop("until", None), eos=None)
    if given.get("top_k") in (0, -1):  # "off" in vLLM and transformers
        given["top_k"] = None
    # Greedy decoding uses top_p and top_k of the defaults only, because some commit rules rank candidates by them.
    unused = ("top_p", "top_k") if given.get("do_sample") is False else ()
    own = {name: value for name, value in defaults.items() if name != "max_gen_toks"}
    own |= {name: value for name, value in given.items() if name not in unused}
    if own.get("do_sample"):
        own.setdefault("temperature", 1.0)  # transformers' default
    options: dict[str, Any] = {**normalize_gen_kwargs(own, defaults["max_gen_toks"])}
    tokens, _, _ = (options.pop(name) for name in ("max_gen_toks", "until", "do_sample"))
    block = GenerationOptions(**options, max_new_tokens=tokens).block
    return {**options, "max_new_tokens": -(-tokens // block) * block}, tokens, until


def answer_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Iterable[int], until: Sequence[str]
) -> str:
    """The text of an answer's `ids` before the first of the model's `ends` or stop strings."""
    # Decoding drops special tokens, so a stop string such as "<|eot_id|>" never appears in the text.
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {*ends, *(special[stop] for stop in until if stop in special)}
    kept = list(takewhile(lambda token: token not in ends, ids))
    text = str(tokenizer.decode(kept, skip_special_tokens=True))
    return text[: min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=len(text))]
