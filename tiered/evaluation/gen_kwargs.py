"""What one request's `gen_kwargs` say, on top of what the model was made with."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiered.core.aliases import ALIASES, ALWAYS_NAMES, GIDD_ALIASES, MASK_NAMES, resolve_aliases
from tiered.core.checks import check_integer, unknown_name
from tiered.options import OPTION_NAMES, GenerationOptions
from tiered.planning.call_sizes import DEFAULT_BLOCK_LENGTH
from tiered.runtime import Runtime

logger = logging.getLogger(__name__)

# Names of the answer's length, those that come first go first, as in the harness's own models.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "gen_length")
# Options of autoregressive generation that tasks set, with the values at which they change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "use_cache": (True, False),
}
GENERATION_NAMES = (*OPTION_NAMES, *ALIASES, *GIDD_ALIASES, *MASK_NAMES, *ALWAYS_NAMES)
_REQUEST_NAMES = (*dict.fromkeys((*LENGTH_NAMES, "until", "do_sample", *GENERATION_NAMES, *NEUTRAL)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How one request is answered.

    Attributes:
        max_gen_toks: tokens of its answer, at most.
        until: stop strings.
        options: of `Runtime.generate`, where `max_new_tokens` is `max_gen_toks` rounded up to whole blocks.
        key: equal for requests that may share a call.
    """

    max_gen_toks: int
    until: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Of the options alone: stop strings and the cut are each answer's own."""
        return json.dumps(self.options, sort_keys=True, default=repr)

    @property
    def columns(self) -> int:
        """Canvas columns behind the prompt."""
        return self.options["max_new_tokens"] + self.options.get("trailing_noise", 0)


def read_gen_kwargs(
    gen_kwargs: Mapping[str, Any], defaults: Mapping[str, Any], runtime: Runtime, *, max_gen_toks: int
) -> RequestSettings:
    """The settings of a request.

    Args:
        gen_kwargs: the request's own.
        defaults: options of `generate` under their own names, without a length; `gen_kwargs` go on top.
        runtime: whose model they are for.
        max_gen_toks: where the request names no length.

    Raises:
        TypeError, ValueError: an unknown name (with the nearest valid one), or a bad value, named.
    """
    given = dict(gen_kwargs)
    for name in given:
        if name not in _REQUEST_NAMES:
            raise unknown_name("gen_kwargs option", name, _REQUEST_NAMES)
    for name, allowed in NEUTRAL.items():
        if given.pop(name, None) not in (None, *allowed):
            raise ValueError(
                f"gen_kwargs: {name} = {gen_kwargs[name]!r} means nothing to a diffusion model; "
                f"{' or '.join(map(repr, allowed))} is allowed"
            )
    until = given.pop("until", None) or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(stop, str) for stop in until):
        raise TypeError(f"gen_kwargs: until is a string or strings, not {gen_kwargs['until']!r}")
    lengths = [value for name in LENGTH_NAMES if (value := given.pop(name, None)) is not None]
    own = resolve_aliases(_sampled(given, defaults), OPTION_NAMES, mask_token_id=runtime.model.mask_token_id)
    options = {**defaults, **own}
    # Under a name of GIDD's, which only its other options tell from transformers' max_length.
    lengths.append(options.pop("max_new_tokens", max_gen_toks))
    check_integer("max_gen_toks", lengths[0], least=1)
    options["max_new_tokens"] = canvas_length(lengths[0], options, runtime)
    return RequestSettings(max_gen_toks=lengths[0], until=until, options=options)


def _sampled(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` in the words of `generate`: transformers' `do_sample` says whether the temperature counts."""
    do_sample = given.pop("do_sample", None)
    if given.get("top_k") in (0, -1):  # what vLLM and transformers call "off"
        given["top_k"] = None
    temperature = given.get("temperature", defaults.get("temperature"))
    if do_sample is False:
        if temperature:
            logger.warning(
                "do_sample = False overrules temperature = %s: answers are greedy; "
                "--gen_kwargs do_sample=True,temperature=%s would sample",
                temperature, temperature,
            )  # fmt: skip
        # Those of the model's own arguments stay: some commit rules rank candidates by what they leave.
        return {name: value for name, value in given.items() if name not in ("top_p", "top_k")} | {"temperature": 0.0}
    if do_sample and temperature is None:
        given["temperature"] = 1.0  # transformers' default
    return given


def canvas_length(tokens: int, options: Mapping[str, Any], runtime: Runtime) -> int:
    """`tokens` rounded up to whole blocks of a call with `options`, which name no length."""
    block = options.get("block_length")
    if block is None:
        # How many steps there are is no matter here, and has to go with the number of blocks, which is not known yet.
        probe = {name: value for name, value in options.items() if name != "steps"}
        rule = GenerationOptions.of(
            {"max_new_tokens": DEFAULT_BLOCK_LENGTH},
            probe,
            mask_token_id=runtime.model.mask_token_id,
            noise=runtime.model.shape.noise,
        ).rule()
        block = tokens if rule.by_time else min(DEFAULT_BLOCK_LENGTH, tokens)
    check_integer("block_length", block, least=1)
    return -(-tokens // block) * block
