"""What the cache of hidden states holds for one layer: members, records, and what drift is measured with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.summaries import means_and_medoids
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span, spanned
from tiered.forward.forward import Forward
from tiered.policies.polestar.drift_reference import DriftReference
from tiered.policies.polestar.hidden_records import HiddenRecords
from tiered.policies.polestar.members import Members
from tiered.policies.polestar.options import MOST_PARTS

Span = tuple[int, int]


@dataclass(slots=True)
class LayerState:
    """Clusters of every sequence in the first layer of a group. Where sequences have different numbers of them, filler
    stands behind.

    Attributes:
        layer: which.
        current: columns of the current block: their keys change with every step, and drift is what that does.
        members: who belongs where, by sequence.
        records: of the members; None where a layer keeps none.
        medoids: canvas column of every cluster.
        present: False at filler.
        queries: of the centroids, rotated at the medoids' positions.
        reference: their attention at the last update of each sequence.
        part_of, parts: the cluster of every column when the state was made, and how many there were; None and 0 where
            the reference does without.
    """

    layer: int
    current: Span
    members: list[Members]
    records: list[HiddenRecords] | None
    medoids: Int[Tensor, "batch clusters"]
    present: Bool[Tensor, "batch clusters"]
    queries: Float[Tensor, "batch heads clusters head_dim"]
    reference: DriftReference
    part_of: Int[Tensor, "batch length"] | None
    parts: int

    @classmethod
    def of(
        cls,
        forward: Forward,
        layer: int,
        current: Span,
        indices: Sequence[ClusterIndex],
        members: list[Members],
        records: list[HiddenRecords] | None,
    ) -> "LayerState":
        """After the keys of every row of the layer have been written."""
        most = max(index.clusters for index in indices)
        medoids = torch.stack([_padded(index.medoids, most) for index in indices])
        centroids = torch.stack([_padded(index.centroids, most) for index in indices])
        present = torch.stack([_padded(torch.ones_like(index.medoids), most) for index in indices]).bool()
        queries = centroid_queries(forward, layer, centroids, medoids)
        length = forward.length
        parts = most if most <= MOST_PARTS else 0
        part_of = torch.stack([index.cluster_of(length) for index in indices]) if parts else None
        reference = _reference(forward, layer, queries, current, part_of, parts)
        return cls(layer, current, members, records, medoids, present, queries, reference, part_of, parts)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.members)

    def keep(self, sequences: list[int]) -> None:
        """Go on with these sequences alone (ascending). The others' records are the caller's to forget."""
        self.members = [self.members[number] for number in sequences]
        if self.records is not None:
            self.records = [self.records[number] for number in sequences]
        self.medoids, self.present = self.medoids[sequences], self.present[sequences]
        self.part_of = None if self.part_of is None else self.part_of[sequences]
        self.queries, self.reference = self.queries[sequences], self.reference.of_sequences(sequences)

    def move(
        self,
        forward: Forward,
        clusters: Int[Tensor, "batch moved"],
        valid: Bool[Tensor, "batch moved"],
        centroids: Float[Tensor, "batch moved width"],
    ) -> None:
        """The centroids of these clusters have changed, and so have their queries: measure their drift from here."""
        queries = centroid_queries(forward, self.layer, centroids, self.medoids.gather(1, clusters))
        keys, sinks = forward.keys(self.layer), forward.model.sink_keys(self.layer)
        with span(Op.DRIFT):
            self.reference.move(queries, keys, clusters, valid, sinks)
        self.queries = self.queries.clone()
        Rows.at(clusters, valid).put(self.queries, queries)

    def retire(self, columns: Span) -> None:
        """`columns` leave their clusters; the records still hold what they were."""
        first, stop = columns
        self.members = [members.without(first, stop) for members in self.members]

    def append(
        self, forward: Forward, columns: Span, hidden: Float[Tensor, "batch rows width"]
    ) -> Float[Tensor, "batch 1 width"]:
        """One more cluster in every sequence: `columns`, whose rows are `hidden`; nothing of it is stored yet. Returns
        its centroids."""
        batch, count = hidden.shape[:2]
        everything = torch.zeros(batch, count, dtype=torch.int64, device=hidden.device)
        means, nearest = means_and_medoids(hidden, everything, 1)
        centroids, medoids = means.to(hidden.dtype), nearest + columns[0]
        # The new cluster's number is the next of its own sequence, so that numbers stay without gaps there; the column
        # of filler that all get makes room for it.
        number, filler = self.present.sum(1, keepdim=True), torch.zeros_like(medoids)
        self.medoids = torch.cat([self.medoids, filler], dim=1).scatter_(1, number, medoids)
        self.present = torch.cat([self.present, filler.bool()], dim=1).scatter_(1, number, True)
        self.queries = torch.cat([self.queries, self.queries[:, :, :1]], dim=2)
        self.reference = self.reference.joined()
        self.move(forward, number, torch.ones_like(number, dtype=torch.bool), centroids)
        for sequence in range(batch):
            self.members[sequence] = self.members[sequence].appended(*columns)
            if self.records is not None:
                self.records[sequence] = self.records[sequence].appended(count)
        return centroids


def centroid_queries(
    forward: Forward,
    layer: int,
    centroids: Float[Tensor, "batch clusters width"],
    medoids: Int[Tensor, "batch clusters"],
) -> Float[Tensor, "batch heads clusters head_dim"]:
    """Queries of centroids as if they stood where their medoids do: keys are rotated, so queries need a position."""
    return forward.queries(layer, Rows.at(medoids), forward.model.attention_norm(layer, centroids))


@spanned(Op.DRIFT)
def _reference(
    forward: Forward,
    layer: int,
    queries: Float[Tensor, "batch heads clusters head_dim"],
    current: Span,
    part_of: Int[Tensor, "batch length"] | None,
    parts: int,
) -> DriftReference:
    """Their attention over all keys as they are now."""
    keys = forward.keys(layer)
    changing = torch.arange(*current, device=keys.device).expand(keys.shape[0], -1)
    return DriftReference.of(
        queries,
        keys,
        changing,
        key_mask=forward.key_mask,
        cluster_of=part_of,
        clusters=parts,
        soft_cap=forward.model.shape.soft_cap,
        sink_keys=forward.model.sink_keys(layer),
    )


def _padded(part: Tensor, count: int) -> Tensor:
    """`part` with zeros behind it, `count` rows in all."""
    return torch.cat([part, part.new_zeros(count - len(part), *part.shape[1:])])
