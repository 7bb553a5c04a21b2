"""A policy of one's own, put together from the pieces that the others are made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, get_args

from tiered.core.checks import check_integer, unknown_name
from tiered.forward.sizes import CallSizes
from tiered.policies.base import PLAIN_LAUNCHES, Policy, PolicyState, StepKind, StepRows
from tiered.policies.polestar.policy import Drifting, Polestar
from tiered.policies.recipe import Recipe, RecipeState, RowsOf
from tiered.policies.schedule import Interval, blocks_of, check_interval, check_interval_or_blocks
from tiered.tiers.record_bytes import RecordBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed(Policy):
    """Independent choices: what every step recomputes, what is renewed and when, and whether drift updates run beside.

    An interval is a number of forwards of a sequence, "block", "3 blocks", or None for never (after the first forward).
    What does not go together is refused with the reason.

    Attributes:
        rows: what every step recomputes: see `tiered.policies.recipe.Recipe`.
        delay: with rows = "undecided", forwards after its commit in which a token is still recomputed (dKV-Cache).
        window: with rows = "upcoming", rows around each token that was just committed (dKV-Cache-Greedy).
        prompt_interval: from one renewal of the prompt to the next (dLLM-Cache's Kp).
        response_interval: the same of everything behind the prompt (Kr).
        next_block_interval: with rows = "block", steps from one renewal of the next block to another (Uniform-Cache).
        updates: drift updates between the renewals: a `Polestar`, or its options by name. With them both intervals
            count blocks. A block that renews the prompt begins with a refresh, another with an update over the
            finished block and its own, and over the whole response where that is due.
    """

    name: ClassVar[str] = "composed"
    rows: RowsOf = "block"
    delay: int | None = None
    window: int | None = None
    prompt_interval: Interval = "block"
    response_interval: Interval = "block"
    next_block_interval: int | None = None
    updates: Polestar | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.rows not in get_args(RowsOf):
            raise unknown_name("rows", str(self.rows), get_args(RowsOf))
        for name in ("delay", "window"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=0)
        for name in ("prompt_interval", "response_interval"):
            check_interval_or_blocks(name, getattr(self, name))
        check_interval("next_block_interval", self.next_block_interval)
        if isinstance(self.updates, Mapping):
            allowed = [field.name for field in fields(Polestar)]
            for option in self.updates:
                if option not in allowed:
                    raise unknown_name("option of updates", option, allowed)
            object.__setattr__(self, "updates", Polestar(**self.updates))
        elif self.updates is not None and not isinstance(self.updates, Polestar):
            raise TypeError(f"updates = {self.updates!r}; a Polestar policy, its options or None is allowed")
        for reason in self._contradictions():
            raise ValueError(reason)

    def record_bytes(self, sizes: CallSizes, least_slot: int = 0) -> RecordBytes | None:
        if self.updates is None:
            return None
        return self._drifting().record_bytes(sizes, least_slot, whole_response=self._renews_response())

    def reads_keys(self) -> bool:
        return self.updates is not None and self._drifting().reads_keys()

    def needs_order(self) -> bool:
        return self.rows == "upcoming"

    def start(self) -> PolicyState:
        if self.updates is not None:
            return Drifting(self._drifting(), renews_response=self._renews_response())
        return RecipeState(
            Recipe(
                rows=self.rows,
                delay=1 if self.delay is None else self.delay,
                window=0 if self.window is None else self.window,
                prompt_interval=self.prompt_interval,
                response_interval=self.response_interval,
                next_block_interval=self.next_block_interval,
            )
        )

    def rehearsal(self) -> PolicyState:
        if self.updates is None:
            return self.start()
        return Drifting(self._drifting(), dry=True, renews_response=self._renews_response())

    def layer_rows(self, asked: StepRows, sizes: CallSizes) -> float:
        return float(asked.rows.count) if self.updates is None else self._drifting().layer_rows(asked, sizes)

    def fetched_bytes(self, asked: StepRows, sizes: CallSizes) -> float:
        return 0.0 if self.updates is None else self._drifting().fetched_bytes(asked, sizes)

    def launches(self, kind: StepKind) -> int:
        return PLAIN_LAUNCHES if self.updates is None else self._drifting().launches(kind)

    def _drifting(self) -> Polestar:
        assert isinstance(self.updates, Polestar), "checked on construction"
        blocks = blocks_of(self.prompt_interval)
        # A prompt that is never renewed: no call has so many blocks.
        return self.updates if blocks == 1 else replace(self.updates, refresh="drift", refresh_blocks=blocks or 2**31)

    def _renews_response(self) -> bool:
        return blocks_of(self.prompt_interval) != 1 and blocks_of(self.response_interval) == 1

    def _contradictions(self) -> Iterator[str]:
        rows = f"rows = {self.rows!r}"
        if self.delay is not None and self.rows != "undecided":
            yield f"delay = {self.delay} with {rows}, which go by place: a delay goes with rows = 'undecided'"
        if self.window is not None and self.rows != "upcoming":
            yield f"window = {self.window} with {rows}: a window around tokens goes with rows = 'upcoming'"
        if self.next_block_interval is not None and self.rows in ("suffix", "answer", "undecided"):
            yield f"next_block_interval with {rows}: the next block is recomputed in every step anyway"
        if self.next_block_interval is not None and self.rows == "upcoming":
            yield f"next_block_interval with {rows}: a span beside single tokens; it goes with rows = 'block'"
        if self.rows == "answer" and self.response_interval not in ("block", None):
            yield f"response_interval = {self.response_interval!r} with {rows}: these are the response, in every step"
        if self.updates is not None:
            yield from self._against_updates(rows)

    def _against_updates(self, rows: str) -> Iterator[str]:
        assert isinstance(self.updates, Polestar), "checked on construction"
        if self.rows != "block":
            yield f"updates with {rows}: drift is measured of the keys of a block that every step recomputes"
        if self.next_block_interval is not None:
            yield "updates with next_block_interval: the next block is in clusters, which updates renew by their drift"
        for name in ("prompt_interval", "response_interval"):
            interval = getattr(self, name)
            if interval is not None and not blocks_of(interval):
                yield f"{name} = {interval} with updates, whose clusters are made where blocks begin: count blocks"
        prompts, responses = blocks_of(self.prompt_interval), blocks_of(self.response_interval)
        if responses not in (1, prompts):
            yield f"response_interval = {self.response_interval!r} with updates: 'block' or that of the prompt goes"
        if self.updates.refresh != "full":
            yield f"updates with refresh = {self.updates.refresh!r}: the intervals say when to refresh"
