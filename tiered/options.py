"""Options of `generate`: one dataclass, checked as a whole before any work starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

from tiered.core.aliases import resolve_aliases
from tiered.core.checks import (
    check_count,
    check_integer,
    check_multiple,
    check_number,
    check_switch,
    check_temperature,
    plain_number,
    plain_real,
    unknown_name,
)
from tiered.decoding.rules.base import CommitRule
from tiered.decoding.rules.registry import COMMIT_OPTIONS, COMMIT_RULES, fitting_rules, make_commit_rule
from tiered.decoding.rules.timestep import MOST_STEPS
from tiered.decoding.sampling_options import CONFIDENCES, Confidence, Sampling
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH
from tiered.models.shape import ModelShape
from tiered.planning.checks import check_block

Remasking = Literal["low_confidence", "random"]
Edges = Literal["sequence", "prompt"]
RANDOM_STEPS = 48  # of a canvas of random tokens, transformers' default for DiffusionGemma
T = TypeVar("T")


def _with_rule_options(cls: type[T]) -> type[T]:
    cls.__annotations__ = cls.__annotations__ | {name: kind | None for name, kind in COMMIT_OPTIONS.items()}
    for name in COMMIT_OPTIONS:
        setattr(cls, name, None)
    return cls


@dataclass(frozen=True, kw_only=True)
@_with_rule_options
class GenerationOptions:
    """Options of `generate`. The options of commit rules (`tiered.decoding.rules`) are fields too; None for the rule's
    default.

    Attributes:
        max_new_tokens: tokens of the answer; a multiple of `block_length`.
        block_length: tokens denoised together. None for 32, but at most the answer, and under `timestep` and `origin`
            the whole answer. Block-causal models (SDAR, Nemotron-Labs) need the length they were trained with, and
            round `max_new_tokens` up to whole blocks (docs/models.md).
        block_edges: start of the blocks of a block-causal model: the first token of the "sequence", or the end of the
            "prompt" if its context is causal (Nemotron-Labs).
        steps: forwards over all blocks, by which the rules `static`, `timestep` and `origin` divide their commits; a
            multiple of the number of blocks. None for one a token. For a block-causal model it is another name of
            `block_steps`.
        block_steps: forwards of one block, in place of `steps` over all of them.
        minimal_topk: least tokens a step: a block has at most `max_new_tokens // minimal_topk` steps (LLaDA2.0); None
            for no bound.
        commit: commit rule, by name or as a `CommitRule`. None for the simplest rule for the model with all given rule
            options. Without such options it is `static`, `adaptive` for uniform noise, and `quota` for block-causal
            models.
        confidence: measure that ranks candidates: the "probability" of the proposed token, the "margin" between the two
            most likely tokens, or the negative "entropy". Rules with a threshold need "probability". `timestep`
            measures the distribution that it draws from, other rules the model's own.
        remasking: order of candidates under `static`: by confidence ("low_confidence"), or "random".
        temperature: temperature of Gumbel sampling; 0 for argmax.
        top_p: probability in (0, 1]; tokens are drawn from the most likely ones that together first exceed it. It
            applies above temperature 0 and under `timestep`.
        top_k: number of most likely tokens to draw from, at least 1. It applies as `top_p`.
        correction_steps: most steps of self-correction a block, for uniform noise (arXiv 2503.04482). When the answer
            is done, all of it is open again and denoised by `adaptive`, under the same policy.
        min_new_tokens: number of first tokens of an answer that cannot be its end.
        trailing_noise: columns of noise behind the answer, which the answer sees and which are never denoised. GIDD's
            official sampler fills the model's whole context with them.
        cfg_scale: scale of classifier-free guidance; 0 for none. Above 0, every forward computes two canvases.
        seed: seed of the call; sequence i of a batch uses seed + i. None for one drawn from torch's default stream.
        stop_tokens: ids that end an answer beside the end-of-sequence token; separated by commas in text.
        stop_at_eos: whether a sequence ends when an end-of-sequence token and all tokens before it are fixed.
        eos_early_stop: whether a sequence ends at an end-of-sequence token within a block; False to finish the block
            first. None for the official sampler's way in a block-causal family, and True elsewhere.
        output_history: whether the canvas is kept after every forward that changed it. The copies are on the host and
            count against no budget.

    Raises:
        TypeError, ValueError: an option of the wrong type, out of range, or in conflict with another one.
    """

    max_new_tokens: int = 128
    block_length: int | None = None
    block_edges: Edges = "sequence"
    steps: int | None = None
    block_steps: int | None = None
    minimal_topk: int | None = None
    commit: str | CommitRule | None = None
    confidence: Confidence = "probability"
    remasking: Remasking = "low_confidence"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    correction_steps: int = 0
    min_new_tokens: int = 0
    trailing_noise: int = 0
    cfg_scale: float = 0.0
    seed: int | None = None
    stop_tokens: Sequence[int] | str | None = None
    stop_at_eos: bool = True
    eos_early_stop: bool | None = None
    output_history: bool = False

    if TYPE_CHECKING:  # type checkers do not see the options of rules

        def __init__(self, **options: Any) -> None: ...

    def __post_init__(self) -> None:
        for field in fields(self):
            plain = plain_real if field.name in REAL_OPTIONS else plain_number
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_integer("max_new_tokens", self.max_new_tokens, least=1)
        check_count("block_length", self.block_length)
        rule = self.rule
        most = MOST_STEPS if rule.by_time or rule.rewrites else None  # of others a block has no more than tokens
        if self.steps is not None:
            check_integer("steps", self.steps, least=1, most=most)
        if self.block_steps is not None:
            check_integer("block_steps", self.block_steps, least=1, most=most)
            if self.steps is not None:
                raise ValueError(
                    f"steps = {self.steps} counts the forwards of all blocks, block_steps = {self.block_steps} those "
                    "of one block; give one of them"
                )
        check_count("minimal_topk", self.minimal_topk)
        if self.eos_early_stop is not None:
            check_switch("eos_early_stop", self.eos_early_stop)
        for name in ("correction_steps", "min_new_tokens", "trailing_noise"):
            check_integer(name, getattr(self, name), least=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens = {self.min_new_tokens} is more than max_new_tokens = {self.max_new_tokens}"
            )
        self.sampling()  # checks its own options
        check_number("cfg_scale", self.cfg_scale, least=0.0)
        if self.seed is not None:
            check_integer("seed", self.seed, least=0, most=2**62)
        object.__setattr__(self, "stop_tokens", _ids("stop_tokens", self.stop_tokens))
        for name in ("stop_at_eos", "output_history"):
            check_switch(name, getattr(self, name))
        for name, allowed in (("remasking", get_args(Remasking)), ("block_edges", get_args(Edges))):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        if self.confidence not in rule.confidences:
            allowed = " or ".join(repr(kind) for kind in CONFIDENCES if kind in rule.confidences)
            others = [
                repr(name)
                for name in fitting_rules("mask", rewriting=False)
                if self.confidence in COMMIT_RULES[name].confidences
            ]
            raise ValueError(
                f"confidence = {self.confidence!r}, but the rule {rule.name!r} allows {allowed}; "
                f"it is allowed with {' and '.join(others)}"
            )
        if self.remasking == "random" and rule.name != "static":
            raise ValueError(f"remasking = 'random' needs the rule 'static', not {rule.name!r}")

    @property
    def block(self) -> int:
        if self.block_length is not None:
            return self.block_length
        return self.max_new_tokens if self.rule.by_time else min(DEFAULT_BLOCK_LENGTH, self.max_new_tokens)

    @property
    def blocks(self) -> int:
        """Number of blocks of the answer. If blocks count from the prompt's first token, there may be one more."""
        return -(-self.max_new_tokens // self.block)

    @property
    def steps_per_block(self) -> int:
        """Number of forwards by which a rule divides one block's commits; under `static` at most the block's tokens."""
        steps = self.block_steps or (self.max_new_tokens if self.steps is None else self.steps) // self.blocks
        if self.minimal_topk is not None:
            steps = max(1, min(steps, self.max_new_tokens // self.minimal_topk))
        return steps if self.rule.by_time or self.rule.rewrites else min(self.block, steps)

    @property
    def columns(self) -> int:
        return self.max_new_tokens + self.trailing_noise

    def ends(self, *of_model: int) -> tuple[int, ...]:
        """Ids that end an answer, of the model and of the call."""
        return tuple(dict.fromkeys((*of_model, *map(int, self.stop_tokens or ()))))

    @property
    def draws(self) -> bool:
        return self.temperature > 0 or self.remasking == "random" or self.rule.draws

    @cached_property
    def rule(self) -> CommitRule:
        given = {name: value for name in COMMIT_OPTIONS if (value := getattr(self, name)) is not None}
        if (temperature := given.get("confidence_temperature")) is not None:
            check_temperature("confidence_temperature", temperature)
            if temperature == 0:  # scripts of Dream pass alg_temp = 0 whatever the rule
                del given["confidence_temperature"]
        return make_commit_rule(self.commit, **given)

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            confidence=self.confidence,
            tempered_confidence=self.rule.tempered_confidence,
            top_k_first=self.rule.top_k_first,
            random_ranks=self.remasking == "random",
        )

    @classmethod
    def of(
        cls,
        config: "GenerationOptions | Mapping[str, Any] | None",
        options: Mapping[str, Any],
        *,
        mask_token_id: int,
        shape: ModelShape,
        name: str = "model",
    ) -> "GenerationOptions":
        """`config` (options, or a mapping of them), overridden by `options`, for a model of `shape` called `name`.
        Names of official scripts are allowed.

        Raises:
            TypeError, ValueError: as the class; also an unknown name (with the nearest valid one), two values under two
                names of one option, and another `mask_id` than the model's. Also a rule for other noise, a length that
                is no multiple of the block length, and an option that block-causal models do not have.
        """
        if config is not None and not isinstance(config, cls | Mapping):
            raise TypeError(f"generation_config is GenerationOptions or a mapping, not {type(config).__name__}")
        base = config if isinstance(config, cls) else cls()
        # Both mappings are merged before the checks: max_new_tokens may be in one and its block_length in the other.
        given: dict[str, Any] = {}
        for mapping in (config if isinstance(config, Mapping) else {}, options):
            given |= resolve_aliases(
                mapping, OPTION_NAMES, mask_token_id=mask_token_id, block_causal=shape.block_causal
            )
        if shape.block_causal:
            return replace(base, **_in_blocks(base, given, shape, name))._for_noise(shape.noise)
        chosen = replace(base, **given)
        if chosen.block_edges != "sequence":
            raise ValueError(
                f"block_edges = {chosen.block_edges!r}, but blocks of {name!r} always begin behind the prompt; leave "
                "it out"
            )
        check_multiple("max_new_tokens", chosen.max_new_tokens, chosen.block, f"block_length = {chosen.block}")
        if chosen.steps is not None:
            check_multiple("steps", chosen.steps, chosen.blocks, f"the {chosen.blocks} blocks")
        return chosen._for_noise(shape.noise)

    def _for_noise(self, noise: str) -> "GenerationOptions":
        rule = self.rule
        if noise in rule.noise:
            return self
        fitting = fitting_rules(noise)
        if self.commit is None and all(getattr(self, name) is None for name in COMMIT_OPTIONS):
            return replace(self, commit=fitting[0])
        raise ValueError(
            f"the commit rule {rule.name!r} is for {' or '.join(sorted(rule.noise))} noise, but the model's is {noise} "
            f"noise; allowed: {', '.join(fitting)}"
        )


OPTION_NAMES: tuple[str, ...] = tuple(field.name for field in fields(GenerationOptions))
REAL_OPTIONS = frozenset(
    name for name, hint in get_type_hints(GenerationOptions).items() if float in (hint, *get_args(hint))
)


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        found = tuple(
            plain_number(int(each) if isinstance(each, str) else each)
            for each in (value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value)
        )
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} = {value!r}; token ids are allowed, separated by commas in text") from error
    for each in found:
        check_integer(name, each, least=0)
    return found


def _in_blocks(base: GenerationOptions, given: dict[str, Any], shape: ModelShape, name: str) -> dict[str, Any]:
    """`given` on top of `base`, completed with the defaults of a block-causal model."""
    steps, rule_options = given.get("steps", base.steps), {*COMMIT_OPTIONS} & {*given}
    if steps is not None:
        raise ValueError(
            f"steps = {steps} counts the forwards of a whole answer; pass {name!r} block_steps, those of one block"
        )
    given["block_length"] = block = check_block(shape, given.get("block_length", base.block_length), name=name)
    # The default is a step a token of the block, even if the answer is no whole number of blocks.
    if given.get("block_steps", base.block_steps) is None:
        given["block_steps"] = RANDOM_STEPS if shape.noise == "random" else block
    by_chance = given.get("remasking", base.remasking) == "random"
    if shape.noise == "random":  # no token of a prompt is on a canvas
        given["block_edges"] = "prompt"
        if "confidence_threshold" in given:  # transformers' name
            given["stop_entropy"] = given.pop("confidence_threshold")
        given["commit"] = given.get("commit", base.commit) or fitting_rules(shape.noise)[0]
    elif given.get("commit", base.commit) is None and rule_options <= {"confidence_threshold"} and not by_chance:
        given["commit"] = "quota"
    if (edges := given.get("block_edges", base.block_edges)) == "prompt" and shape.sight != "context":
        raise ValueError(f"block_edges = {edges!r}, but blocks of {name!r} count from a sequence's first token")
    if trailing := given.get("trailing_noise", base.trailing_noise):
        raise ValueError(f"trailing_noise = {trailing}, but rows of {name!r} see nothing behind their block; pass 0")
    return given
