"""Drift of the attention of centroids since the last update.

Let p, s, v be probabilities, scores and values at the last update, p′, s′, v′ those of now, and L, L′ the log-sum-exps.
Drift is one of these:

    weights    KL(p′ ‖ p) = Σ p′ (log p′ − log p) = (L − L′) + Σ p′ (s′ − s), the mean over heads
    output     ‖ Σ p′ v′ − Σ p v ‖, the length over all heads; the sums are over changed columns alone
    where      L′ − L = log(1 + Σ (exp(s′ − L) − exp(s − L)))

The sums need only columns with s′ ≠ s: those whose keys changed, or all columns if the query moved. So an update reads
few keys in any context. If exp(L) falls to a small part, what is left is rounding, and L′ is computed over all columns.
Drift of weights does not notice changed values, for example of a neighbour that a row attends to; drift of the output
does.
"""

from dataclasses import dataclass, replace
from math import log

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.clustering.unit_rows import rounding
from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.kernels.attention_scores import attention_scores, sink_scores
from tiered.kernels.block_attention_ref import block_attention
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows, KeyValue
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.policies.polestar.hidden_bytes import CENTROIDS_AT_ONCE

# Most fall and rise of a log-sum-exp between updates. A sum that falls to a quarter keeps the rounding error of the
# whole. One that rises has that of what came, but drift of the weights is a difference of numbers as large as the rise.
MOST_FALL, MOST_RISE = log(4), log(64)


# Keys of some columns, and also their values for drift of the output.
StoredPair = tuple[Float[Tensor, "batch kv_heads rows head_dim"], ...]


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """The keys and values that the centroids of a layer attend to.

    Attributes:
        keys: cached keys, rotated, in their code.
        values: cached values, in their code; None for drift of the weights.
        key_mask: False at columns that no query may attend to; None for no such column.
        soft_cap: c of the capped score c · tanh(s / c); None for no cap.
        sink_keys: keys of each head beside the columns', not rotated; None for no sinks.
    """

    keys: KeyValue
    values: KeyValue | None = None
    key_mask: Bool[Tensor, "batch length"] | None = None
    soft_cap: float | None = None
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None

    @classmethod
    def of(cls, forward: Forward, layer: int, *, values: bool) -> "LayerKeys":
        model, store = forward.model, forward.store
        keys, own = store.stored(Feature.KEY, layer), store.stored(Feature.VALUE, layer) if values else None
        return cls(keys, own, forward.limits.key_mask, model.shape.soft_cap, model.sink_keys(layer))

    def log_sums(self, queries: Float[Tensor, "batch heads clusters head_dim"]) -> LogSumExp:
        """Log-sum-exp of the scores over all columns and sinks, by batch, head and cluster."""
        attention, sinks, found = for_device(block_attention, self.keys.device), self.sink_keys, []
        for some in queries.split(CENTROIDS_AT_ONCE, dim=2):
            _, sums = attention(some, self.keys, None, soft_cap=self.soft_cap, sink_keys=sinks, key_mask=self.key_mask)
            found.append(sums)
        if len(found) == 1:
            return found[0]
        return LogSumExp(torch.cat([of.peak for of in found], dim=2), torch.cat([of.mass for of in found], dim=2))

    def at(self, rows: Rows) -> StoredPair:
        """Keys, and values if present, at the columns of `rows`, in their order; a view for a span."""
        return tuple(_taken(each, rows) for each in (self.keys, self.values) if each is not None)


@dataclass(frozen=True, slots=True)
class Changed:
    """The columns whose scores may differ from those at the last update.

    Attributes:
        rows: the columns.
        last: keys, and values, stored there at the last update.
        block: places of the rows whose keys and values the next reference keeps.
    """

    rows: Rows
    last: StoredPair
    block: slice


@dataclass(frozen=True, slots=True)
class DriftReference:
    """The attention of centroids at their last update, as far as drift needs it.

    Attributes:
        sums: log-sum-exp of the scores over all columns and sinks.
        block: keys, and values, of the current block, whose columns change with every step. Other columns do not change
            between updates.
    """

    sums: LogSumExp
    block: StoredPair

    @classmethod
    def of(
        cls, queries: Float[Tensor, "batch heads clusters head_dim"], attended: LayerKeys, block: Rows
    ) -> "DriftReference":
        """The present attention of `queries`. `block`: span of columns whose keys change at every step."""
        return cls(attended.log_sums(queries), tuple(each.clone() for each in attended.at(block)))

    def measured(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        attended: LayerKeys,
        changed: Changed,
        updating: Bool[Tensor, " batch"] | None = None,
        last_queries: Float[Tensor, "batch heads clusters head_dim"] | None = None,
        anew: bool = False,
    ) -> tuple[Float32[Tensor, "batch clusters"], "DriftReference"]:
        """Drift of every cluster, and the reference for the next update.

        Args:
            queries: present queries of the centroids, rotated at the positions of their medoids.
            attended: present keys, and values for drift of the output, which allows no `last_queries`.
            changed: columns whose scores may differ.
            updating: False at sequences whose reference stays, and whose drift has no meaning; None for no such
                sequence.
            last_queries: queries of the centroids at the last update, if they differ; all columns are `changed` then.
                None for `queries`.
            anew: compute the log-sum-exps over all columns, as with `last_queries`.

        Returns:
            The drift, float32, 0 if it may be rounding. If any is NaN, the reference is invalid there, and both have to
            be `mended`.
        """
        rows, last, cap = changed.rows, self.sums, attended.soft_cap
        (then, *last_values), stored = changed.last, attended.at(rows)
        now, *values = stored
        sums = attended.log_sums(queries) if anew or last_queries is not None else None
        if last_queries is None:
            both = attention_scores(queries, torch.cat([then, now], dim=2), cap).split(rows.count, dim=3)
        else:
            both = attention_scores(last_queries, then, cap), attention_scores(queries, now, cap)
        if attended.key_mask is not None:
            rows = rows.only(rows.columns(attended.key_mask))
        if rows.valid is not None:
            hidden = ~rows.valid[:, None, None]
            for scores in both:  # the least finite number, because its difference and its probability are 0
                scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
            values, last_values = ([each.masked_fill(hidden.mT, 0) for each in of] for of in (values, last_values))
        peak, fall = last.peak if sums is None else sums.peak, None if values else both[0] - both[1]
        before, after = (scores.sub_(of[..., None]).exp_() for scores, of in zip(both, (last.peak, peak), strict=True))
        if sums is not None:
            rise, mass = (sums.peak - last.peak) + (sums.mass / last.mass).log(), sums.mass
        else:
            rise = ((after.sum(3) - before.sum(3)) / last.mass).log1p()
            sound = (rise > -MOST_FALL) & (rise < MOST_RISE)
            rise = rise.where(sound if updating is None else sound | ~updating[:, None, None], torch.nan)
            sums, mass = LogSumExp(last.peak + rise, last.mass), last.mass * rise.exp()
        if fall is None:
            moved = _products(after, *values).div_(mass[..., None])
            least = moved.square().sum((1, 3)).sqrt_().mul_((2 * rounding(queries.dtype)) ** 0.5)
            moved -= _products(before, *last_values).div_(last.mass[..., None])
            drift = moved.square_().sum((1, 3)).sqrt_()
        else:
            drift, least = -rise - after.mul_(fall).sum(3) / mass, rounding(queries.dtype)
            if last_queries is not None and (sinks := attended.sink_keys) is not None:
                old, new = (sink_scores(each, sinks, cap) for each in (last_queries, queries))
                drift -= (new - peak[..., None]).exp_().mul_(old - new).sum(3) / mass
            drift = drift.mean(1)
        drift = drift.masked_fill(drift <= least, 0.0)
        peak, mass = sums.peak, sums.mass
        kept = [each[:, :, changed.block] for each in stored]
        if updating is not None:
            here = updating[:, None, None]
            peak, mass = peak.where(here, last.peak), mass.where(here, last.mass)
            kept = [each.where(here[..., None], old) for each, old in zip(kept, self.block, strict=True)]
        return drift, DriftReference(LogSumExp(peak, mass), tuple(each.clone() for each in kept))

    def mended(
        self,
        drift: Float32[Tensor, "batch clusters"],
        now: "DriftReference",
        lost: Int[Tensor, " lost"],
        queries: Float[Tensor, "batch heads clusters head_dim"],
        attended: LayerKeys,
        changed: Changed,
        updating: Bool[Tensor, " batch"] | None = None,
    ) -> tuple[Float32[Tensor, "batch clusters"], "DriftReference"]:
        """`drift` and the reference `now`, which this reference has `measured`, with log-sum-exps over all columns for
        the clusters `lost`: those whose drift is NaN in any sequence."""
        before = LogSumExp(self.sums.peak[:, :, lost], self.sums.mass[:, :, lost])
        some, then = replace(self, sums=before).measured(queries[:, :, lost], attended, changed, updating, anew=True)
        nan, ours, theirs = drift.isnan(), now.sums, then.sums
        peak, mass = (
            old.index_copy(2, lost, new).where(nan[:, None], old)
            for old, new in ((ours.peak, theirs.peak), (ours.mass, theirs.mass))
        )
        drift = drift.index_copy(1, lost, some).where(nan, drift)
        return drift, DriftReference(LogSumExp(peak, mass), now.block)

    def recenter(
        self,
        queries: Float[Tensor, "batch heads moved head_dim"],
        attended: LayerKeys,
        clusters: Int[Tensor, "batch moved"],
        valid: Bool[Tensor, "batch moved"] | None = None,
    ) -> None:
        """Replace the attention of `clusters` by that of `queries`, in place. `valid`: False at filler."""
        sums, moved = attended.log_sums(queries), Rows.at(clusters, valid)
        for ours, theirs in (self.sums.peak, sums.peak), (self.sums.mass, sums.mass):
            moved.put(ours[..., None], theirs[..., None])

    def append(self) -> "DriftReference":
        """Add a centroid, a copy of the first one until `recenter`."""
        peak, mass = (torch.cat([ours, ours[:, :, :1]], dim=2) for ours in (self.sums.peak, self.sums.mass))
        return DriftReference(LogSumExp(peak, mass), self.block)

    def of_sequences(self, sequences: list[int]) -> "DriftReference":
        """The reference of only these sequences."""
        block = tuple(each[sequences] for each in self.block)
        return DriftReference(LogSumExp(self.sums.peak[sequences], self.sums.mass[sequences]), block)


def _taken(stored: KeyValue, rows: Rows) -> Float[Tensor, "batch kv_heads rows head_dim"]:
    """`rows` of `stored`, decoded."""
    if not isinstance(stored, CodedRows):
        return rows.take(stored)
    return replace(stored, bytes=rows.take(stored.bytes)).values()


def _products(
    shares: Float32[Tensor, "batch heads clusters columns"],
    values: Float[Tensor, "batch kv_heads columns head_dim"],
) -> Float32[Tensor, "batch heads clusters head_dim"]:
    """Shares times values. Heads that share values are rows of one product, so no value is repeated."""
    folded = shares.reshape(*values.shape[:2], -1, values.shape[2])
    return (folded @ values.float()).view(*shares.shape[:3], values.shape[3])
