"""The policy of dLLM-Cache (arXiv 2506.06295), which recomputes the prompt at long intervals and the answer at short
ones. Between them it recomputes the rows of the answer that have moved most, layer by layer.

Semantics follow the paper. docs/authors-code.md lists differences of the authors' code (commit 17235bff).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from tiered.core.checks import check_count, check_integer, check_number
from tiered.core.features import Feature
from tiered.forward.sizes import CallShape
from tiered.models.shape import ModelShape
from tiered.policies.base import Needs, Pass, Policy, PolicyState, Step, StepKind
from tiered.policies.dllm_cache.branch_bytes import branch_buffers
from tiered.policies.dllm_cache.program import BranchStep, BranchWork


@dataclass(frozen=True, slots=True, kw_only=True)
class DLLMCache(Policy):
    """dLLM-Cache. Intervals count the forwards of each sequence over all blocks. A sequence's first forward recomputes
    every row.

    Attributes:
        prompt_interval: Kp, forwards from one recomputation of the prompt's rows to the next; None for the first alone.
        response_interval: Kr, the same for the answer's rows, masks of later blocks included.
        update_ratio: ρ, share of the answer's rows that other forwards recompute in each layer, those whose values are
            least similar to the cached ones.
        guidance_interval: forwards from one with the unconditional half of classifier-free guidance to the next. A
            block's first forward always has that half. It has its own cache, whose intervals count only its forwards.
    """

    name: ClassVar[str] = "dllm_cache"
    prompt_interval: int | None = 50
    response_interval: int | None = 7
    update_ratio: float = 0.25
    guidance_interval: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt_interval", "response_interval"):
            check_count(name, getattr(self, name))
        check_number("update_ratio", self.update_ratio, least=0.0, most=1.0)
        check_integer("guidance_interval", self.guidance_interval, least=1)

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        kept = (Feature.KEY, Feature.VALUE, Feature.ATTN_OUT, Feature.FFN_OUT)
        return dict.fromkeys(kept, shape.layers)

    def needs(self, sizes: CallShape) -> Needs:
        return Needs(buffers=partial(branch_buffers, sizes), skips_guidance=self.guidance_interval > 1)

    def start(self) -> PolicyState:
        return Clocks(self)


class Clocks(PolicyState):
    """Counts the forwards that have an unconditional half; the loop counts the others."""

    def __init__(self, policy: DLLMCache) -> None:
        self._policy = policy
        self._guided: list[int] = []  # by sequence; empty before the first step

    def rows(self, step: Step) -> Pass:
        policy, batch = self._policy, step.canvas.batch
        start, stop = step.canvas.prompt_length, step.canvas.length
        guided, here, clocks = self.guides(step), [*step.active], [*step.forwards]
        if any(guided):
            here, clocks = here + guided, clocks + self._guided
        self._guided = [clock + is_guided for clock, is_guided in zip(self._guided, guided, strict=True)]
        untouched = self.untouched(step)
        chosen = int((stop - start) * policy.update_ratio)
        due = [
            (part and _due(policy.prompt_interval, clock, step), part and _due(policy.response_interval, clock, step))
            for part, clock in zip(here, clocks, strict=True)
        ]
        work = BranchWork(
            first=[(0 if prompt else untouched) if part else stop for part, (prompt, _) in zip(here, due, strict=True)],
            rows=[(stop - start if whole else chosen) * part for part, (_, whole) in zip(here, due, strict=True)],
            clocks=clocks,
            due=due,
        )
        whole = [all(due) for due in work.due]
        kind = StepKind.UPDATE if any(map(any, work.due)) else StepKind.STEP
        kind = StepKind.REFRESH if all(whole[n] for n, part in enumerate(here) if part) else kind
        return replace(
            step.over(min(work.first), stop, kind),
            program=self.program(work, step),
            refreshed=tuple(whole[:batch]),
            guided=tuple(guided) if step.guidance and policy.guidance_interval > 1 else None,
        )

    def keep(self, sequences: list[int]) -> None:
        self._guided = [self._guided[number] for number in sequences]

    def untouched(self, step: Step) -> int:
        """The first column that a step recomputes if no prompt is due. The prompt's row that predicts the answer's
        first token has no cached branches, so it is always recomputed."""
        return min(step.canvas.prompt_length, step.first_row)

    def program(self, work: BranchWork, step: Step) -> BranchStep:
        answer = step.canvas.prompt_length, step.canvas.length
        return BranchStep(work, answer, (step.first_row, step.last_row))

    def guides(self, step: Step) -> list[bool]:
        self._guided = self._guided or [0] * len(step.active)
        interval, begins = self._policy.guidance_interval, step.number == 0
        return [
            step.guidance and part and (begins or clock % interval == 0)
            for part, clock in zip(step.active, step.forwards, strict=True)
        ]


def _due(interval: int | None, clock: int, step: Step) -> bool:
    return step.remasked or clock == 0 or (interval is not None and clock % interval == 0)
