"""What a request's `gen_kwargs` say on top of what the model was made with, in the options of `generate`."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiered.call_checks import check_call
from tiered.core.aliases import ALIASES, ALWAYS_NAMES, GIDD_ALIASES, MASK_NAMES, resolve_aliases
from tiered.core.checks import check_integer, unknown_name
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH
from tiered.options import OPTION_NAMES, GenerationOptions
from tiered.runtime import Runtime

logger = logging.getLogger(__name__)

# Where neither the task nor the model's arguments name a length, as in the harness's own models.
DEFAULT_MAX_GEN_TOKS = 256
POLICY_PREFIX = "policy_"
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
_MODEL_NAMES = (*LENGTH_NAMES, *OPTION_NAMES, *ALIASES, *GIDD_ALIASES, *MASK_NAMES, *ALWAYS_NAMES)
_REQUEST_NAMES = dict.fromkeys((*_MODEL_NAMES, "until", "do_sample", *NEUTRAL))


def split_options(options: Mapping[str, Any], named: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the policy, without the prefix `policy_`, and options of `generate`.

    `named`: the model's arguments beside them, for the error's list.

    Raises:
        ValueError: an option that is neither (names the nearest).
    """
    policy, generation = {}, {}
    for name, value in options.items():
        if name.startswith(POLICY_PREFIX):
            policy[name.removeprefix(POLICY_PREFIX)] = value
        elif name in _MODEL_NAMES:
            generation[name] = value
        else:
            error = unknown_name("model argument", name, {*named, *_MODEL_NAMES})
            raise ValueError(f"{error}; an option of the policy is written {POLICY_PREFIX}<option>")
    return policy, generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How one request is answered.

    Attributes:
        max_gen_toks: tokens of its answer, at most.
        until: stop strings.
        options: of `Runtime.generate`, where `max_new_tokens` is `max_gen_toks` rounded up to whole blocks.
    """

    max_gen_toks: int
    until: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Equal for requests that may share a call: the options alone, since stop strings and the cut are each answer's
        own."""
        return json.dumps(self.options, sort_keys=True, default=repr)

    @property
    def columns(self) -> int:
        """Canvas columns behind the prompt."""
        return self.options["max_new_tokens"] + self.options.get("trailing_noise", 0)


class Defaults:
    """What requests to one model go on top of.

    Attributes:
        options: of `generate` under their own names, without a length.
        max_gen_toks: tokens of an answer.
    """

    def __init__(self, runtime: Runtime, generation: Mapping[str, Any]) -> None:
        """`generation`: options of `generate`, and a length, under any of their names.

        Raises:
            TypeError, ValueError: an option that is wrong, at odds with another, or not for this model or policy; two
                lengths that differ.
        """
        self._model = model = runtime.model
        lengths = {name: value for name in LENGTH_NAMES if (value := generation.get(name)) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the answer's length is given as {lengths}; give one of them")
        self.options = self._own({name: value for name, value in generation.items() if name not in LENGTH_NAMES})
        # GIDD's scripts call it max_length.
        length = next(iter(lengths.values()), self.options.pop("max_new_tokens", None))
        self.max_gen_toks = DEFAULT_MAX_GEN_TOKS if length is None else length
        check_call(self._checked(self.settings({}).options), model, runtime.policy, name=runtime.name)

    def settings(self, gen_kwargs: Mapping[str, Any]) -> RequestSettings:
        """How a request with these `gen_kwargs` is answered.

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
        options = {**self.options, **self._own(self._sampled(given))}
        # Under a name of GIDD's, which only its other options tell from transformers' max_length.
        lengths.append(options.pop("max_new_tokens", self.max_gen_toks))
        check_integer("max_gen_toks", lengths[0], least=1)
        options["max_new_tokens"] = self._canvas_length(lengths[0], options)
        return RequestSettings(max_gen_toks=lengths[0], until=until, options=options)

    def _own(self, options: Mapping[str, Any]) -> dict[str, Any]:
        blocks = self._model.shape.block_causal
        return resolve_aliases(options, OPTION_NAMES, mask_token_id=self._model.mask_token_id, block_causal=blocks)

    def _checked(self, options: Mapping[str, Any]) -> GenerationOptions:
        model = self._model
        return GenerationOptions.of(None, options, mask_token_id=model.mask_token_id, shape=model.shape)

    def _sampled(self, given: dict[str, Any]) -> dict[str, Any]:
        """`given` in the words of `generate`: transformers' `do_sample` says whether the temperature counts."""
        do_sample = given.pop("do_sample", None)
        if given.get("top_k") in (0, -1):  # what vLLM and transformers call "off"
            given["top_k"] = None
        temperature = given.get("temperature", self.options.get("temperature"))
        if do_sample and temperature is None:
            given["temperature"] = 1.0  # transformers' default
        if do_sample is not False:
            return given
        if temperature:
            logger.warning(
                "do_sample = False overrules temperature = %s: answers are greedy; "
                "--gen_kwargs do_sample=True,temperature=%s would sample",
                temperature, temperature,
            )  # fmt: skip
        # Those of the model's own arguments stay: some commit rules rank candidates by what they leave.
        return {name: value for name, value in given.items() if name not in ("top_p", "top_k")} | {"temperature": 0.0}

    def _canvas_length(self, tokens: int, options: Mapping[str, Any]) -> int:
        """`tokens` rounded up to whole blocks of a call with `options`, which name no length."""
        block = options.get("block_length")
        if block is None:
            # How many steps there are is no matter here, and has to go with the number of blocks, not known yet.
            probe = {name: value for name, value in options.items() if name != "steps"}
            rule = self._checked({**probe, "max_new_tokens": DEFAULT_BLOCK_LENGTH}).rule()
            block = tokens if rule.by_time else min(DEFAULT_BLOCK_LENGTH, tokens)
        check_integer("block_length", block, least=1)
        return -(-tokens // block) * block
