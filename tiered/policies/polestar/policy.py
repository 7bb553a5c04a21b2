"""Polestar (arXiv 2607.14107): between full passes, renew the clusters whose attention has drifted most.

Semantics follow the paper, whole context and per layer, with the stored hidden states in the tiers; the constants of
the authors' code are presets. Departures, and why, are in docs/polestar.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int8
from torch import Tensor

from tiered.core.checks import check_integer, check_number, check_switch, unknown_name
from tiered.core.features import Tier
from tiered.kernels.host_values import on_device
from tiered.offload.codec_bytes import Codec
from tiered.policies.base import PassKind, Policy, PolicyState, Step, StepPlan
from tiered.policies.polestar.cache import HiddenCache
from tiered.policies.polestar.options import LATE, HiddenOptions, Late
from tiered.policies.polestar.places import hidden_places
from tiered.policies.polestar.refresh import Refresh
from tiered.policies.polestar.update import Update
from tiered.policies.polestar.update_log import LayerUpdate
from tiered.policies.schedule import check_interval

REFRESHES = ("full", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class Polestar(Policy):
    """Drift-aware updates from stored hidden states.

    A block begins with a full pass, whose rows are clustered layer by layer and stored. A step then recomputes the
    block alone, until more tokens have been committed than the thresholds allow; that step is an update, which renews
    in every layer the members of the `top_m` clusters whose attention has moved most.

    Attributes:
        clusters: C, in each layer of each sequence, shared by prefix and suffix; "auto": about one for 64 rows.
        top_m: M, clusters that an update renews in each layer; 0: none, which is `fast_dllm_dual`.
        update_threshold: T, commits in one step that call for no update yet.
        cumulative_threshold: commits since the last update that call for none yet; None: as `update_threshold`.
        window_blocks: blocks before the current one, and behind it, that are clustered; None: the whole context.
        cluster_layers: layers that share one clustering; 1: each has its own, as in the paper. Where layers share,
            clusters that one hands to the next are whole there: no stored rows are fetched to mend them.
        codec: how members are stored: "nvfp4_delta", "nvfp4", "fp8" or "raw".
        hidden_tier: where: "host", or "device".
        prefetch_layers: layers ahead for which likely clusters are fetched; 0: none.
        late: a chosen cluster that has not arrived when its rows are needed is waited for ("wait", the only one whose
            answers do not depend on time), left out ("skip"), or waited for `deadline_ms` first ("deadline").
        refresh: what begins a block: "full", every row; or "drift", an update over the finished block and the new one,
            with a full pass at every `refresh_blocks`-th block. The latter is beyond the paper.
        renew_response: with `refresh` = "drift", whether the update that begins a block also goes over every cluster
            with rows behind the prompt.
        refresh_interval: forwards from one full pass to the next within a block; None: only the block's first.
        seed: of the clustering.
    """

    name: ClassVar[str] = "polestar"
    clusters: int | Literal["auto"] = "auto"
    top_m: int = 4
    update_threshold: int = 4
    cumulative_threshold: int | None = None
    window_blocks: tuple[int, int] | None = None
    cluster_layers: int = 4
    codec: Codec | str = Codec.NVFP4_DELTA
    hidden_tier: Tier | str = Tier.HOST
    prefetch_layers: int = 1
    late: Late = "wait"
    deadline_ms: float = 1.0
    refresh: Literal["full", "drift"] = "full"
    refresh_blocks: int = 4
    renew_response: bool = False
    refresh_interval: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clusters != "auto":
            check_integer("clusters", self.clusters, least=1)
        for name, least in (("top_m", 0), ("update_threshold", 0), ("cluster_layers", 1), ("prefetch_layers", 0)):
            check_integer(name, getattr(self, name), least=least)
        if self.cumulative_threshold is not None:
            check_integer("cumulative_threshold", self.cumulative_threshold, least=0)
        check_integer("refresh_blocks", self.refresh_blocks, least=1)
        check_interval("refresh_interval", self.refresh_interval)
        check_integer("seed", self.seed, least=0)
        check_number("deadline_ms", self.deadline_ms, least=0.0)
        for name, allowed in (
            ("codec", list(Codec)),
            ("hidden_tier", (Tier.HOST, Tier.DEVICE)),
            ("late", LATE),
            ("refresh", REFRESHES),
        ):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, str(getattr(self, name)), map(str, allowed))
        if self.window_blocks is not None:
            if not isinstance(self.window_blocks, tuple | list):
                raise TypeError(f"window_blocks = {self.window_blocks!r}; blocks before and behind are allowed: (2, 1)")
            if len(self.window_blocks) != 2:
                raise ValueError(f"window_blocks = {self.window_blocks}; blocks before and behind are allowed: (2, 1)")
            for blocks in self.window_blocks:
                check_integer("window_blocks", blocks, least=0)
            object.__setattr__(self, "window_blocks", tuple(self.window_blocks))
        check_switch("renew_response", self.renew_response)
        if self.renew_response and self.refresh != "drift":
            raise ValueError("renew_response = True goes with refresh = 'drift': a full pass renews all rows")
        if self.refresh == "drift" and self.refresh_interval is not None:
            raise ValueError("refresh = 'drift' saves full passes, refresh_interval adds some; give one of them")

    def hidden(self) -> HiddenOptions | None:
        if not self.top_m:
            return None
        return HiddenOptions(
            clusters=self.clusters,
            top_m=self.top_m,
            window_blocks=self.window_blocks,
            cluster_layers=self.cluster_layers,
            codec=Codec(self.codec),
            tier=Tier(self.hidden_tier),
            prefetch_layers=self.prefetch_layers,
            late=self.late,
            deadline_ms=self.deadline_ms,
            seed=self.seed,
            renew_response=self.renew_response,
            appended_blocks=self.refresh_blocks - 1 if self.refresh == "drift" else 0,
        )

    def start(self) -> PolicyState:
        return _Drifting(self)


class _Drifting(PolicyState):
    """Counts commits; what is renewed is decided where drift is measured, in `tiered.policies.polestar`."""

    def __init__(self, policy: Polestar) -> None:
        self._policy = policy
        options = policy.hidden()
        self._cache = None if options is None else HiddenCache(options)
        self._forwards = 0
        self._active = (0, 0)  # columns that the last forward computed anyway
        self._last: Tensor | None = None  # commits of the last step, and since the last update, by sequence
        self._since: Tensor | None = None

    def plan(self, step: Step) -> StepPlan:
        number, self._forwards = self._forwards, self._forwards + 1
        if self._refreshes(step):
            self._since = None
            self._active = (0, step.canvas.length)
            plan = StepPlan.of_span(0, step.canvas.length, step, PassKind.REFRESH)
            return plan if self._cache is None else replace(plan, program=self._capture(step))
        # The block's rows, and where predictions are shifted the row in front of them.
        block = (step.first_row, step.stop)
        active, updating = block, [True] * step.canvas.batch
        if step.number:
            updating = self._due(step)
        else:
            active = (step.first_row - (step.stop - step.start), step.stop)
        self._active = active
        plan = StepPlan.of_span(*active, step, PassKind.STEP)
        if self._cache is None or not any(updating):
            return plan
        self._reset(updating)
        response = None if step.number or not self._policy.renew_response else step.canvas.prompt_length
        update = Update(self._cache, updating, active, block, number, renewed_from=response)
        return replace(plan, kind=PassKind.UPDATE, program=update)

    def observe(self, step: Step, committed: Bool[Tensor, "batch block"]) -> None:
        # Counted on the device: the next plan reads the sums when the step's own host read has passed anyway.
        self._last = committed.sum(dim=1)
        self._since = self._last if self._since is None else self._since + self._last

    def keep(self, sequences: list[int]) -> None:
        if self._last is not None and self._since is not None:
            self._last, self._since = self._last[sequences], self._since[sequences]
        if self._cache is not None:
            self._cache.keep(sequences)

    def places(self, step: Step) -> Int8[np.ndarray, "batch length"] | None:
        if self._cache is None or not self._cache.states:
            return None
        return hidden_places(self._cache, self._forwards - 1, self._active, step.canvas.length)

    @property
    def updates(self) -> Sequence[LayerUpdate]:
        return () if self._cache is None else self._cache.log

    def _refreshes(self, step: Step) -> bool:
        policy, cache = self._policy, self._cache
        if step.remasked:
            return True
        if policy.refresh_interval is not None:
            return step.number % policy.refresh_interval == 0
        drifting = policy.refresh == "drift" and cache is not None and bool(cache.states)
        return step.number == 0 and not (drifting and step.block % policy.refresh_blocks)

    def _due(self, step: Step) -> list[bool]:
        """Sequences with more commits than the thresholds allow, which still have something to commit."""
        if self._cache is None or not self._cache.states:
            return [False]
        assert self._last is not None and self._since is not None, "the first pass of a call is a refresh"
        policy = self._policy
        cumulative = policy.update_threshold if policy.cumulative_threshold is None else policy.cumulative_threshold
        due = (self._last > policy.update_threshold) | (self._since > cumulative)
        return (due & step.canvas.pending(step.start, step.stop).any(dim=1)).tolist()

    def _reset(self, updating: Sequence[bool]) -> None:
        assert self._since is not None, "an update follows a refresh"
        self._since = self._since.masked_fill(on_device(updating, self._since.device), 0)

    def _capture(self, step: Step) -> Refresh:
        assert self._cache is not None, "only a policy with clusters captures them"
        first, last, length = step.first_row, step.stop, step.canvas.length
        before, behind = (length, length)
        if self._policy.window_blocks is not None:
            before, behind = ((step.stop - step.start) * blocks for blocks in self._policy.window_blocks)
        regions = ((max(0, first - before), first), (last, min(length, last + behind)))
        return Refresh(self._cache, regions, (first, last), step.canvas.pads.tolist())
