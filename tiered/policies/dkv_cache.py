"""The variants of dKV-Cache (arXiv 2505.15781): a token's keys and values are kept from one step after it was decoded.

Until then a token is recomputed in every step, and so is every mask. Where a family predicts a token from the row in
front of it, a row has two tokens, and `shift_caching` says which of them keeps it open. What the authors' code
(horseee/dKV-Cache, commit 49a76fcc) does otherwise is under `parity`; docs/policies.md lists it.
"""

from dataclasses import dataclass
from typing import ClassVar, get_args

from tiered.core.checks import check_integer, check_switch, unknown_name
from tiered.policies.areas import ShiftCaching
from tiered.policies.base import Policy, PolicyState
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
        shift_caching: on a family with shifted predictions, the token whose commit lets a row be kept: its own
            ("right"), the one that it predicts ("un": its own may still be a mask), or both ("un_right").
        parity: as the authors' code. On a family with shifted predictions, "un" keeps the canvas's last row from the
            third step on, mask or not, and "un_right" once the row in front of it is kept; "right" is refused: where
            that keeps the row that predicts a pending token, they have no logits for it, and answer with id 0.
    """

    delay: int = 1
    refresh_interval: int | None = 8
    shift_caching: ShiftCaching = "un_right"
    parity: bool = False

    def __post_init__(self) -> None:
        check_integer("delay", self.delay, least=0)
        check_interval("refresh_interval", self.refresh_interval)
        if self.shift_caching not in get_args(ShiftCaching):
            raise unknown_name("shift_caching", str(self.shift_caching), get_args(ShiftCaching))
        check_switch("parity", self.parity)
        if self.parity and self.shift_caching == "right":
            raise ValueError(
                "shift_caching = 'right' with parity: the authors' code answers with id 0 what a kept row predicts; "
                "'un' and 'un_right' are allowed, or parity = False, which recomputes that row"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DKVDecode(_Delayed):
    """Prompt and decoded tokens are kept, and refreshed at the interval.

    With `parity`, intervals are counted within each block, which begins with two full steps (on a family with shifted
    predictions, one).
    """

    name: ClassVar[str] = "dkv_decode"

    def start(self) -> PolicyState:
        return RecipeState(
            Recipe(
                rows="undecided", delay=self.delay, shift_caching=self.shift_caching, wraps=self.parity,
                prompt_interval=self.refresh_interval, response_interval=self.refresh_interval,
                by_block=self.parity, full_steps=2 if self.parity else 0,
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
                rows="undecided", delay=self.delay, shift_caching=self.shift_caching, wraps=self.parity,
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
        parity: count intervals within each block, and the window in masks around the tokens that are decoded next.
    """

    name: ClassVar[str] = "dkv_greedy"
    window: int = 4
    refresh_interval: int | None = 2
    parity: bool = False

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=0)
        check_interval("refresh_interval", self.refresh_interval)
        check_switch("parity", self.parity)

    def needs_order(self) -> bool:
        return True

    def start(self) -> PolicyState:
        return RecipeState(
            Recipe(
                rows="upcoming", window=self.window, window_of_masks=self.parity,
                prompt_interval=self.refresh_interval, response_interval=self.refresh_interval,
                by_block=self.parity, full_steps=1 if self.parity else 0,
            )
        )  # fmt: skip
