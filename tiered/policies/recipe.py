"""The pieces that policies over keys and values are put together from, and the state that follows them."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Bool
from torch import Tensor

from tiered.policies import areas
from tiered.policies.base import PolicyState, Step, StepKind, StepRows
from tiered.policies.schedule import Interval, due

RowsOf = Literal["block", "suffix", "answer", "undecided", "upcoming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which rows every step recomputes, and which it renews at intervals; a call's first forward recomputes all.

    Attributes:
        rows: of every step: the current block; it and all behind it ("suffix"); everything behind the prompt
            ("answer"); pending tokens and those committed in the last `delay` forwards ("undecided"); or tokens that
            are committed next, those committed last, and a `window` around them ("upcoming").
        delay: forwards after its commit in which an undecided row is still recomputed.
        window: rows around each committed one.
        prompt_interval, response_interval: when all rows of the prompt, and all rows behind it, are renewed.
        next_block_interval: steps of a block from one renewal of the next block to another; None: none.
        by_block: intervals count the steps of a block, and start anew with each.
    """

    rows: RowsOf
    delay: int = 1
    window: int = 0
    prompt_interval: Interval = "block"
    response_interval: Interval = "block"
    next_block_interval: int | None = None
    by_block: bool = False


class RecipeState(PolicyState):
    """Looks at nothing but the step."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def rows(self, step: Step) -> StepRows:
        recipe = self._recipe
        of_prompt, of_answer = self.due(step)
        interval = recipe.next_block_interval
        beyond = interval is not None and step.number > 0 and step.number % interval == 0
        renews = any(of_prompt) or any(of_answer) or beyond or step.remasked
        kind = StepKind.UPDATE if renews else StepKind.STEP
        if recipe.rows == "answer":
            of_answer = step.active
        if of_prompt == of_answer == step.active:
            return StepRows.of_span(0, step.canvas.length, step, StepKind.REFRESH)
        renewed = [areas.prompt(step, of_prompt), areas.answer(step, of_answer)]
        if step.remasked:
            renewed.append(areas.Area(0, step.start, step.active))
        mask = upcoming = None
        if of_answer != step.active:
            match recipe.rows:
                case "block":
                    renewed.append(areas.block(step, blocks_behind=int(beyond)))
                case "suffix":
                    renewed.append(areas.suffix(step))
                case "undecided":
                    mask = self.undecided(step, recipe.delay)
                case "upcoming":
                    assert step.upcoming is not None, "the runtime refuses rules that decide on the logits"
                    upcoming = step.upcoming > 0
                    mask = self.around(step, areas.just_committed(step), recipe.window)
        rows = areas.rows_of(step, renewed, mask, kind, upcoming)
        refreshed = tuple(first and second for first, second in zip(of_prompt, of_answer, strict=True))
        return replace(rows, refreshed=refreshed)

    def due(self, step: Step) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Sequences that renew their prompts' rows in this step, and those that renew the rows behind."""
        recipe = self._recipe
        return (
            due(recipe.prompt_interval, step, by_block=recipe.by_block),
            due(recipe.response_interval, step, by_block=recipe.by_block),
        )

    def undecided(self, step: Step, delay: int) -> Bool[Tensor, "batch length"]:
        """Rows of tokens that are pending, or were committed in the last `delay` forwards of their sequence."""
        return areas.undecided(step, delay)

    def around(self, step: Step, fresh: Bool[Tensor, "batch length"], window: int) -> Bool[Tensor, "batch length"]:
        """The rows that the last forward committed (`fresh`), and a window around each of them."""
        return areas.around(fresh, window)
