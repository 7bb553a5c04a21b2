"""A request's `gen_kwargs` in the options of `generate`, and the price of all answers."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tiered.core.aliases import ALIASES, ALWAYS_NAMES, GIDD_ALIASES, MASK_NAMES, resolve_aliases
from tiered.core.checks import check_integer, unknown_name
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH
from tiered.options import OPTION_NAMES, GenerationOptions
from tiered.output import GenerationOutput
from tiered.prepare import check_call
from tiered.runtime import Runtime

logger = logging.getLogger(__name__)

DEFAULT_MAX_GEN_TOKS = 256  # as in the harness's own models
# Names of the answer's length. An earlier name wins, as in the harness's own models.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "gen_length")
# Options of autoregressive generation that tasks set, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "use_cache": (True, False),
}
MODEL_NAMES = (*LENGTH_NAMES, *OPTION_NAMES, *ALIASES, *GIDD_ALIASES, *MASK_NAMES, *ALWAYS_NAMES)
_REQUEST_NAMES = dict.fromkeys((*MODEL_NAMES, "until", "do_sample", *NEUTRAL))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """How one request is answered.

    Attributes:
        max_gen_toks: most tokens of its answer.
        until: stop strings.
        options: of `Runtime.generate`; `max_new_tokens` is `max_gen_toks` rounded up to whole blocks.
    """

    max_gen_toks: int
    until: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def columns(self) -> int:
        return self.options["max_new_tokens"] + self.options.get("trailing_noise", 0)


@dataclass(slots=True)
class CallTotals:
    """Sums over all answers: the price of a score.

    Attributes:
        sequences: number of answers.
        forwards: steps of all answers. A shared forward counts once for each answer in it.
        tokens: tokens of all answers before they are cut, without end-of-sequence and padding.
        seconds: time of `generate_until`.
        policies: answers by the policy that they ran under.
        peak_bytes: largest peak of each tier, from the ledger.
    """

    sequences: int = 0
    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    policies: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, out: GenerationOutput) -> None:
        self.sequences += 1
        self.forwards += sum(out.forwards)
        self.tokens += out.timings.tokens
        policy = str(out.choice.policy)
        self.policies[policy] = self.policies.get(policy, 0) + 1
        for tier, report in out.memory.tiers.items():
            self.peak_bytes[str(tier)] = max(self.peak_bytes.get(str(tier), 0), report.peak)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON, with ratios once there is an answer."""
        figures = asdict(self)
        if self.sequences:
            figures["forwards_per_sequence"] = self.forwards / self.sequences
            figures["tokens_per_forward"] = self.tokens / self.forwards
            figures["tokens_per_second"] = self.tokens / self.seconds
        return figures


class Defaults:
    """Settings of requests that name none.

    Attributes:
        options: options of `generate` under their own names, without a length.
        max_gen_toks: tokens of an answer.
    """

    def __init__(self, runtime: Runtime, generation: Mapping[str, Any]) -> None:
        """`generation`: options of `generate`, and a length, under any of their names.

        Raises:
            TypeError, ValueError: a bad option, options at odds, an option that the model or the policy does not
                allow, or two lengths that differ.
        """
        self._model = model = runtime.model
        lengths = {name: value for name in LENGTH_NAMES if (value := generation.get(name)) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the answer's length is given as {lengths}; give one of them")
        self.options = self._own({name: value for name, value in generation.items() if name not in LENGTH_NAMES})
        length = next(iter(lengths.values()), self.options.pop("max_new_tokens", None))  # GIDD's max_length
        self.max_gen_toks = DEFAULT_MAX_GEN_TOKS if length is None else length
        check_call(self._checked(self.settings({}).options), model, runtime.policy, name=runtime.name)

    def settings(self, gen_kwargs: Mapping[str, Any]) -> RequestSettings:
        """The settings of a request with these `gen_kwargs`.

        Raises:
            TypeError, ValueError: an unknown name (with the nearest valid one), or a bad value.
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
        lengths.append(options.pop("max_new_tokens", self.max_gen_toks))  # GIDD's max_length
        check_integer("max_gen_toks", lengths[0], least=1)
        options["max_new_tokens"] = self._canvas_length(lengths[0], options)
        return RequestSettings(max_gen_toks=lengths[0], until=until, options=options)

    def all_settings(self, requests: Sequence[Mapping[str, Any]]) -> list[RequestSettings]:
        """As `settings`, for many requests. Equal ones are read once, and warn once.

        Raises:
            TypeError, ValueError: as `settings`; or an answer that leaves no room for a prompt.
        """
        read: dict[str, RequestSettings] = {}
        keys, most = [json.dumps(gen_kwargs, default=repr) for gen_kwargs in requests], self._model.shape.max_context
        for key, gen_kwargs in zip(keys, requests, strict=True):
            own = read[key] = read.get(key) or self.settings(gen_kwargs)
            if own.columns >= most:
                raise ValueError(
                    f"max_gen_toks = {own.max_gen_toks} takes {own.columns} of the model's {most} positions and leaves "
                    "none for a prompt"
                )
        return [read[key] for key in keys]

    def _own(self, options: Mapping[str, Any]) -> dict[str, Any]:
        blocks = self._model.shape.block_causal
        return resolve_aliases(options, OPTION_NAMES, mask_token_id=self._model.mask_token_id, block_causal=blocks)

    def _checked(self, options: Mapping[str, Any]) -> GenerationOptions:
        model = self._model
        return GenerationOptions.of(None, options, mask_token_id=model.mask_token_id, shape=model.shape)

    def _sampled(self, given: dict[str, Any]) -> dict[str, Any]:
        """`given` as options of `generate`: transformers' `do_sample` says whether the temperature counts."""
        do_sample = given.pop("do_sample", None)
        if given.get("top_k") in (0, -1):  # "off" in vLLM and transformers
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
        # top_p and top_k of the model's own arguments stay: some commit rules rank candidates by them.
        return {name: value for name, value in given.items() if name not in ("top_p", "top_k")} | {"temperature": 0.0}

    def _canvas_length(self, tokens: int, options: Mapping[str, Any]) -> int:
        block = options.get("block_length")
        if block is None:
            # The number of steps has to go with the number of blocks, which is not known yet.
            probe = {name: value for name, value in options.items() if name != "steps"}
            rule = self._checked({**probe, "max_new_tokens": DEFAULT_BLOCK_LENGTH}).rule
            block = tokens if rule.by_time else min(DEFAULT_BLOCK_LENGTH, tokens)
        check_integer("block_length", block, least=1)
        return -(-tokens // block) * block
