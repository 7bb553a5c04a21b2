"""The attention of centroids over columns that stay as they are, from which whole clusters can be taken exactly."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.kernels.proxy_attention_ref import proxy_attention
from tiered.kernels.proxy_scores import sink_scores
from tiered.policies.polestar.replaced_rows import replaced_rows
from tiered.policies.polestar.sums_by_part import attention_by_part, sizes_of_parts, sums_by_part


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
