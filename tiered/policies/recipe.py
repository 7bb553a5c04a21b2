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
        shift_caching, wraps: which tokens of a row these are: see `tiered.policies.areas.undecided`.
        window: rows around each committed one.
        prompt_interval, response_interval: when all rows of the prompt, and all rows behind it, are renewed.
        next_block_interval: steps of a block from one renewal of the next block to another; None: none.
        by_block: intervals count the steps of a block, and start anew with each.
        full_steps: with `by_block`, steps at a block's beginning that recompute every row; one at most on a family with
            shifted predictions.
        window_of_masks: the window is counted as the authors of dKV-Cache do: see `areas.masks_around`.
    """

    rows: RowsOf
    delay: int = 1
    shift_caching: areas.ShiftCaching = "un_right"
    wraps: bool = False
    window: int = 0
    prompt_interval: Interval = "block"
    response_interval: Interval = "block"
    next_block_interval: int | None = None
    by_block: bool = False
    full_steps: int = 0
    window_of_masks: bool = False


class RecipeState(PolicyState):
    """Looks at nothing but the step."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def rows(self, step: Step) -> StepRows:
        recipe = self._recipe
        full_steps = min(1, recipe.full_steps) if step.first_row < step.start else recipe.full_steps
        beginning = recipe.by_block and step.number < full_steps
        of_prompt, of_answer = (
            step.active if beginning else due(interval, step, by_block=recipe.by_block)
            for interval in (recipe.prompt_interval, recipe.response_interval)
        )
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
                    mask = areas.undecided(step, recipe.delay, recipe.shift_caching, wraps=recipe.wraps)
                case "upcoming":
                    mask, upcoming = self._around(step)
        rows = areas.rows_of(step, renewed, mask, kind, upcoming)
        refreshed = tuple(first and second for first, second in zip(of_prompt, of_answer, strict=True))
        return replace(rows, refreshed=refreshed)

    def _around(self, step: Step) -> tuple[Bool[Tensor, "batch length"], Bool[Tensor, "batch block"]]:
        """Rows beside those that predict what comes next, and what does."""
        assert step.upcoming is not None, "the runtime refuses rules that decide on the logits"
        fresh, window = areas.just_committed(step), self._recipe.window
        if self._recipe.window_of_masks:
            return areas.masks_around(step, step.upcoming, fresh, window), step.upcoming > 0
        return areas.around(fresh, window), step.upcoming > 0
