"""How far the attention of centroids has drifted since the last update.

With p and s the probabilities and scores at the last update, p′ and s′ those of now, and L, L′ the log-sum-exps:

    KL(p′ ‖ p) = Σ p′ (log p′ − log p) = (L − L′) + Σ p′ (s′ − s)
    L′ − L = log(1 + Σ (exp(s′ − L) − exp(s − L)))

The sums need only columns with s′ ≠ s: those whose keys changed, or all columns if the query moved. So an update looks
at few keys, however many there are. Where exp(L) changes much, the rounding of 1 counts: there L′ is taken over all
columns.
"""

from dataclasses import dataclass
from math import log

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.kernels.attention_scores import attention_scores, sink_scores
from tiered.kernels.block_attention_ref import block_attention
from tiered.kernels.choice import for_device
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.policies.polestar.hidden_bytes import CENTROIDS_AT_ONCE

# Of a log-sum-exp between updates, either way. A sum that falls to an eighth keeps the rounding of all of it.
MOST_RISE = log(8)


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """What the centroids of a layer attend to.

    Attributes:
        keys: cached keys, rotated.
        key_mask: False at columns that no query may attend to; None for no such column.
        soft_cap: c, so that a score s counts as c · tanh(s / c); None for s itself.
        sink_keys: keys of each head beside those of the columns, not rotated; None for no sinks.
    """

    keys: Float[Tensor, "batch kv_heads length head_dim"]
    key_mask: Bool[Tensor, "batch length"] | None = None
    soft_cap: float | None = None
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None

    @classmethod
    def of(cls, forward: Forward, layer: int) -> "LayerKeys":
        model = forward.model
        return cls(forward.keys(layer), forward.limits.key_mask, model.shape.soft_cap, model.sink_keys(layer))

    def log_sums(self, queries: Float[Tensor, "batch heads clusters head_dim"]) -> LogSumExp:
        """Log-sum-exp of the scores over all columns and sinks, by batch, head and cluster."""
        attention, sinks, found = for_device(block_attention, self.keys.device), self.sink_keys, []
        for some in queries.split(CENTROIDS_AT_ONCE, dim=2):
            _, sums = attention(some, self.keys, None, soft_cap=self.soft_cap, sink_keys=sinks, key_mask=self.key_mask)
            found.append(sums)
        if len(found) == 1:
            return found[0]
        return LogSumExp(torch.cat([of.peak for of in found], dim=2), torch.cat([of.mass for of in found], dim=2))

    def at(self, rows: Rows) -> Float[Tensor, "batch kv_heads rows head_dim"]:
        """Keys at the columns of `rows`, in their order; a span is a view."""
        if rows.is_span:
            return rows.take(self.keys)
        index = rows.index[:, None, :, None]
        return self.keys.gather(2, index.expand(-1, self.keys.shape[1], -1, self.keys.shape[3]))


@dataclass(frozen=True, slots=True)
class Changed:
    """Every column whose score may differ from that at the last update.

    Attributes:
        rows: the columns.
        last_keys: their keys at the last update.
        block: the rows whose keys the next reference keeps.
    """

    rows: Rows
    last_keys: Float[Tensor, "batch kv_heads rows head_dim"]
    block: slice


@dataclass(frozen=True, slots=True)
class DriftReference:
    """The attention of centroids at their last update, as far as drift needs it.

    Attributes:
        sums: log-sum-exp of the scores over all columns and sinks.
        block: keys of the columns that change with every step, those of the current block. All other keys are still
            those of the last update when an update is about to write them.
    """

    sums: LogSumExp
    block: Float[Tensor, "batch kv_heads block head_dim"]

    @classmethod
    def of(
        cls, queries: Float[Tensor, "batch heads clusters head_dim"], keys: LayerKeys, block: Rows
    ) -> "DriftReference":
        """The attention of `queries` over `keys`, as both are now. `block`: a span, whose keys change at every step."""
        return cls(keys.log_sums(queries), keys.at(block).clone())

    def measured(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: LayerKeys,
        changed: Changed,
        updating: Bool[Tensor, " batch"] | None = None,
        last_queries: Float[Tensor, "batch heads clusters head_dim"] | None = None,
        anew: bool = False,
    ) -> tuple[Float32[Tensor, "batch clusters"], "DriftReference"]:
        """Drift of every cluster, and the reference for the next update.

        Args:
            queries: of the centroids now, rotated at the positions of their medoids.
            keys: as they are now.
            updating: False at sequences whose reference stays, and whose drift has no meaning; None for none.
            last_queries: of the centroids at the last update, if they differ; all columns are `changed` then. None for
                `queries`.
            anew: take the log-sum-exps over all columns, as for `last_queries`.

        Returns:
            KL of the attention of now from that of the last update, mean over heads; float32. It may fall short of 0
            by rounding. NaN where the log-sum-exps have to be taken `anew`: the reference is of no use then.
        """
        rows, then, last, cap = changed.rows, changed.last_keys, self.sums, keys.soft_cap
        now = keys.at(rows)
        sums = keys.log_sums(queries) if anew or last_queries is not None else None
        if last_queries is None:
            both = attention_scores(queries, torch.cat([then, now], dim=2), cap).split(rows.count, dim=3)
        else:
            both = attention_scores(last_queries, then, cap), attention_scores(queries, now, cap)
        if keys.key_mask is not None:
            rows = rows.only(rows.columns(keys.key_mask))
        if rows.valid is not None:
            hidden = ~rows.valid[:, None, None]
            for scores in both:  # no number that is finite: the least less itself is 0, and its probability is 0
                scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        if sums is not None:
            rise = (sums.peak - last.peak) + (sums.mass / last.mass).log()
        else:
            before, after = ((scores - last.peak[..., None]).exp_().sum(3) for scores in both)
            rise = ((after - before) / last.mass).log1p()
            sound = rise.abs() < MOST_RISE
            rise = rise.where(sound if updating is None else sound | ~updating[:, None, None], torch.nan)
            sums = LogSumExp(last.peak + rise, last.mass)
        drift = -rise - _expected_fall(sums, *both)
        if last_queries is not None and keys.sink_keys is not None:
            drift -= _expected_fall(sums, *(sink_scores(each, keys.sink_keys, cap) for each in (last_queries, queries)))
        kept, peak, mass = now[:, :, changed.block], sums.peak, sums.mass
        if updating is not None:
            here = updating[:, None, None]
            peak, mass = peak.where(here, last.peak), mass.where(here, last.mass)
            kept = kept.where(here[..., None], self.block)
        return drift.mean(1), DriftReference(LogSumExp(peak, mass), kept.clone())

    def recenter(
        self,
        queries: Float[Tensor, "batch heads moved head_dim"],
        keys: LayerKeys,
        clusters: Int[Tensor, "batch moved"],
        valid: Bool[Tensor, "batch moved"] | None = None,
    ) -> None:
        """Give `clusters` other `queries` in place: their attention over `keys`, those of this reference. `valid`:
        False at filler."""
        sums, moved = keys.log_sums(queries), Rows.at(clusters, valid)
        for ours, theirs in (self.sums.peak, sums.peak), (self.sums.mass, sums.mass):
            moved.put(ours[..., None], theirs[..., None])

    def append(self) -> "DriftReference":
        """One more centroid, a copy of the first one until `recenter`."""
        peak, mass = (torch.cat([ours, ours[:, :, :1]], dim=2) for ours in (self.sums.peak, self.sums.mass))
        return DriftReference(LogSumExp(peak, mass), self.block)

    def of_sequences(self, sequences: list[int]) -> "DriftReference":
        """The reference of these sequences alone."""
        return DriftReference(LogSumExp(self.sums.peak[sequences], self.sums.mass[sequences]), self.block[sequences])


def _expected_fall(
    sums: LogSumExp,
    then: Float32[Tensor, "batch heads clusters columns"],
    now: Float32[Tensor, "batch heads clusters columns"],
) -> Float32[Tensor, "batch heads clusters"]:
    """Σ p′ (s − s′), from the scores s of `then` and s′ of `now`, which it overwrites."""
    then.sub_(now)
    return now.sub_(sums.peak[..., None]).exp_().mul_(then).sum(3).div_(sums.mass)
