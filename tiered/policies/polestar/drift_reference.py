"""The attention of centroids at the last update, kept so that the drift since then needs the changed keys alone."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.kernels.choice import for_device
from tiered.kernels.drift_distribution import DriftDistribution
from tiered.kernels.log_sum_exp import LogSumExp, members
from tiered.kernels.proxy_attention_ref import proxy_attention
from tiered.kernels.proxy_drift_ref import proxy_drift
from tiered.kernels.proxy_scores import proxy_scores, sink_scores
from tiered.kernels.proxy_widen_ref import proxy_widen


@dataclass(frozen=True, slots=True)
class DriftReference(DriftDistribution):
    """A distribution over columns, in two sets: columns whose keys may change before the next update, and the rest.

    The rest is summed without the changing columns, because a difference would be noise if they hold nearly all of the
    attention. So it lies in parts: part 0 for the columns of no cluster, one for each cluster's members, and a last one
    for sinks, if any. The members of whole clusters leave the rest (`add_changing`) without a subtraction, and come
    back (`measured`) to an empty part. An update that gives new keys to the columns F and moves a few centroids:

        reference = reference.add_changing(queries, keys, F)
        ... the keys at the changing columns and at F are written ...
        drift, reference = reference.measured(queries, keys, changing and F, slice(changing))
        reference.recenter(queries of the moved, keys, moved, valid)

    It takes batch · heads · clusters · (changing + 2 · parts) float32. All methods raise `ValueError` for shapes that
    do not go together.
    """

    @classmethod
    def of(
        cls,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        changing: Int[Tensor, "batch changing"],
        valid: Bool[Tensor, "batch changing"] | None = None,
        key_mask: Bool[Tensor, "batch length"] | None = None,
        *,
        cluster_of: Int[Tensor, "batch length"] | None = None,
        clusters: int = 0,
        soft_cap: float | None = None,
        sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    ) -> "DriftReference":
        """The attention of `queries` over all `keys`, as both are now.

        Args:
            queries: queries of the centroids, rotated at the positions of their medoids.
            keys: cached keys, rotated.
            changing: columns whose keys may change before the next reference is made, each once.
            valid: False at filler of `changing`.
            key_mask: False at columns that no query may attend to.
            cluster_of: cluster of every column, −1 for none; None if no column has a part of its own.
            clusters: number of clusters in `cluster_of`, of the sequence with the most.
            soft_cap: c, so that a score s counts as c · tanh(s / c); None for s itself.
            sink_keys: keys of each head beside those of the columns, not rotated.
        """
        batch, _, length, _ = keys.shape
        of_none = changing.new_zeros(batch, length, dtype=torch.int64)
        part_of = of_none if cluster_of is None else cluster_of.long() + 1
        part_of = part_of if key_mask is None else part_of.where(key_mask, -1)
        part_of = torch.nn.functional.pad(part_of, (0, 1), value=-1)
        columns = changing.long() if valid is None else changing.long().where(valid, length)
        part = part_of.scatter(1, columns, -1)[:, :-1]
        columns = columns.where(part_of.gather(1, columns) >= 0, length)
        parts = 1 if cluster_of is None else clusters + 1
        sizes = members(part, parts).sum(1)
        if sink_keys is not None and sink_keys.shape[1]:
            sizes = torch.cat([sizes, torch.full_like(sizes[:, :1], sink_keys.shape[1])], dim=1)
        sums = _sums(queries, keys, part, parts, soft_cap, sink_keys)
        return cls(_scores(queries, keys, columns, soft_cap), columns, sums, sizes, part_of, soft_cap)

    def add_changing(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        rows: Rows,
        updating: Bool[Tensor, " batch"] | None = None,
    ) -> "DriftReference":
        """The same distribution, with `rows` of the rest as changing columns behind the others.

        Exact if they are all columns of some clusters. If a cluster loses some of its columns only, the rest is off by
        about 10⁻⁶ of their share (`LogSumExp.minus`): drift is good to 10⁻⁵ while they held no more than ten times what
        remains. `queries` and `keys` are as they were for the reference. `updating`: False at sequences whose rows do
        not count.
        """
        widen = for_device(proxy_widen, keys.device)
        columns = rows.positions(len(queries), keys.device)
        return self._with(*widen(queries, *_keys_of(rows, keys), self, columns, rows.valid, updating))

    def measured(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        rows: Rows,
        keep: slice = slice(None),
        updating: Bool[Tensor, " batch"] | None = None,
    ) -> tuple[Float32[Tensor, "batch clusters"], "DriftReference"]:
        """KL of the distribution now from what it was, and the present one as the next reference.

        Args:
            queries: as they were for the reference.
            keys: as they are now; only those of changing columns differ.
            rows: the changing columns, in their order.
            keep: the changing columns that stay so; the others go back to the rest.
            updating: see `proxy_drift`.
        """
        first, stop, step = keep.indices(self.columns.shape[1])
        if step != 1:
            raise ValueError(f"keep = {keep}; allowed: a slice without a step")
        measure = for_device(proxy_drift, keys.device)
        given = queries, *_keys_of(rows, keys), self
        drift, scores, columns, sums, sizes = measure(*given, (first, max(first, stop)), updating)
        return drift, self._with(scores, columns, sums, sizes)

    def recenter(
        self,
        queries: Float[Tensor, "batch heads moved head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        clusters: Int[Tensor, "batch moved"],
        valid: Bool[Tensor, "batch moved"] | None = None,
        sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    ) -> None:
        """Give `clusters` other `queries` in place: their attention over all `keys` as these are now. `valid`: False at
        filler of `clusters`."""
        if queries.shape[2] != clusters.shape[1]:
            raise ValueError(f"queries of {queries.shape[2]} clusters cannot be those of {clusters.shape[1]}")
        part = self.part_of.scatter(1, self.columns, -1)[:, :-1]
        parts = self.sizes.shape[1] - (sink_keys is not None and sink_keys.shape[1] > 0)
        sums = _sums(queries, keys, part, parts, self.soft_cap, sink_keys)
        scores = _scores(queries, keys, self.columns, self.soft_cap)
        moved = Rows.at(clusters, valid)
        for ours, new in (self.scores, scores), (self.sums.peak, sums.peak), (self.sums.mass, sums.mass):
            moved.put(ours, new)

    def append(self) -> "DriftReference":
        """One more centroid, a copy of the first one until `recenter`."""
        scores, peak, mass = (
            torch.cat([ours, ours[:, :, :1]], dim=2) for ours in (self.scores, self.sums.peak, self.sums.mass)
        )
        return replace(self, scores=scores, sums=LogSumExp(peak, mass))

    def of_sequences(self, sequences: list[int]) -> "DriftReference":
        """The reference of these sequences alone."""
        sums = LogSumExp(self.sums.peak[sequences], self.sums.mass[sequences])
        scores, columns, sizes = self.scores[sequences], self.columns[sequences], self.sizes[sequences]
        return DriftReference(scores, columns, sums, sizes, self.part_of[sequences], self.soft_cap)

    def _with(self, scores: Tensor, columns: Tensor, sums: LogSumExp, sizes: Tensor) -> "DriftReference":
        return replace(self, scores=scores, columns=columns, sums=sums, sizes=sizes)


def _sums(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    part: Int[Tensor, "batch length"],
    parts: int,
    soft_cap: float | None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None,
) -> LogSumExp:
    attention = for_device(proxy_attention, keys.device)
    if parts == 1:
        one = attention(queries, keys, part >= 0, soft_cap)
        sums = LogSumExp(one.peak[..., None], one.mass[..., None])
    else:
        sums = attention(queries, keys, None, soft_cap, part, parts)
    if sink_keys is None or not sink_keys.shape[1]:
        return sums
    of_sinks = LogSumExp.empty(sums.peak[..., 0]).plus(sink_scores(queries, sink_keys, soft_cap))
    pairs = (sums.peak, of_sinks.peak), (sums.mass, of_sinks.mass)
    return LogSumExp(*(torch.cat([columns, last[..., None]], dim=3) for columns, last in pairs))


def _scores(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    columns: Int[Tensor, "batch changing"],
    soft_cap: float | None,
) -> Float32[Tensor, "batch heads clusters changing"]:
    """Scores of the keys at `columns`; −inf at column `length`."""
    length = keys.shape[2]
    index = columns.clamp_max(length - 1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
    scores = proxy_scores(queries, keys.gather(2, index), soft_cap)
    return scores.masked_fill_((columns == length)[:, None, None], -torch.inf)


def _keys_of(rows: Rows, keys: Float[Tensor, "batch kv_heads length head_dim"]) -> tuple[Tensor, Tensor | None]:
    return (rows.take(keys), None) if rows.index is None else (keys, rows.index)
