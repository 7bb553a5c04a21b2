"""The variants of dKV-Cache (arXiv 2505.15781): a token's keys and values are kept from one step after it was decoded.

Until then a token is recomputed in every step, and so is every mask. Where a family predicts a token from the row in
front of it, a row has two tokens, and each of them keeps it open. docs/policies.md lists what the authors' code
(horseee/dKV-Cache, commit 49a76fcc) does otherwise.
"""

from dataclasses import dataclass
from typing import ClassVar

from tiered.core.checks import check_integer
from tiered.policies.base import OUTSIDE_LAUNCHES, Policy, PolicyState, StepKind
from tiered.policies.recipe import Recipe, RecipeState
from tiered.policies.schedule import check_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class DKVPrefill(Policy):
    """The prompt is kept, all behind it recomputed in every step.

    Attributes:
        prompt_interval: forwards of a sequence from one refresh of the prompt to the next; None, as in the paper: only
            the first.
    """

    name: ClassVar[str] = "dkv_prefill"
    prompt_interval: int | None = None

    def __post_init__(self) -> None:
        check_interval("prompt_interval", self.prompt_interval)

    def start(self) -> PolicyState:
        return RecipeState(Recipe(rows="answer", prompt_interval=self.prompt_interval, response_interval=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delayed(Policy):
    """Shared by the variants that keep decoded tokens.

    Attributes:
        delay: forwards after its commit in which a token is still recomputed; 0 keeps what it was as a mask.
        refresh_interval: N, forwards of a sequence from one refresh to the next; None: only the first.
    """

    delay: int = 1
    refresh_interval: int | None = 8

    def __post_init__(self) -> None:
        check_integer("delay", self.delay, least=0)
        check_interval("refresh_interval", self.refresh_interval)

    def launches_outside(self, kind: StepKind) -> int:
        # Which rows are recomputed, and where they stand among those that are proposed.
        return OUTSIDE_LAUNCHES + (0 if kind is StepKind.REFRESH else 75)


@dataclass(frozen=True, slots=True, kw_only=True)
class DKVDecode(_Delayed):
    """Prompt and decoded tokens are kept, and refreshed at the interval."""

    name: ClassVar[str] = "dkv_decode"

    def start(self) -> PolicyState:
        return RecipeState(
            Recipe(
                rows="undecided", delay=self.delay,
                prompt_interval=self.refresh_interval, response_interval=self.refresh_interval,
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DKVPD(_Delayed):
    """As `dkv_decode`, but the interval is the decoded tokens' alone.

    Attributes:
        prompt_interval: as that of `dkv_prefill`.
    """

    name: ClassVar[str] = "dkv_pd"
    prompt_interval: int | None = None

    def __post_init__(self) -> None:
        _Delayed.__post_init__(self)
        check_interval("prompt_interval", self.prompt_interval)

    def start(self) -> PolicyState:
        return RecipeState(
            Recipe(
                rows="undecided", delay=self.delay,
                prompt_interval=self.prompt_interval, response_interval=self.refresh_interval,
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DKVGreedy(Policy):
    """A step recomputes the tokens that it decodes, those that the step before has decoded, and a window around them:
    a number of rows that does not grow with the context.

    What a step decodes must be known before it: the policy goes with `remasking="random"`.

    Attributes:
        window: rows around each token that was just decoded, half of them on either side.
        refresh_interval: N, forwards of a sequence from one refresh of all rows to the next; None: only the first.
    """

    name: ClassVar[str] = "dkv_greedy"
    window: int = 4
    refresh_interval: int | None = 2

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=0)
        check_interval("refresh_interval", self.refresh_interval)

    def needs_order(self) -> bool:
        return True

    def start(self) -> PolicyState:
        return RecipeState(
            Recipe(
                rows="upcoming", window=self.window,
                prompt_interval=self.refresh_interval, response_interval=self.refresh_interval,
            )
        )  # fmt: skip
