"""Uniform-Cache (Barry, "Block-Wise KV Caching for Uniform Diffusion Language Models", UT Austin 2026).

Made for uniform noise, where any token of the current block may change again until the block ends; what it recomputes
does not depend on the noise, so it serves masked models as well.
"""

from dataclasses import dataclass
from typing import ClassVar

from tiered.policies.base import Policy, PolicyState
from tiered.policies.recipe import Recipe, RecipeState
from tiered.policies.schedule import check_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCache(Policy):
    """A block begins with a refresh; a step recomputes the block's rows, and every few steps the next block's too,
    whose keys move most beside its own.

    The preset `uniform_prefix` recomputes everything behind the block in every step.

    Attributes:
        next_block_interval: r, steps of a block from one renewal of the next block to another; None: none.
        refresh_interval: forwards of a block from one refresh to the next; None: only the block's first.
    """

    name: ClassVar[str] = "uniform"
    next_block_interval: int | None = 4
    refresh_interval: int | None = None

    def __post_init__(self) -> None:
        check_interval("next_block_interval", self.next_block_interval)
        check_interval("refresh_interval", self.refresh_interval)

    def start(self) -> PolicyState:
        every = "block" if self.refresh_interval is None else self.refresh_interval
        return RecipeState(
            Recipe(
                rows="block", prompt_interval=every, response_interval=every, by_block=True,
                next_block_interval=self.next_block_interval,
            )
        )  # fmt: skip
