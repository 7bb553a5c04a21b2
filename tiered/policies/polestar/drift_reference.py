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
    """A distribution over columns, split into those whose keys may change before the next update and the rest, that is
    carried from update to update without another look at all keys.

    The rest is summed without the changing columns. Their share could be taken off a sum over everything instead, but
    where they hold nearly all of it the difference is noise. For the same reason the rest lies in parts: one for each
    cluster's members, part 0 for the columns of no cluster, and where there are sinks a last one for them, which never
    changes. The members of a few whole clusters leave it (`widened`) without a subtraction, and come back (`measured`)
    to an empty part. So a reference that goes from update to update is as exact as one made anew, whatever the
    attention does and however many updates there are.

    An update that gives new keys to the columns F, all that some clusters have, then moves a few centroids:

        reference = reference.widened(queries, keys, F)
        ... the keys at the changing columns and at F are written ...
        drift, reference = reference.measured(queries, keys, changing and F, slice(changing))
        reference.move(queries of the moved, keys, moved, valid)

    It takes batch · heads · clusters · (changing + 2 · parts) float32; parts are the clusters of columns and one, or
    two with sinks.
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
            queries: of the centroids, rotated at the positions of their medoids.
            keys: as cached, rotated.
            changing: columns whose keys may change before the next reference is made; distinct where valid, anything
                in range where not.
            valid: False at filler, where sequences have different numbers of changing columns.
            key_mask: False at columns that nothing may attend to.
            cluster_of: the cluster of every column, −1 where there is none (`ClusterIndex.cluster_of`); without it,
                all columns are of none. A changing column comes back to its own.
            clusters: how many `cluster_of` tells apart, in the sequence that has most; there may be other queries.
            soft_cap: c where scores s count as c · tanh(s / c); None: as they are.
            sink_keys: keys of each head beside those of the columns, not rotated, the same for ever.

        Raises:
            ValueError: shapes that do not go together.
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

    def widened(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        rows: Rows,
        updating: Bool[Tensor, " batch"] | None = None,
    ) -> "DriftReference":
        """The same distribution, with the columns of `rows` as changing ones, behind those that are already.

        Exact where they are all columns that the rest has of some clusters. Where a cluster loses some of its columns
        only, or without clusters, the rest is off by about 10⁻⁶ of what they held of it (`LogSumExp.minus`), and the
        logarithm of its share by that over what remains: drift is good to 10⁻⁵ as long as they held no more than ten
        times what remains, and means nothing where they held 10⁶ times as much.

        Args:
            queries, keys: as they were when the reference was made.
            rows: in the rest so far, where valid. Those that nothing may attend to count as filler.
            updating: False at sequences in which no row counts.

        Raises:
            ValueError: shapes that do not go together.
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
        """How far the distribution has moved, of which nothing but the keys at the changing columns did; and the
        current one as the reference from now on, with the changing columns outside `keep` back in the rest.

        Args:
            queries: as they were when the reference was made.
            keys: as they are now.
            rows: the changing columns, in their order.
            keep: which of them stay changing.
            updating: see `proxy_drift`.

        Raises:
            ValueError: shapes that do not go together; a slice with a step.
        """
        first, stop, step = keep.indices(self.columns.shape[1])
        if step != 1:
            raise ValueError(f"keep = {keep}; allowed: a slice without a step")
        measure = for_device(proxy_drift, keys.device)
        given = queries, *_keys_of(rows, keys), self
        drift, scores, columns, sums, sizes = measure(*given, (first, max(first, stop)), updating)
        return drift, self._with(scores, columns, sums, sizes)

    def move(
        self,
        queries: Float[Tensor, "batch heads moved head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        clusters: Int[Tensor, "batch moved"],
        valid: Bool[Tensor, "batch moved"] | None = None,
        sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    ) -> None:
        """Let `clusters` have other `queries` from now on, in place: their attention over all `keys` as these are now.

        Args:
            queries: of the moved centroids.
            keys: of which those of the rest are as they were when the reference was made.
            clusters: distinct where valid, anything in range where not.
            valid: False at filler, where sequences have different numbers of moved clusters.
            sink_keys: as they were when the reference was made.

        Raises:
            ValueError: shapes that do not go together.
        """
        if queries.shape[2] != clusters.shape[1]:
            raise ValueError(f"queries of {queries.shape[2]} clusters cannot be those of {clusters.shape[1]}")
        part = self.part_of.scatter(1, self.columns, -1)[:, :-1]
        parts = self.sizes.shape[1] - (sink_keys is not None and sink_keys.shape[1] > 0)
        sums = _sums(queries, keys, part, parts, self.soft_cap, sink_keys)
        scores = _scores(queries, keys, self.columns, self.soft_cap)
        moved = Rows.at(clusters, valid)
        for ours, new in (self.scores, scores), (self.sums.peak, sums.peak), (self.sums.mass, sums.mass):
            moved.put(ours, new)

    def joined(self) -> "DriftReference":
        """With one more centroid, a copy of the first until it is moved."""

        def one_more(ours: Tensor) -> Tensor:
            return torch.cat([ours, ours[:, :, :1]], dim=2)

        sums = LogSumExp(one_more(self.sums.peak), one_more(self.sums.mass))
        return replace(self, scores=one_more(self.scores), sums=sums)

    def of_sequences(self, sequences: list[int]) -> "DriftReference":
        """That of these sequences alone."""
        sums = LogSumExp(self.sums.peak[sequences], self.sums.mass[sequences])
        scores, columns, sizes, part_of = (
            of_all[sequences] for of_all in (self.scores, self.columns, self.sizes, self.part_of)
        )
        return DriftReference(scores, columns, sums, sizes, part_of, self.soft_cap)

    def _with(
        self,
        scores: Float32[Tensor, "batch heads clusters changing"],
        columns: Int[Tensor, "batch changing"],
        sums: LogSumExp,
        sizes: Int[Tensor, "batch parts"],
    ) -> "DriftReference":
        """The same columns in the same parts, with another state."""
        return replace(self, scores=scores, columns=columns, sums=sums, sizes=sizes)


def _sums(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    part: Int[Tensor, "batch length"],
    parts: int,
    soft_cap: float | None,
    sink_keys: Float[Tensor, "heads sinks head_dim"] | None,
) -> LogSumExp:
    """Of the keys that have a part, and last of `sink_keys`, which every sequence has."""
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
    """Of the keys at `columns`; −inf at `length`."""
    length = keys.shape[2]
    index = columns.clamp_max(length - 1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
    scores = proxy_scores(queries, keys.gather(2, index), soft_cap)
    return scores.masked_fill_((columns == length)[:, None, None], -torch.inf)


def _keys_of(rows: Rows, keys: Float[Tensor, "batch kv_heads length head_dim"]) -> tuple[Tensor, Tensor | None]:
    """What the ops are given as keys, and as their index: a span is a view of them."""
    return (rows.take(keys), None) if rows.index is None else (keys, rows.index)
