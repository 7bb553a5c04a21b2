"""The attention of centroids over columns that stay as they are, from which whole clusters can be taken exactly."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.log_sum_exp import LogSumExp, finite
from tiered.kernels.proxy_attention_ref import SCORES_AT_ONCE, proxy_attention
from tiered.kernels.proxy_scores import check_attention, proxy_scores, sink_scores


@dataclass(frozen=True, slots=True)
class KeptAttention:
    """Log-sum-exps over disjoint parts of some columns: one part for each cluster's members, part 0 for the columns of
    no cluster, and where there are sinks a last one for them, which no column belongs to: so it never changes.

    A column that leaves is not subtracted, where its whole part leaves with it: the part is dropped, and the sum over
    the others is as exact as one made anew, however much of the attention the part held. A part that loses some of its
    columns only has them subtracted (`LogSumExp.minus`), with an error of about 10⁻⁶ of *their* mass.

    Attributes:
        sums: of each part.
        sizes: columns and sinks in each part.
        part_of: the part that every column of the canvas belongs to, in the sums or not; −1 where nothing may attend.
    """

    sums: LogSumExp
    sizes: Int[Tensor, "batch parts"]
    part_of: Int[Tensor, "batch length"]

    @classmethod
    def of(
        cls,
        queries: Float[Tensor, "batch heads clusters head_dim"],
        keys: Float[Tensor, "batch kv_heads length head_dim"],
        kept: Bool[Tensor, "batch length"],
        part_of: Int[Tensor, "batch length"],
        parts: int,
        soft_cap: float | None = None,
        sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    ) -> "KeptAttention":
        """Over the `kept` columns, which must have a part, and `sink_keys`, which every sequence has.

        Raises:
            ValueError: shapes that do not go together.
        """
        part = part_of.where(kept, -1)
        if parts == 1:
            one = for_device(proxy_attention, keys.device)(queries, keys, kept, soft_cap)
            sums = LogSumExp(one.peak[..., None], one.mass[..., None])
        else:
            sums = attention_by_part(queries, keys, part, parts, soft_cap)
        sizes = sizes_of_parts(part, parts)
        if sink_keys is not None and sink_keys.shape[1]:
            of_sinks = LogSumExp.empty(sums.peak[..., 0]).plus(sink_scores(queries, sink_keys, soft_cap))
            pairs = (sums.peak, of_sinks.peak), (sums.mass, of_sinks.mass)
            sums = LogSumExp(*(torch.cat([columns, last[..., None]], dim=3) for columns, last in pairs))
            sizes = torch.cat([sizes, torch.full_like(sizes[:, :1], sink_keys.shape[1])], dim=1)
        return cls(sums, sizes, part_of)

    def without(
        self, scores: Float32[Tensor, "batch heads clusters columns"], columns: Int[Tensor, "batch columns"]
    ) -> "KeptAttention":
        """With `columns`, of which all are in the sums at `scores`, taken out; −1 is no column."""
        part = self.parts_at(columns)
        left = self.sizes - sizes_of_parts(part, self.sizes.shape[1])
        sums = self.sums.minus(sums_by_part(scores, part, self.sizes.shape[1]))
        gone = (left == 0)[:, None, None]
        sums = LogSumExp(sums.peak.masked_fill(gone, -torch.inf), sums.mass.masked_fill(gone, 0))
        return replace(self, sums=sums, sizes=left)

    def plus(
        self, scores: Float32[Tensor, "batch heads clusters columns"], columns: Int[Tensor, "batch columns"]
    ) -> "KeptAttention":
        """With `columns`, of which none is in the sums, added to their parts at `scores`; −1 is no column."""
        part, parts = self.parts_at(columns), self.sizes.shape[1]
        sums = self.sums.union(sums_by_part(scores, part, parts))
        return replace(self, sums=sums, sizes=self.sizes + sizes_of_parts(part, parts))

    def parts_at(self, columns: Int[Tensor, "batch columns"]) -> Int[Tensor, "batch columns"]:
        """The parts that `columns` belong to; −1 for −1, and where nothing may attend."""
        return self.part_of.gather(1, columns.clamp_min(0)).where(columns >= 0, -1)

    def replaced(self, other: "KeptAttention", source: Int[Tensor, "batch clusters"]) -> "KeptAttention":
        """See `replaced_rows`."""
        pairs = (self.sums.peak, other.sums.peak), (self.sums.mass, other.sums.mass)
        return replace(self, sums=LogSumExp(*(replaced_rows(*pair, source) for pair in pairs)))

    def joined(self, other: "KeptAttention") -> "KeptAttention":
        """With the centroids of `other`, over the same columns, behind ours."""
        pairs = (self.sums.peak, other.sums.peak), (self.sums.mass, other.sums.mass)
        return replace(self, sums=LogSumExp(*(torch.cat(pair, dim=2) for pair in pairs)))


def sums_by_part(
    scores: Float32[Tensor, "batch heads clusters columns"], part: Int[Tensor, "batch columns"], parts: int
) -> LogSumExp:
    """Of each part's scores, with the parts along the last dimension.

    Args:
        scores: −inf is no column.
        part: of each column, below `parts`; −1 is no column, whatever its scores.
        parts: how many there are.
    """
    scores = scores.masked_fill((part < 0)[:, None, None], -torch.inf)
    index = part.clamp_min(0)[:, None, None].expand_as(scores)
    peak = scores.new_full((*scores.shape[:3], parts), -torch.inf).scatter_reduce_(3, index, scores, "amax")
    weights = scores.sub_(finite(peak).gather(3, index)).exp_()
    # A product with ones and zeros: a scattered sum would add in another order each time on CUDA.
    member = part[..., None] == torch.arange(parts, device=part.device)
    return LogSumExp(peak, (weights.flatten(1, 2) @ member.float()).view_as(peak))


def attention_by_part(
    queries: Float[Tensor, "batch heads clusters head_dim"],
    keys: Float[Tensor, "batch kv_heads length head_dim"],
    part: Int[Tensor, "batch length"],
    parts: int,
    soft_cap: float | None = None,
) -> LogSumExp:
    """`sums_by_part` of the scores of `queries` over all `keys`, which exist for a chunk of keys at a time.

    It takes rows · length · (head_dim + parts) multiplications; a row is a query of a head.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_attention(queries, keys)
    queries = queries.float()
    rows = queries[..., 0]
    total = LogSumExp.empty(rows[..., None].expand(*rows.shape, parts))
    # Each chunk goes over all sums: it holds as many scores at least.
    chunk = max(16, parts, SCORES_AT_ONCE // max(1, rows.numel()))
    for first in range(0, keys.shape[2], chunk):
        columns = slice(first, first + chunk)
        scores = proxy_scores(queries, keys[:, :, columns], soft_cap)
        total = total.union(sums_by_part(scores, part[:, columns], parts))
    return total


def sizes_of_parts(part: Int[Tensor, "batch columns"], parts: int) -> Int[Tensor, "batch parts"]:
    """Columns of each part; −1 is no column."""
    return part.new_zeros(part.shape[0], parts).scatter_add_(1, part.clamp_min(0), (part >= 0).to(part.dtype))


def sources(
    clusters: Int[Tensor, "batch moved"], valid: Bool[Tensor, "batch moved"] | None, count: int
) -> Int[Tensor, "batch clusters"]:
    """Where each of `count` clusters stands in `clusters`; −1 where it does not.

    Args:
        clusters: distinct where valid, anything where not.
        valid: False at filler.
        count: all clusters.
    """
    # Filler goes to a slot behind the last, which is dropped.
    slot = clusters.long() if valid is None else clusters.long().where(valid, count)
    place = torch.arange(clusters.shape[1], device=clusters.device).expand_as(slot)
    return slot.new_full((slot.shape[0], count + 1), -1).scatter_(1, slot, place)[:, :count]


def replaced_rows(
    rows: Float32[Tensor, "batch heads clusters *rest"],
    others: Float32[Tensor, "batch heads moved *rest"],
    source: Int[Tensor, "batch clusters"],
) -> Float32[Tensor, "batch heads clusters *rest"]:
    """`rows`, with row `source` of `others` wherever that is not −1."""
    if others.shape[2] == 0:
        return rows
    shape = (source.shape[0], 1, source.shape[1]) + (1,) * (rows.dim() - 3)
    index = source.view(shape)
    return torch.where(index < 0, rows, others.gather(2, index.clamp_min(0).expand_as(rows)))
