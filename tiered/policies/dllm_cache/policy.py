"""The policy of dLLM-Cache (arXiv 2506.06295): the prompt is renewed at long intervals, the answer at short ones, and
between them the rows of the answer that have moved most, layer by layer.

Semantics follow the paper; `parity` follows the authors' code at commit 17235bff. Departures are in docs/policies.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from tiered.core.checks import check_integer, check_number, check_switch, unknown_name
from tiered.core.features import Account, Feature
from tiered.forward.sizes import CallSizes
from tiered.models.shape import ModelShape
from tiered.policies.base import Policy, PolicyState, Step, StepKind, StepRows
from tiered.policies.dllm_cache.branch_bytes import branch_bytes
from tiered.policies.dllm_cache.program import BranchStep, PromptEdge, Work
from tiered.policies.dllm_cache.verify import Similarity, Verifier, Verify
from tiered.policies.schedule import check_interval

# Of the authors' code: forwards that are guided whatever the interval, and layers that are never cached.
_GUIDED_AT_FIRST = 5
_WHOLE_LAYERS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DLLMCache(Policy):
    """Intervals count the forwards of each sequence, over all blocks; a sequence's first one renews everything.

    Attributes:
        prompt_interval: Kp, forwards from one renewal of the prompt's rows to the next; None: never again.
        response_interval: Kr, the same of the answer's rows, masks of later blocks included.
        update_ratio: ρ, share of the answer's rows that any other forward recomputes in each layer.
        verify: which: those whose "value" or "key" is least similar to the cached one, or "random" ones.
        similarity: "cosine", or "l2", the distance.
        guidance_interval: with classifier-free guidance, forwards from one with an unconditional half to the next; the
            half has a cache of its own, and its intervals count the forwards with it. A block's first has it always.
        seed: of random rows.
        parity: as the authors' code: values of all rows replace the cached ones wherever they are compared, the first
            layer renews the whole answer, and guidance is computed in the first five forwards, but not for a new block.
            Where predictions are shifted, the row that predicts the answer's first token is as old as the prompt.
    """

    name: ClassVar[str] = "dllm_cache"
    prompt_interval: int | None = 50
    response_interval: int | None = 7
    update_ratio: float = 0.25
    verify: Verify | str = Verify.VALUE
    similarity: Similarity | str = Similarity.COSINE
    guidance_interval: int = 1
    seed: int = 0
    parity: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt_interval", "response_interval"):
            check_interval(name, getattr(self, name))
        check_number("update_ratio", self.update_ratio, least=0.0, most=1.0)
        check_integer("guidance_interval", self.guidance_interval, least=1)
        check_integer("seed", self.seed, least=0)
        check_switch("parity", self.parity)
        for name, allowed in (("verify", Verify), ("similarity", Similarity)):
            if getattr(self, name) not in list(allowed):
                raise unknown_name(name, str(getattr(self, name)), map(str, allowed))

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        kept = (Feature.KEY, Feature.VALUE, Feature.ATTN_OUT, Feature.FFN_OUT)
        return dict.fromkeys(kept, shape.layers)

    def state_bytes(self, sizes: CallSizes) -> Mapping[Account, int]:
        taken = branch_bytes(sizes)
        if self.parity:  # what is kept of the row in front of the answer, where it predicts, and what that is made of
            taken += 4 * sizes.sequences * sizes.shape.prediction_shift * sizes.shape.width * sizes.element
        return {Account.ACTIVATIONS: taken}

    def skips_guidance(self) -> bool:
        return self.guidance_interval > 1

    def logit_rows(self, block_length: int, context: int) -> int:
        # The difference that guidance makes outlives its block in the authors' code, so it is of the whole answer.
        return context if self.parity and self.skips_guidance() else block_length

    def start(self) -> PolicyState:
        return Clocks(self)


class Clocks(PolicyState):
    """Counts the forwards that have an unconditional half; the loop counts the others."""

    def __init__(self, policy: DLLMCache) -> None:
        self._policy = policy
        self._verifier = Verifier(
            verify=Verify(policy.verify),
            similarity=Similarity(policy.similarity),
            seed=policy.seed,
            renew=policy.parity,
        )
        self._guided: list[int] = []  # by sequence; empty before the first step
        self._edge: PromptEdge | None = None

    def rows(self, step: Step) -> StepRows:
        policy, batch = self._policy, step.canvas.batch
        start, stop = answer = (step.canvas.prompt_length, step.canvas.length)
        shift = step.start - step.first_row
        guided, here, clocks = self._guides(step), [*step.active], [*step.forwards]
        if any(guided):
            here, clocks = here + guided, clocks + self._guided
        self._guided = [clock + is_guided for clock, is_guided in zip(self._guided, guided, strict=True)]
        # A row of the prompt that predicts the answer's first token has no branches: it is always recomputed.
        untouched = start - shift if policy.parity else min(start, step.first_row)
        chosen = int((stop - start) * policy.update_ratio)
        due = [
            (part and _due(policy.prompt_interval, clock, step), part and _due(policy.response_interval, clock, step))
            for part, clock in zip(here, clocks, strict=True)
        ]
        work = Work(
            first=[(0 if prompt else untouched) if part else stop for part, (prompt, _) in zip(here, due, strict=True)],
            rows=[(stop - start if whole else chosen) * part for part, (_, whole) in zip(here, due, strict=True)],
            clocks=clocks,
            due=due,
        )
        whole = [all(due) for due in work.due]
        kind = StepKind.UPDATE if any(map(any, work.due)) else StepKind.STEP
        kind = StepKind.REFRESH if all(whole[n] for n, part in enumerate(here) if part) else kind
        rows = StepRows.of_span(min(work.first), stop, step, kind)
        whole_layers = _WHOLE_LAYERS if policy.parity else 0
        if policy.parity and shift and self._edge is None:
            self._edge = PromptEdge(shift)
        program = BranchStep(
            work,
            answer,
            self._verifier,
            block=(step.first_row, step.last_row),
            whole_layers=whole_layers,
            edge=self._edge,
        )
        rows = replace(rows, program=program, refreshed=tuple(whole[:batch]))
        if not policy.skips_guidance():
            return rows
        if policy.parity and any(guided):
            # Later blocks will read the difference that guidance makes here.
            rows = replace(rows, output=slice(start - shift - min(work.first), stop - shift - min(work.first)))
        return replace(rows, guided=tuple(guided))

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


def _due(interval: int | None, clock: int, step: Step) -> bool:
    """Whether an area is due in a sequence's forward number `clock`; before its first, everything is."""
    return step.remasked or clock == 0 or (interval is not None and clock % interval == 0)
