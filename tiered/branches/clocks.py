"""The state of dLLM-Cache: whose prompt and answer are due, by each sequence's own clock, and whose guidance is."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered.branches.branch_pass import BranchPass
from tiered.branches.distance import Similarity
from tiered.branches.prompt_edge import PromptEdge
from tiered.branches.verify import Verifier, Verify
from tiered.branches.work import Work
from tiered.policies.base import PassKind, PolicyState, Step, StepPlan

if TYPE_CHECKING:
    from tiered.policies.dllm_cache import DLLMCache

# Of the authors' code: forwards that are guided whatever the interval, and layers that are never cached.
_GUIDED_AT_FIRST = 5
_WHOLE_LAYERS = 1


class Clocks(PolicyState):
    """Counts the forwards that have an unconditional half; the loop counts the others."""

    def __init__(self, policy: "DLLMCache") -> None:
        self._policy = policy
        self._verifier = Verifier(
            verify=Verify(policy.verify),
            similarity=Similarity(policy.similarity),
            seed=policy.seed,
            renew=policy.parity,
        )
        self._guided: list[int] = []  # by sequence; empty before the first plan
        self._edge: PromptEdge | None = None

    def plan(self, step: Step) -> StepPlan:
        policy, batch = self._policy, step.canvas.batch
        start, stop = answer = (step.canvas.prompt_length, step.canvas.length)
        shift = step.start - step.first_row
        guided, here, clocks = self._guides(step), [*step.active], [*step.forwards]
        if any(guided):
            here, clocks = here + guided, clocks + self._guided
        self._guided = [clock + is_guided for clock, is_guided in zip(self._guided, guided, strict=True)]
        work = Work.of(
            here,
            clocks,
            (policy.prompt_interval, policy.response_interval),
            answer=answer,
            chosen=int((stop - start) * policy.update_ratio),
            # A row of the prompt that predicts the answer's first token has no branches: it is always recomputed.
            untouched=start - shift if policy.parity else min(start, step.first_row),
            renewed=step.remasked,
        )
        whole = [all(due) for due in work.due]
        kind = PassKind.UPDATE if any(map(any, work.due)) else PassKind.STEP
        kind = PassKind.REFRESH if all(whole[n] for n, part in enumerate(here) if part) else kind
        plan = StepPlan.of_span(min(work.first), stop, step, kind)
        whole_layers = _WHOLE_LAYERS if policy.parity else 0
        if policy.parity and shift and self._edge is None:
            self._edge = PromptEdge(shift)
        program = BranchPass(
            work, answer, self._verifier, block=step.first_row, whole_layers=whole_layers, edge=self._edge
        )
        plan = replace(plan, program=program, refreshed=tuple(whole[:batch]))
        if not policy.skips_guidance():
            return plan
        if policy.parity and any(guided):
            # Later blocks will read the difference that guidance makes here.
            plan = replace(plan, output=slice(start - shift - min(work.first), stop - shift - min(work.first)))
        return replace(plan, guided=tuple(guided))

    def keep(self, sequences: list[int]) -> None:
        if self._edge is not None:
            self._edge.keep(sequences, len(self._guided))
        self._guided = [self._guided[number] for number in sequences]

    def _guides(self, step: Step) -> list[bool]:
        """Sequences whose unconditional half takes part."""
        policy = self._policy
        self._guided = self._guided or [0] * len(step.active)
        anyway = not policy.parity and step.number == 0
        at_first = _GUIDED_AT_FIRST if policy.parity else 0
        return [
            step.guidance and part and (anyway or clock < at_first or clock % policy.guidance_interval == 0)
            for part, clock in zip(step.active, step.forwards, strict=True)
        ]
