"""The attention of centroids at the last update, kept so that the drift since then needs the changed keys alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.drift_distribution import DriftDistribution
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_scores import check_attention, proxy_scores
from tiered.policies.polestar.kept_attention import KeptAttention, replaced_rows, sources


@dataclass(frozen=True, slots=True)
class DriftReference(DriftDistribution):
    """A distribution over columns, split into those whose keys may change before the next update and the rest, that is
    carried from update to update without another look at all keys.

    The rest is summed without the changing columns. Their share could be taken off a sum over everything instead, but
    where they hold nearly all of it the difference is noise. For the same reason the rest lies in parts, one for each
    cluster: the members of a few whole clusters leave it (`widened`) without a subtraction, and come back (`narrowed`)
    to an empty part. So a reference that goes from update to update is as exact as one made anew, whatever the
    attention does and however many updates there are.

    An update that gives new keys to the columns F, all that some clusters have, then moves a few centroids:

        reference = reference.widened(queries, keys of F before the update, F, valid)
        drift = proxy_drift(queries, keys now at (changing, F), reference)
        reference = reference.refreshed(queries, keys now at (changing, F)).narrowed(slice(changing))
        reference = reference.replaced(DriftReference.of(queries of the moved, keys now, …), moved, valid)

    It takes batch · heads · clusters · (changing + 2 · parts + 2) float32; parts are the clusters of columns and one,
    or two with sinks.

    Attributes:
        columns: of the canvas, where the changing ones stand; −1 at those that do not count.
        kept: the rest, cluster by cluster; `rest` is their sum.
    """

    columns: Int[Tensor, "batch changing"]
    kept: KeptAttention

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
        batch, _, length, head_dim = keys.shape
        visible = keys.new_ones(batch, length, dtype=torch.bool) if key_mask is None else key_mask
        of_none = changing.new_zeros(batch, length, dtype=torch.int64)
        part_of = (of_none if cluster_of is None else cluster_of.long() + 1).where(visible, -1)
        counts = torch.ones_like(changing, dtype=torch.bool) if valid is None else valid
        changes = torch.zeros_like(visible, dtype=torch.int32).scatter_add_(1, changing.long(), counts.int()) > 0
        parts = 1 if cluster_of is None else clusters + 1
        kept = KeptAttention.of(queries, keys, visible & ~changes, part_of, parts, soft_cap, sink_keys)
        index = changing.long()[:, None, :, None].expand(-1, keys.shape[1], -1, head_dim)
        counts = counts & visible.gather(1, changing.long())
        scores = proxy_scores(queries, keys.gather(2, index), soft_cap)
        scores.masked_fill_(~counts[:, None, None], -torch.inf)
        return cls(kept.sums.merged(), scores, soft_cap, changing.long().where(counts, -1), kept)

    def refreshed(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads changing head_dim"],
    ) -> "DriftReference":
        """The current distribution as the reference: an update has happened that changed no other keys than `keys`,
        which stand at the changing columns now, and no query."""
        return replace(self, scores=self.current_scores(queries, keys))

    def widened(
        self,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads extra head_dim"],
        columns: Int[Tensor, "batch extra"],
        valid: Bool[Tensor, "batch extra"] | None = None,
    ) -> "DriftReference":
        """The same distribution, with some columns of the rest as changing ones, behind those that are already.

        Exact where they are all columns that the rest has of some clusters. Where a cluster loses some of its columns
        only, or without clusters, the rest is off by about 10⁻⁶ of what they held of it (`LogSumExp.minus`), and the
        logarithm of its share by that over what remains: drift is good to 10⁻⁵ as long as they held no more than ten
        times what remains, and means nothing where they held 10⁶ times as much.

        Args:
            queries: as they were when the reference was made.
            keys: at `columns`, as they were when the reference was made.
            columns: in the rest so far, and distinct, where valid; anything in range where not. Those that nothing may
                attend to count as filler.
            valid: False at filler.

        Raises:
            ValueError: shapes that do not go together.
        """
        check_attention(queries, keys)
        if queries.shape[:3] != self.scores.shape[:3] or keys.shape[2] != columns.shape[1]:
            raise ValueError(
                f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} do not fit a reference with scores "
                f"{tuple(self.scores.shape)} and columns {tuple(columns.shape)}"
            )
        columns = columns.long() if valid is None else columns.long().where(valid, -1)
        columns = columns.where(self.kept.parts_at(columns) >= 0, -1)
        scores = proxy_scores(queries, keys, self.soft_cap).masked_fill_((columns < 0)[:, None, None], -torch.inf)
        kept = self.kept.without(scores, columns)
        scores, columns = torch.cat([self.scores, scores], dim=3), torch.cat([self.columns, columns], dim=1)
        return self._with(kept, scores, columns)

    def narrowed(self, keep: slice) -> "DriftReference":
        """The same distribution, with the changing columns outside `keep` back in the rest.

        Raises:
            ValueError: a slice with a step.
        """
        start, stop, step = keep.indices(self.columns.shape[1])
        if step != 1:
            raise ValueError(f"keep = {keep}; allowed: a slice without a step")
        stop = max(start, stop)
        scores = torch.cat([self.scores[..., :start], self.scores[..., stop:]], dim=3)
        kept = self.kept.plus(scores, torch.cat([self.columns[:, :start], self.columns[:, stop:]], dim=1))
        # Copies: the wider tensors need not live on.
        return self._with(kept, self.scores[..., start:stop].clone(), self.columns[:, start:stop].clone())

    def replaced(
        self,
        other: "DriftReference",
        clusters: Int[Tensor, "batch moved"],
        valid: Bool[Tensor, "batch moved"] | None = None,
    ) -> "DriftReference":
        """With the distributions of `other` in the place of those of `clusters`, whose queries have changed.

        Args:
            other: of `moved` clusters, over the same columns, with the same ones changing and in the same clusters.
            clusters: of ours, distinct where valid, anything where not.
            valid: False at filler, where sequences have different numbers of moved clusters.

        Raises:
            ValueError: another number of moved clusters, of heads, of changing columns or of parts.
        """
        if other.scores.shape[2] != clusters.shape[1]:
            raise ValueError(f"a reference of {other.scores.shape[2]} clusters cannot replace {clusters.shape[1]}")
        self._check_same_columns(other)
        source = sources(clusters, valid, self.scores.shape[2])
        kept = self.kept.replaced(other.kept, source)
        return self._with(kept, replaced_rows(self.scores, other.scores, source), self.columns)

    def joined(self, other: "DriftReference") -> "DriftReference":
        """With the distributions of `other` behind ours, for new centroids; columns as for `replaced`.

        Raises:
            ValueError: another number of heads, of changing columns or of parts.
        """
        self._check_same_columns(other)
        kept = self.kept.joined(other.kept)
        return self._with(kept, torch.cat([self.scores, other.scores], dim=2), self.columns)

    def of_sequences(self, sequences: list[int]) -> "DriftReference":
        """That of these sequences alone."""
        return self._picked(self, lambda ours, _: ours[sequences])

    def where(self, sequences: Bool[Tensor, " batch"], other: "DriftReference") -> "DriftReference":
        """Ours in these sequences, `other` in the rest; both over as many columns."""

        def pick(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(sequences.view(-1, *[1] * (ours.dim() - 1)), ours, theirs)

        return self._picked(other, pick)

    def _picked(self, other: "DriftReference", pick: Callable[[Tensor, Tensor], Tensor]) -> "DriftReference":
        """With `pick` of each tensor of ours and of theirs, which all have the batch first."""

        def of(ours: LogSumExp, theirs: LogSumExp) -> LogSumExp:
            return LogSumExp(pick(ours.peak, theirs.peak), pick(ours.mass, theirs.mass))

        mine, yours = self.kept, other.kept
        kept = KeptAttention(
            of(mine.sums, yours.sums), pick(mine.sizes, yours.sizes), pick(mine.part_of, yours.part_of)
        )
        scores, columns = pick(self.scores, other.scores), pick(self.columns, other.columns)
        return replace(self, rest=of(self.rest, other.rest), scores=scores, columns=columns, kept=kept)

    def _with(
        self,
        kept: KeptAttention,
        scores: Float32[Tensor, "batch heads clusters changing"],
        columns: Int[Tensor, "batch changing"],
    ) -> "DriftReference":
        """The same attention over columns that are parted otherwise."""
        return replace(self, rest=kept.sums.merged(), scores=scores, columns=columns, kept=kept)

    def _check_same_columns(self, other: "DriftReference") -> None:
        ours, theirs = (
            (*one.scores.shape[:2], one.scores.shape[3], *one.kept.sizes.shape[1:], *one.kept.part_of.shape[1:])
            for one in (self, other)
        )
        if ours != theirs:
            raise ValueError(
                "references must have the same batch, heads, changing columns, parts and length; "
                f"these have {ours} and {theirs}"
            )
