"""One layer's state in the cache of hidden states, and its reads and writes by an update."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.clustering.cluster_index import ClusterIndex
from tiered.clustering.summaries import add_by_cluster, means_and_medoids
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span, spanned
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.policies.polestar.drift import Changed, DriftReference, LayerKeys
from tiered.policies.polestar.members import Cluster, Columns, GatheredRows, Members
from tiered.tiers.record_bytes import StoredCluster
from tiered.tiers.stored_rows import StoredRows

Span = tuple[int, int]
# Moved clusters of each sequence, False for filler (None for no filler), and their new centroids.
Moved = tuple[Int[Tensor, "batch moved"], Bool[Tensor, "batch moved"] | None, Float[Tensor, "batch moved width"]]


@dataclass(slots=True)
class LayerState:
    """Clusters of every sequence in the first layer of a group. Sequences with fewer clusters have filler behind them.

    Attributes:
        current: columns of the current block, whose keys change with every step and cause drift.
        members: columns of each cluster, by sequence.
        stored: the members' rows; None for a layer that stores none.
        regions: region of `stored`, by sequence.
        medoids: canvas column of each cluster's medoid.
        queries: queries of the centroids, rotated at the positions of the medoids, because cached keys are rotated.
        reference: attention of the centroids at the last update of each sequence.
        of_output: whether drift is that of the attention's output (`Polestar.drift`).
    """

    layer: int
    current: Span
    members: list[Members]
    stored: StoredRows | None
    regions: list[int]
    medoids: Int[Tensor, "batch clusters"]
    queries: Float[Tensor, "batch heads clusters head_dim"]
    reference: DriftReference
    of_output: bool

    @classmethod
    def of(
        cls,
        forward: Forward,
        layer: int,
        current: Span,
        indices: Sequence[ClusterIndex],
        members: list[Members],
        stored: StoredRows | None,
        of_output: bool,
    ) -> "LayerState":
        """The state after all keys of the layer were written."""
        most = max(index.clusters for index in indices)
        medoids = torch.stack([_padded(index.medoids, most) for index in indices])
        centroids = torch.stack([_padded(index.centroids, most) for index in indices])
        queries = forward.queries(layer, Rows.at(medoids), forward.model.attention_norm(layer, centroids))
        with span(Op.DRIFT):
            attended = LayerKeys.of(forward, layer, values=of_output)
            reference = DriftReference.of(queries, attended, forward.rows[slice(*current)])
        regions = [*range(len(members))]
        return cls(layer, current, members, stored, regions, medoids, queries, reference, of_output)

    def attended(self, forward: Forward) -> LayerKeys:
        """The present keys and values that the centroids attend to."""
        return LayerKeys.of(forward, self.layer, values=self.of_output)

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences (ascending)."""
        self.members = [self.members[number] for number in sequences]
        self.regions = [self.regions[number] for number in sequences]
        self.medoids, self.queries = self.medoids[sequences], self.queries[sequences]
        self.reference = self.reference.of_sequences(sequences)

    def places(self, clusters: Iterable[Cluster]) -> list[StoredCluster]:
        """Stored places of the rows of `clusters`."""
        return [self.members[sequence].stored(self.regions[sequence], cluster) for sequence, cluster in clusters]

    def recenter(self, forward: Forward, moved: Moved, *, counts: bool = False) -> None:
        """Give clusters new centroids and thus new queries. Their drift is then measured from here, unless the move
        `counts` as drift: then the reference stays that of the old centroids."""
        clusters, valid, centroids = moved
        normed = forward.model.attention_norm(self.layer, centroids)
        queries = forward.queries(self.layer, Rows.at(self.medoids.gather(1, clusters)), normed)
        self.queries = self.queries.clone()  # the caller may still need the old ones
        Rows.at(clusters, valid).put(self.queries, queries)
        if not counts:
            with span(Op.DRIFT):
                self.reference.recenter(queries, self.attended(forward), clusters, valid)

    def retire(self, columns: Span) -> None:
        """Remove `columns` from their clusters; their rows stay stored."""
        self.members = [members.without(*columns) for members in self.members]

    @spanned(Op.DRIFT)
    def measure(
        self,
        forward: Forward,
        pass_: Pass,
        current: Span,
        active: int,
        updating: Bool[Tensor, " batch"] | None,
        last_queries: Float[Tensor, "batch heads clusters head_dim"] | None,
    ) -> list[list[float]]:
        """Write keys and values of all rows of a pass, and measure the drift of the centroids' attention.

        The next drift of updating sequences is measured from here. Reads from the device once, and once more if
        log-sum-exps of some clusters must be computed anew.

        Args:
            pass_: rows of the layer, beginning with the columns of `current` in this state.
            current: columns of the current block, the last of the active ones.
            active: number of active rows, which come first in `pass_`.
            updating: False at sequences whose reference stays; None for no such sequence.
            last_queries: queries of the centroids before moves that count as drift; None without such moves.

        Returns:
            The drift of every cluster, by sequence; undefined for a sequence that does not update.
        """
        reference = self.reference
        if last_queries is None:
            rows, block = pass_.rows, slice(active - (current[1] - current[0]), active)
            others = rows[reference.block[0].shape[2] :]
            stored = self.attended(forward).at(others)
            then = tuple(torch.cat(each, dim=2) for each in zip(reference.block, stored, strict=True))
        else:
            rows, block = forward.rows, slice(*current)
            then = tuple(each.clone() for each in self.attended(forward).at(rows))
            for each, old in zip(then, reference.block, strict=True):
                each[:, :, slice(*self.current)] = old
        forward.write(self.layer, pass_.rows, pass_.hidden)
        # Every sequence updates at a block's start. Later the columns are the same, and other references stay.
        attended, changed = self.attended(forward), Changed(rows, then, block)
        drift, self.reference = reference.measured(self.queries, attended, changed, updating, last_queries)
        found = drift.tolist()
        lost = {cluster for row in found if isnan(sum(row)) for cluster, one in enumerate(row) if isnan(one)}
        if lost:
            clusters = on_device(sorted(lost), drift.device)
            drift, self.reference = reference.mended(
                drift, self.reference, clusters, self.queries, attended, changed, updating
            )
            found = drift.tolist()
        return [row[: len(members.sizes)] for row, members in zip(found, self.members, strict=True)]

    @spanned(Op.GATHER)
    def gather_rows(
        self,
        forward: Forward,
        known: Sequence[Float[Tensor, "batch _ width"]],
        layout: GatheredRows,
        fetched: Sequence[Cluster],
        out: Float[Tensor, "batch rows width"],
    ) -> Rows:
        """Write the layer's input at the clusters of `layout` to `out`, and return all of its rows. Rows come from
        `known`, or from the stored rows of the clusters `fetched`. Other rows, filler included, become 0."""
        columns, blank, *numbers = _on_device(out.device, layout.columns, layout.blank, *layout.numbers)
        filled = (layout.columns < 0).any()
        gathered = Rows.at(columns.clamp_min(0), columns >= 0) if filled else Rows.at(columns)
        if self.stored is None:
            out[:, layout.before :] = forward.model.embed(gathered[layout.before :].columns(forward.ids))
            return gathered
        flat = out.view(-1, out.shape[2])
        if len(blank):
            flat.index_fill_(0, blank, 0)
        self.stored.read(self.layer, self.places(fetched), flat, [layout.rows[cluster] for cluster in fetched])
        for rows, to, source in zip(known, numbers[::2], numbers[1::2], strict=True):
            if len(to):
                flat.index_copy_(0, to, rows.flatten(0, 1).index_select(0, source))
        return gathered

    @spanned(Op.PATCH)
    def patch(
        self,
        forward: Forward,
        known: Sequence[Float[Tensor, "batch _ width"]],
        columns: Sequence[Columns],
        affected: Sequence[Sequence[int]],
        refetched: Sequence[Cluster],
    ) -> Moved | None:
        """Store the present rows of the `affected` clusters.

        A centroid moves by Σ(new − old) / count, which is to the mean of the present rows, without old ones.

        Args:
            known: rows of the layer's input.
            columns: canvas columns of `known`; −1 at invalid rows.
            affected: clusters to store, by sequence.
            refetched: clusters with rows that are not in `known`.

        Returns:
            Moved clusters for `recenter`; None for no affected cluster.
        """
        most = max(map(len, affected))
        if not most or self.stored is None:
            return None
        layout = GatheredRows.of(self.members, affected, columns)
        batch, rows = layout.columns.shape
        values = known[0].new_empty(batch, rows, known[0].shape[2])
        self.gather_rows(forward, known, layout, refetched, values)
        # Invalid rows go to one more cluster.
        own = np.where(layout.cluster < 0, most, layout.cluster)
        counts = np.stack([np.bincount(row, minlength=most + 1)[:most] for row in own])
        moved = np.array([[*clusters, *[-1] * (most - len(clusters))] for clusters in affected])
        of_row, clusters, members = _on_device(values.device, own, moved, counts.clip(1))
        sums = torch.zeros(batch, most + 1, values.shape[2], device=values.device)
        for b in range(batch):  # float32 copies of one sequence at a time
            add_by_cluster(sums[b : b + 1], values[b : b + 1].float(), of_row[b : b + 1])
        centroids = (sums[:, :most] / members[..., None]).to(values.dtype)
        for b, chosen in enumerate(affected):
            if chosen:
                count = sum(self.members[b].sizes[cluster] for cluster in chosen)
                own = self.places((b, cluster) for cluster in chosen)
                self.stored.store(self.layer, own, values[b, :count], centroids[b, : len(chosen)])
        return clusters.clamp_min(0), clusters >= 0, centroids

    @spanned(Op.PATCH)
    def append(self, forward: Forward, current: Span, hidden: Float[Tensor, "batch rows width"]) -> None:
        """Add the finished block before `current` as a cluster of every sequence; its rows come first in `hidden`."""
        # The row that predicts this block's first token was also in the finished block; it belongs to this one.
        first, stop = self.current[0], min(self.current[1], current[0])
        hidden = hidden[:, : stop - first]
        means, nearest = means_and_medoids(hidden, hidden.new_zeros(hidden.shape[:2], dtype=torch.int64), 1)
        centroids, medoids = means.to(hidden.dtype), nearest + first
        # The new cluster's number is the next one of its sequence. All sequences get a column of filler for it.
        number = on_device([[len(members.sizes)] for members in self.members], hidden.device)
        self.medoids = torch.cat([self.medoids, torch.zeros_like(medoids)], dim=1).scatter_(1, number, medoids)
        self.queries = torch.cat([self.queries, self.queries[:, :, :1]], dim=2)
        self.reference = self.reference.append()
        self.recenter(forward, (number, None, centroids))
        self.members = [members.appended(first, stop) for members in self.members]
        if self.stored is not None:
            for b, members in enumerate(self.members):
                self.stored.store(self.layer, self.places([(b, len(members.sizes) - 1)]), hidden[b], centroids[b])


def _padded(part: Tensor, count: int) -> Tensor:
    return torch.cat([part, part.new_zeros(count - len(part), *part.shape[1:])])


def _on_device(device: torch.device, *tables: Int[np.ndarray, "..."]) -> list[Tensor]:
    """Copy `tables` to the device in one transfer."""
    flat = on_device(torch.from_numpy(np.concatenate([table.ravel() for table in tables])), device)
    parts = flat.split([table.size for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
