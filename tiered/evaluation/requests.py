"""A request: its `gen_kwargs` as options of `generate`, the text and the price of its answer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lm_eval.utils import warning_once
from transformers import PreTrainedTokenizerBase

from tiered.core.aliases import ALIASES, ALWAYS_NAMES, GIDD_ALIASES, MASK_NAMES, resolve_aliases
from tiered.core.checks import check_integer, unknown_name
from tiered.options import OPTION_NAMES, GenerationOptions
from tiered.output import GenerationOutput
from tiered.prepare import check_call
from tiered.runtime import Runtime
from tiered.serving.answer_text import AnswerText

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
        self.options, self.max_gen_toks = {}, DEFAULT_MAX_GEN_TOKS
        self.options, self.max_gen_toks = self._resolved(generation)
        options = self.settings({}).options
        check_call(
            GenerationOptions.of(None, options, mask_token_id=model.mask_token_id, shape=model.shape),
            model, runtime.policy, name=runtime.name,
        )  # fmt: skip

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
        options, tokens = self._resolved(self._sampled(given))
        check_integer("max_gen_toks", tokens, least=1)
        block = GenerationOptions(**options, max_new_tokens=tokens).block
        options["max_new_tokens"] = -(-tokens // block) * block
        return RequestSettings(max_gen_toks=tokens, until=until, options=options)

    def _resolved(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The options, with `given` over the defaults, under their own names, and the answer's length."""
        lengths = [value for name in LENGTH_NAMES if (value := given.get(name)) is not None]
        own = resolve_aliases(
            {name: value for name, value in given.items() if name not in LENGTH_NAMES},
            OPTION_NAMES,
            mask_token_id=self._model.mask_token_id,
            block_causal=self._model.shape.block_causal,
        )
        lengths.append(own.pop("max_new_tokens", self.max_gen_toks))  # GIDD's max_length
        return {**self.options, **own}, lengths[0]

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
            warning_once(
                logger,
                "do_sample = False overrules temperature = %s: answers are greedy; "
                "--gen_kwargs do_sample=True,temperature=%s would sample",
                temperature,
                temperature,
            )
        # top_p and top_k of the model's own arguments stay: some commit rules rank candidates by them.
        return {name: value for name, value in given.items() if name not in ("top_p", "top_k")} | {"temperature": 0.0}


def answer_text(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, most: int, eos_token_id: int, until: Sequence[str]
) -> str:
    """The text of the answer in `ids`, the canvas behind the prompt.

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
