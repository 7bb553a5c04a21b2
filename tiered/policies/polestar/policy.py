"""Polestar (arXiv 2607.14107), which updates the clusters whose attention has drifted most between refreshes.

Semantics follow the paper: the whole context, layer by layer, with the stored hidden states in the tiers. The authors'
code is a preset. docs/polestar.md lists the differences and their reasons.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from tiered.clustering.faiss_backend import Backend
from tiered.core.checks import check_integer, unknown_name
from tiered.core.extras import needing
from tiered.core.features import Tier
from tiered.forward.sizes import CallShape
from tiered.kernels.host_values import on_device
from tiered.offload.codec_bytes import Codec
from tiered.policies.base import Needs, Pass, Policy, PolicyState, Step, StepKind
from tiered.policies.polestar.cache import HiddenCache, Refresh
from tiered.policies.polestar.hidden_bytes import ClusterSizes, hidden_buffers, hidden_record_bytes
from tiered.policies.polestar.update import Update
from tiered.policies.polestar.update_log import GroupUpdate
from tiered.policies.row_schedule import REFRESH_EVERY_4

FromBelow = Literal["among", "beside"]
Measure = Literal["weights", "output"]
Beginning = Literal["full", "drift", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Polestar(Policy):
    """Drift-aware updates from stored hidden states.

    A block begins with a refresh, which clusters the rows of each layer and stores them. A step then recomputes the
    block alone, until more than T tokens were committed. The next step is an update: in every layer it also recomputes
    the members of the M clusters whose attention has drifted most.

    Attributes:
        clusters: C, clusters in each layer of each sequence, shared by prefix and suffix; "auto" for about one per 64
            rows, "rows" for one a row.
        top_m: M, clusters that an update recomputes in each layer; 0 for none, which is `fast_dllm_dual`. "auto" for 4,
            or with a cluster of each row for 8 and one more per 32 rows.
        update_threshold: T, most commits, of one step or of all steps since the last update, without an update.
        cluster_layers: layers that share one clustering; 1 for a clustering of each layer, as in the paper. Between
            these layers all members of a chosen cluster are passed on, so no stored row is fetched.
        from_below: place of clusters of which the layer below recomputed half or more. "among" counts them in a layer's
            M, before all others; "beside" adds them to M others.
        drift: measure of a centroid's attention since the last update. "weights" for the KL of the weights, as in the
            paper; "output" for the move of the output over changed columns, which notices changed values too.
        codec: codec of stored members: a `Codec` of `tiered.offload.codec_bytes`, or its name.
        refresh: beginning of a block. "full" recomputes every row. "drift" is an update over the finished block and the
            new one, which is beyond the paper. "auto" is "drift" in calls of several blocks behind prompts of at least
            `LEAST_STALE_PROMPT` tokens, else "full".
        refresh_blocks: blocks from one refresh to the next, with `refresh` = "drift".
        kmeans: library that iterates the clustering on the CPU: "torch", or "faiss" (extra "faiss"), which is faster
            for narrow models. A GPU always uses torch.
    """

    name: ClassVar[str] = "polestar"
    # Not options, but subclasses may override them: T of all commits since the last update, None for
    # `update_threshold`; numbers of clustered blocks before and behind the current one, None for all; tier of the
    # stored rows; whether the move of a centroid counts as drift, which needs its stored rows before the choice.
    cumulative_threshold: ClassVar[int | None] = None
    window_blocks: ClassVar[tuple[int, int] | None] = None
    hidden_tier: ClassVar[Tier] = Tier.HOST
    measures_moves: ClassVar[bool] = False

    clusters: int | Literal["auto", "rows"] = "auto"
    top_m: int | Literal["auto"] = "auto"
    update_threshold: int = 4
    cluster_layers: int = 4
    from_below: FromBelow = "among"
    drift: Measure = "weights"
    codec: Codec | str = Codec.NVFP4_DELTA
    refresh: Beginning = "full"
    refresh_blocks: int = REFRESH_EVERY_4
    kmeans: Backend = "torch"

    def __post_init__(self) -> None:
        words, least = {"clusters": ("auto", "rows"), "top_m": ("auto",)}, {"top_m": 0, "update_threshold": 0}
        for name in ("clusters", "top_m", "update_threshold", "cluster_layers", "refresh_blocks"):
            if getattr(self, name) not in words.get(name, ()):
                check_integer(name, getattr(self, name), least=least.get(name, 1))
        words = {"from_below": get_args(FromBelow), "drift": get_args(Measure), "codec": list(Codec)}
        words |= {"refresh": get_args(Beginning), "kmeans": get_args(Backend)}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise unknown_name(name, str(getattr(self, name)), map(str, allowed))
        if self.measures_moves and self.drift == "output":
            raise ValueError(
                f"drift = {self.drift!r}: {self.name} counts the moves of centroids, which needs 'weights'"
            )
        if self.kmeans == "faiss":
            with needing("faiss"):
                importlib.import_module("faiss")  # raises now if it is missing

    def cluster_sizes(self, call: CallShape) -> ClusterSizes:
        """Rows, clusters and records of a call."""
        return ClusterSizes(
            call=call,
            codec=Codec(self.codec),
            wanted=self.clusters,
            top_m=self.top_m,
            group=self.cluster_layers,
            beside=self.from_below == "beside",
            window=None if self.window_blocks is None else sum(self.window_blocks) * call.block_length,
            appended_blocks=self.refresh_blocks - 1 if self.refresh == "drift" else 0,
            faiss=self.kmeans == "faiss",
            of_output=self.drift == "output",
            measures_moves=self.measures_moves,
        )

    def needs(self, sizes: CallShape) -> Needs:
        if not self.top_m:
            return Needs()
        clusters = self.cluster_sizes(sizes)
        records = partial(hidden_record_bytes, clusters, self.hidden_tier)
        return Needs(records=records, buffers=partial(hidden_buffers, clusters))

    def start(self) -> PolicyState:
        assert self.refresh != "auto", "decided before a call"
        return Drifting(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolestarWindow(Polestar):
    """The authors' code (commit a125b28c): clusters of a window of blocks, raw and on the device. One of the authors' 8
    clusters is for rows behind the block, even if there are none."""

    name: ClassVar[str] = "polestar-window"
    cumulative_threshold: ClassVar[int | None] = 2
    window_blocks: ClassVar[tuple[int, int] | None] = (2, 1)
    hidden_tier: ClassVar[Tier] = Tier.DEVICE
    measures_moves: ClassVar[bool] = True

    clusters: int | Literal["auto", "rows"] = 7
    top_m: int | Literal["auto"] = 4
    update_threshold: int = 1
    cluster_layers: int = 1
    codec: Codec | str = Codec.RAW


class Drifting(PolicyState):
    """Counts commits, and decides which steps refresh or update. An `Update` chooses the clusters."""

    def __init__(self, policy: Polestar, *, dry: bool = False) -> None:
        """`dry`: whether no layer program runs, so that the first refresh is taken to have made clusters."""
        self.policy, self._dry = policy, dry
        self._cache = None
        if policy.top_m:
            self._cache = HiddenCache(
                clusters=policy.clusters,
                top_m=policy.top_m,
                group=policy.cluster_layers,
                beside=policy.from_below == "beside",
                backend=policy.kmeans,
                of_output=policy.drift == "output",
                measures_moves=policy.measures_moves,
            )
        self._forwards = 0
        self._last: Tensor | None = None  # commits of the last step, by sequence
        self._since: Tensor | None = None  # commits since the last update, by sequence

    def rows(self, step: Step) -> Pass:
        number, self._forwards = self._forwards, self._forwards + 1
        if step.remasked or (not step.number and (not self._clustered or self._begins_with_refresh(step.block))):
            self._since = None
            program = None if self._cache is None else Refresh(self._cache, step, self.policy.window_blocks)
            return replace(step.over(0, step.canvas.length, StepKind.REFRESH), program=program)
        # The block's rows, and the row before them with a prediction shift.
        first, updating, kept = step.first_row, [True] * step.canvas.batch, True
        if step.number:
            updating, kept = self._due(step)
        else:
            first -= step.stop - step.start
        rows = step.over(first, step.stop, StepKind.STEP)
        if self._cache is None or not any(updating):
            return rows
        assert self._since is not None, "an update follows a refresh"
        self._since = self._since.masked_fill(on_device(updating, self._since.device), 0)
        update = Update(self._cache, step, first, updating, number, kept)
        return replace(rows, kind=StepKind.UPDATE, program=update)

    def observe(self, step: Step, committed: Bool[Tensor, "batch block"]) -> None:
        # Counted on the device; the next step reads the sums, after this step's own host read.
        self._last = committed.sum(dim=1)
        self._since = self._last if self._since is None else self._since + self._last

    def keep(self, sequences: list[int]) -> None:
        if self._last is not None and self._since is not None:
            self._last, self._since = self._last[sequences], self._since[sequences]
        if self._cache is not None:
            self._cache.keep(sequences)

    def column_states(self, step: Step) -> Int8[np.ndarray, "batch length"] | None:
        """`ColumnState` flags `STORED` and `FETCHED` of every canvas column after `step`. None if all features are on
        the device."""
        if self._cache is None or not self._cache.states:
            return None
        return self._cache.column_states(self._forwards - 1, step.canvas.length)

    @property
    def updates(self) -> Sequence[GroupUpdate]:
        """Records of all updates so far."""
        return () if self._cache is None else self._cache.log

    @property
    def _clustered(self) -> bool:
        return self._cache is not None and (self._dry or bool(self._cache.states))

    def _begins_with_refresh(self, block: int) -> bool:
        return self.policy.refresh == "full" or block % self.policy.refresh_blocks == 0

    def _due(self, step: Step) -> tuple[list[bool], bool]:
        """Active sequences with more commits than the thresholds allow and tokens left to commit; and whether a later
        update may read the rows that theirs store. That is in this block, if enough of it is left, or at the next
        block's beginning."""
        if not self._clustered:
            return [False], False
        assert self._last is not None and self._since is not None, "the first step of a call is a refresh"
        policy, canvas = self.policy, step.canvas
        cumulative = policy.update_threshold if policy.cumulative_threshold is None else policy.cumulative_threshold
        due = (self._last > policy.update_threshold) | (self._since > cumulative)
        left = canvas.pending(step.start, step.stop).sum(dim=1)
        found, left = torch.stack([due, left]).tolist()
        # Pending tokens of a sequence that has ended stay pending.
        left = [count if here else 0 for count, here in zip(left, step.active, strict=True)]
        # A due step has tokens left to commit, and tokens committed since are not pending any more.
        again = any(count - 1 > min(policy.update_threshold, cumulative) for count in left)
        goes_on = step.stop < canvas.length and not self._begins_with_refresh(step.block + 1)
        updating = [bool(one and count) for one, count in zip(found, left, strict=True)]
        return updating, again or goes_on or step.rewrites
