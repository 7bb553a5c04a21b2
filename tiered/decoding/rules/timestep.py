"""As many tokens a step as Dream's time says: its rules maskgit_plus, topk_margin and entropy (arXiv 2508.15487)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.checks import check_temperature
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState
from tiered.decoding.rules.time_schedule import check_schedule_floor, fixed_shares
from tiered.decoding.sequence_noise import SequenceNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestep(CommitRule):
    """In a step from time t to s, fix ⌊masks · (1 − s/t)⌋ of a sequence's candidates, the most confident ones; all of
    them in the last step. With as many steps as tokens, float32 lets the first step fix none and the last two.

    Attributes:
        confidence_temperature: above 0, the tokens to fix are drawn without replacement, with probabilities
            softmax(confidence / confidence_temperature); 0 takes the most confident ones. Dream's `alg_temp`.
        schedule_floor: the time at which the schedule ends, between 0 and 1, both exclusive. Dream's `eps`.
    """

    name: ClassVar[str] = "timestep"
    tempered_confidence: ClassVar[bool] = True
    confidence_temperature: float = 0.0
    schedule_floor: float = 1e-3

    def __post_init__(self) -> None:
        check_temperature("confidence_temperature", self.confidence_temperature)
        check_schedule_floor(self.schedule_floor)

    @property
    def by_time(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return self.confidence_temperature > 0

    def start(self, steps_per_block: int, noise: SequenceNoise | None = None) -> CommitState:
        shares = fixed_shares(steps_per_block, self.schedule_floor)
        if not self.draws:
            return _Shares(shares)
        assert noise is not None, "a rule that draws needs noise"
        return _DrawnShares(shares, self.confidence_temperature, noise)


class _Shares(CommitState):
    def __init__(self, shares: list[float]) -> None:
        self._shares = shares

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        # Counted here, for a policy may show the rule only some of the block's rows.
        self._masks: Int[Tensor, "batch 1"] = pending.sum(dim=1, keepdim=True)
        self._step = 0

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        share = self._shares[min(self._step, len(self._shares) - 1)]
        self._step += 1
        # The product is float32's too: a share is a float32 number, exact in Python's float.
        count = (self._masks.float() * share).long()
        # Where a policy shows fewer candidates than there are masks, the step was made for those: one goes at least.
        count = count.where(candidates.pending.sum(dim=1, keepdim=True) == self._masks, count.clamp(min=1))
        chosen = candidates.pending & (self._rank(candidates).ranks() < count)
        self._masks = self._masks - chosen.sum(dim=1, keepdim=True)
        return chosen

    def _rank(self, candidates: Candidates) -> Candidates:
        """`candidates` with the scores that rank them."""
        return candidates


class _DrawnShares(_Shares):
    def __init__(self, shares: list[float], temperature: float, noise: SequenceNoise) -> None:
        super().__init__(shares)
        self._temperature, self._noise = temperature, noise

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        super().begin_block(pending)
        self._drawn = self._noise.of_block()

    def _rank(self, candidates: Candidates) -> Candidates:
        # The n largest of log p + Gumbel noise are n draws from p without replacement (arXiv 1903.06059).
        noise = self._drawn.gumbel(candidates.pending.shape[1])
        return replace(candidates, confidence=candidates.confidence / self._temperature + noise)
