"""Options of `generate`: one dataclass, checked as a whole before any work starts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tiered.aliases import resolve_aliases
from tiered.checks import check_integer, check_number, check_switch
from tiered.commit.base import CommitRule
from tiered.commit.registry import COMMIT_RULES, make_commit_rule
from tiered.names import unknown_name

# Options of `generate` that belong to commit rules; each rule takes some of them.
COMMIT_OPTIONS = tuple(dict.fromkeys(field.name for rule in COMMIT_RULES.values() for field in fields(rule)))
REMASKING = ("low_confidence", "random")
DEFAULT_BLOCK_LENGTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to denoise.

    Attributes:
        max_new_tokens: tokens of the answer; a multiple of `block_length`.
        block_length: tokens denoised together; None: 32, or the whole answer where it is shorter.
        steps: forwards over all blocks that the `static` rule spreads its commits over; a multiple of the number of
            blocks; None: one token a forward.
        commit: commit rule by name, or a `CommitRule`; None: `threshold`, `factor` or `drift_aware` where an option of
            that rule alone is given, else `static`.
        confidence_threshold: of the rules `threshold` and, where it is 0.9 if not given, `drift_aware`; in [0, 1].
        factor: of the `factor` rule, above 0.
        early_threshold, drift_window, drift_slope, drift_ceiling: of the `drift_aware` rule, which has defaults.
        remasking: what ranks candidates under `static`: their confidence, or chance.
        temperature: of Gumbel sampling; 0: argmax.
        cfg_scale: classifier-free guidance; 0: none, above: every forward serves two canvases.
        seed: of the call; sequence i of a batch uses seed + i. None: drawn from torch's default stream.
        stop_at_eos: a sequence is done once an end-of-sequence token and everything in front of it is fixed.
        output_history: keep the canvas after every forward that changed it, on the host; the copies are the caller's
            and count against no budget.

    Raises:
        TypeError, ValueError: an option of the wrong type, out of range, or at odds with another one.
    """

    max_new_tokens: int = 128
    block_length: int | None = None
    steps: int | None = None
    commit: str | CommitRule | None = None
    confidence_threshold: float | None = None
    factor: float | None = None
    early_threshold: float | None = None
    drift_window: int | None = None
    drift_slope: float | None = None
    drift_ceiling: float | None = None
    remasking: str = "low_confidence"
    temperature: float = 0.0
    cfg_scale: float = 0.0
    seed: int | None = None
    stop_at_eos: bool = True
    output_history: bool = False

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, least=1)
        if self.block_length is not None:
            check_integer("block_length", self.block_length, least=1)
        if self.max_new_tokens % self.block:
            raise ValueError(
                f"max_new_tokens = {self.max_new_tokens} is not a multiple of block_length = {self.block}; "
                f"{_nearest_multiples(self.max_new_tokens, self.block)} would be"
            )
        if self.steps is not None:
            check_integer("steps", self.steps, least=1)
            if self.steps % self.blocks:
                raise ValueError(
                    f"steps = {self.steps} is not a multiple of the {self.blocks} blocks; "
                    f"{_nearest_multiples(self.steps, self.blocks)} would be"
                )
        check_number("temperature", self.temperature, least=0.0)
        check_number("cfg_scale", self.cfg_scale, least=0.0)
        if self.seed is not None:
            check_integer("seed", self.seed, least=0, most=2**62)
        for name in ("stop_at_eos", "output_history"):
            check_switch(name, getattr(self, name))
        if self.remasking not in REMASKING:
            raise unknown_name("remasking", self.remasking, REMASKING)
        rule = self.rule()
        if self.remasking == "random" and rule.name != "static":
            raise ValueError(
                f"remasking = 'random' ranks candidates by chance: it goes with the rule 'static', not {rule.name!r}"
            )

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return min(DEFAULT_BLOCK_LENGTH, self.max_new_tokens) if self.block_length is None else self.block_length

    @property
    def blocks(self) -> int:
        """Blocks of the answer."""
        return self.max_new_tokens // self.block

    @property
    def steps_per_block(self) -> int:
        """Forwards that the `static` rule spreads one block's commits over; more than its tokens are never needed."""
        return min(self.block, (self.max_new_tokens if self.steps is None else self.steps) // self.blocks)

    @property
    def draws(self) -> bool:
        """Whether the call draws random numbers."""
        return self.temperature > 0 or self.remasking == "random"

    def rule(self) -> CommitRule:
        """The commit rule that the options name, with its own options filled in."""
        given = {name: value for name in COMMIT_OPTIONS if (value := getattr(self, name)) is not None}
        return make_commit_rule(self.commit, **given)

    @classmethod
    def of(
        cls, config: "GenerationOptions | Mapping[str, Any] | None", options: Mapping[str, Any], *, mask_token_id: int
    ) -> "GenerationOptions":
        """`config` (options, or a mapping with their names) with `options` on top; aliases of other scripts are known.

        Raises:
            TypeError, ValueError: as the class; also an unknown name (with the nearest valid one), an option given
                under two names with two values, or a `mask_id` that is not the model's.
        """
        if config is not None and not isinstance(config, cls | Mapping):
            raise TypeError(f"generation_config is GenerationOptions or a mapping, not {type(config).__name__}")
        base = config if isinstance(config, cls) else cls()
        # Both mappings before the checks: one may hold what the other needs, as block_length for max_new_tokens.
        given: dict[str, Any] = {}
        for mapping in (config if isinstance(config, Mapping) else {}, options):
            given |= resolve_aliases(mapping, OPTION_NAMES, mask_token_id=mask_token_id)
        return replace(base, **given)


OPTION_NAMES: tuple[str, ...] = tuple(field.name for field in fields(GenerationOptions))
COMMIT_NAMES: tuple[str, ...] = tuple(COMMIT_RULES)


def _nearest_multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)
