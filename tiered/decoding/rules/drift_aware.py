"""Polestar's rule: fix confident tokens, and nearly confident ones whose attention has just moved (arXiv
2607.14107)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tiered.core.checks import check_number
from tiered.decoding.generators import Generators
from tiered.decoding.rules.base import Candidates, CommitRule, CommitState


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftAware(CommitRule):
    """Fix every candidate that `threshold` would fix, and some earlier.

    A row's shift d, the paper's drift, is the KL of its last-layer attention now from that at the step before. Its rise
    is d minus the mean of the row's last `drift_window` shifts. A candidate passes early if its confidence c is above
    `early_threshold`, and its rise is at least `drift_slope` · (`confidence_threshold` − c)² and below `drift_ceiling`.

    A step that refreshes every row has no attention to compare with, and drops the earlier shifts. Under a policy that
    refreshes at every step, such as `none`, the rule is `threshold`.

    Attributes:
        confidence_threshold: least confidence of a candidate that passes without a rise; in [0, 1].
        early_threshold: confidence above which a rise lets a candidate pass; in [0, `confidence_threshold`].
    """

    name: ClassVar[str] = "drift_aware"
    rank: ClassVar[int] = 2
    confidences: ClassVar[frozenset[str]] = frozenset({"probability"})
    needs_shift: ClassVar[bool] = True
    # Constants of the authors' code (commit a125b28c): number of earlier shifts in the mean; nats of rise needed for a
    # squared unit of missing confidence; rise in nats from which a row is unsettled and must wait.
    drift_window: ClassVar[int] = 5
    drift_slope: ClassVar[float] = 10.0
    drift_ceiling: ClassVar[float] = 2.0
    confidence_threshold: float = 0.9
    early_threshold: float = 0.7

    def __post_init__(self) -> None:
        check_number("confidence_threshold", self.confidence_threshold, least=0.0, most=1.0)
        check_number("early_threshold", self.early_threshold, least=0.0, most=1.0)
        if self.early_threshold > self.confidence_threshold:
            raise ValueError(
                f"early_threshold = {self.early_threshold} is allowed up to "
                f"confidence_threshold = {self.confidence_threshold}"
            )

    def start(self, steps_per_block: int, streams: Generators) -> CommitState:
        return _Rising(self)


class _Rising(CommitState):
    def __init__(self, rule: DriftAware) -> None:
        self._rule = rule

    def begin_block(self, pending: Bool[Tensor, "batch block"]) -> None:
        # A ring of each row's last shifts. NaN stands for none, which `nanmean` leaves out.
        self._earlier: Float64[Tensor, "window batch block"] = torch.full(
            (self._rule.drift_window, *pending.shape), torch.nan, dtype=torch.float64, device=pending.device
        )
        self._step = 0

    def choose(self, candidates: Candidates) -> Bool[Tensor, "batch block"]:
        rule, confidence = self._rule, candidates.confidence
        rise = self._rise(candidates)
        missing = rule.confidence_threshold - confidence
        early = (confidence > rule.early_threshold) & (missing > 0)
        early &= (rise >= rule.drift_slope * missing**2) & (rise < rule.drift_ceiling)
        confident = confidence >= rule.confidence_threshold
        return candidates.pending & (confident | early | (candidates.ranks() == 0))

    def keep(self, sequences: list[int]) -> None:
        self._earlier = self._earlier[:, sequences]

    def _rise(self, candidates: Candidates) -> Float64[Tensor, "batch block"]:
        """Shift of this step minus the mean of earlier ones, to which it is then added. NaN, which is no rise, for a
        row without a shift."""
        if candidates.shift is None:
            raise ValueError("candidates of the commit rule 'drift_aware' have shift = None; their shift is needed")
        shift = candidates.shift.double()
        rise = shift - self._earlier.nanmean(dim=0).nan_to_num(0.0)
        # Attention was refreshed, so earlier shifts do not count any more.
        self._earlier.masked_fill_(shift.isnan(), torch.nan)
        self._earlier[self._step % len(self._earlier)] = shift
        self._step += 1
        return rise
