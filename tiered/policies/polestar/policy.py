"""Polestar (arXiv 2607.14107): between refreshes, renew the clusters whose attention has drifted most.

Semantics follow the paper, whole context and per layer, with the stored hidden states in the tiers; the constants of
the authors' code are presets. Departures, and why, are in docs/polestar.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from tiered.forward.sizes import CallSizes
from tiered.kernels.host_values import on_device
from tiered.policies.base import Needs, PolicyState, Step, StepKind, StepRows
from tiered.policies.polestar.cache import HiddenCache, Refresh
from tiered.policies.polestar.options import PolestarOptions
from tiered.policies.polestar.record_bytes import hidden_record_bytes
from tiered.policies.polestar.update import Update
from tiered.policies.polestar.update_log import GroupUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Polestar(PolestarOptions):
    """Drift-aware updates from stored hidden states.

    A block begins with a refresh, whose rows are clustered layer by layer and stored. A step then recomputes the
    block alone, until more tokens have been committed than the thresholds allow; that step is an update, which renews
    in every layer the members of the `top_m` clusters whose attention has moved most.

    Its options are those of `PolestarOptions`.
    """

    name: ClassVar[str] = "polestar"

    def needs(self, sizes: CallSizes) -> Needs:
        return Needs(records=partial(hidden_record_bytes, self, sizes), reads_keys=True) if self.top_m else Needs()

    def start(self) -> PolicyState:
        assert self.refresh != "auto", "decided before a call"
        return Drifting(self)


class Drifting(PolicyState):
    """Counts commits; what is renewed is decided where drift is measured, in `tiered.policies.polestar`."""

    def __init__(self, policy: Polestar, *, dry: bool = False) -> None:
        """`dry`: no layer program runs, so the first refresh counts as if it had made clusters."""
        self.policy, self._dry = policy, dry
        self._cache = HiddenCache(policy) if policy.top_m else None
        self._forwards = 0
        self._active = (0, 0)  # columns that the last forward computed anyway
        self._last: Tensor | None = None  # commits of the last step, and since the last update, by sequence
        self._since: Tensor | None = None

    def rows(self, step: Step) -> StepRows:
        number, self._forwards = self._forwards, self._forwards + 1
        if self._refreshes(step):
            self._since = None
            self._active = (0, step.canvas.length)
            rows = StepRows.of_span(0, step.canvas.length, step, StepKind.REFRESH)
            return rows if self._cache is None else replace(rows, program=self._capture(step))
        # The block's rows, and where predictions are shifted the row in front of them.
        block = (step.first_row, step.stop)
        active, updating, kept = block, [True] * step.canvas.batch, True
        if step.number:
            updating, kept = self._due(step)
        else:
            active = (step.first_row - (step.stop - step.start), step.stop)
        self._active = active
        rows = StepRows.of_span(*active, step, StepKind.STEP)
        if self._cache is None or not any(updating):
            return rows
        self._reset(updating)
        response = None if step.number or not self.policy.renew_response else step.canvas.prompt_length
        update = Update(self._cache, step.active, updating, active, block, number, renewed_from=response, kept=kept)
        return replace(rows, kind=StepKind.UPDATE, program=update)

    def observe(self, step: Step, committed: Bool[Tensor, "batch block"]) -> None:
        # Counted on the device: the next step reads the sums when the step's own host read has passed anyway.
        self._last = committed.sum(dim=1)
        self._since = self._last if self._since is None else self._since + self._last

    def keep(self, sequences: list[int]) -> None:
        if self._last is not None and self._since is not None:
            self._last, self._since = self._last[sequences], self._since[sequences]
        if self._cache is not None:
            self._cache.keep(sequences)

    def column_states(self, step: Step) -> Int8[np.ndarray, "batch length"] | None:
        if self._cache is None or not self._cache.states:
            return None
        return self._cache.column_states(self._forwards - 1, self._active, step.canvas.length)

    @property
    def updates(self) -> Sequence[GroupUpdate]:
        return () if self._cache is None else self._cache.log

    @property
    def _clustered(self) -> bool:
        """Whether there are clusters to renew."""
        return self._cache is not None and (self._dry or bool(self._cache.states))

    def _refreshes(self, step: Step) -> bool:
        policy = self.policy
        if step.remasked:
            return True
        if policy.refresh_interval is not None:
            return step.number % policy.refresh_interval == 0
        return step.number == 0 and (not self._clustered or self._begins_with_refresh(step.block))

    def _begins_with_refresh(self, block: int) -> bool:
        """Whether a block does, where there are clusters."""
        return self.policy.refresh == "full" or block % self.policy.refresh_blocks == 0

    def _due(self, step: Step) -> tuple[list[bool], bool]:
        """Sequences with more commits than the thresholds allow, which still have something to commit; and whether
        another update may follow on theirs before a refresh forgets what they store: where the block has as much left
        as it takes, or the next one begins with an update."""
        if not self._clustered:
            return [False], False
        assert self._last is not None and self._since is not None, "the first step of a call is a refresh"
        policy, canvas = self.policy, step.canvas
        cumulative = policy.update_threshold if policy.cumulative_threshold is None else policy.cumulative_threshold
        due = (self._last > policy.update_threshold) | (self._since > cumulative)
        left = canvas.pending(step.start, step.stop).sum(dim=1)
        found, left = torch.stack([due & (left > 0), left]).tolist()
        # A step that is due has something left to commit, and what was committed since is pending no more.
        again = any(count - 1 > min(policy.update_threshold, cumulative) for count in left)
        goes_on = step.stop < canvas.length and not self._begins_with_refresh(step.block + 1)
        return [bool(one) for one in found], again or goes_on or step.rewrites

    def _reset(self, updating: Sequence[bool]) -> None:
        assert self._since is not None, "an update follows a refresh"
        self._since = self._since.masked_fill(on_device(updating, self._since.device), 0)

    def _capture(self, step: Step) -> Refresh:
        assert self._cache is not None, "only a policy with clusters captures them"
        first, last, length = step.first_row, step.stop, step.canvas.length
        before, behind = (length, length)
        if self.policy.window_blocks is not None:
            before, behind = ((step.stop - step.start) * blocks for blocks in self.policy.window_blocks)
        areas = ((max(0, first - before), first), (last, min(length, last + behind)))
        return Refresh(self._cache, areas, (first, last), step.canvas.pads.tolist())
