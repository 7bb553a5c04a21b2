"""Rows of hidden states in a codec, in host memory or on the device: written and read cluster by cluster."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from tiered.core.events import Asked, Stored, TierEvent
from tiered.core.features import Account, Tier
from tiered.core.ops import Op
from tiered.core.spans import span, spanned
from tiered.kernels.host_values import on_device
from tiered.kernels.row_base import RowBase
from tiered.offload.codecs import decode, encode
from tiered.offload.fence import Region
from tiered.tiers.parts import Equal, Parts, Wanted
from tiered.tiers.record_bytes import RecordBytes, StoredCluster
from tiered.tiers.residency import Residency
from tiered.tiers.tiers import Home, Tiers

Numbers = Int[np.ndarray, " n"]
Key = tuple[int, int]  # of a record: its layer, and its number among those of all regions


class StoredRows:
    """The stored rows of a call. A layer has a region for each sequence, with rows cluster after cluster.

    In host memory, runs of `RecordBytes.record_rows` rows are the records of a `Residency`. Each row is a part, so
    only rows of the clusters that are read are fetched. On the device, rows are written and read in place.
    """

    def __init__(self, tiers: Tiers, needed: RecordBytes, sequences: int) -> None:
        """`needed`: the planned bytes. `sequences`: regions of a layer. Raises `TierCapacityError` if the device has no
        room for the slots."""
        self._tiers, self._needed, self._sequences = tiers, needed, sequences
        self._fetched = fetched = Counter[Tier]()  # bytes
        self._each = needed.record_rows if needed.slots else max(1, needed.rows)  # rows of a record
        self._per_region = -(-needed.rows // self._each) * self._each  # rows are numbered through all regions
        self._centroids: dict[int, Float[Tensor, "clusters width"]] = {}  # of a layer, region after region
        self._layers: dict[int, Tensor | None] = {}  # rows of a layer on the device; None in host memory
        self._ahead: dict[Key, Parts] = {}

        def record(event: TierEvent) -> None:  # a method would form a cycle that keeps device memory alive
            if isinstance(event, Asked):
                fetched[event.tier] += event.nbytes
            tiers.record(event)

        self._record = record
        self._residency = Residency(tiers.traffic, record)
        tiers.memory.callback(self._residency.close)
        if needed.slots:
            hint = "lower `top_m`, or raise the budget"
            ring = tiers.slots(Region.FETCH_SLOT, needed.slots, needed.slot_bytes, hint=hint)
            self._residency.open(ring)
            self._slots = ring.bytes.view(-1, needed.row_bytes)

    @property
    def tier(self) -> Tier:
        return self._needed.tier

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched so far, or read on the device."""
        return self._fetched.total()

    @spanned(Op.STORE)
    def store(
        self,
        layer: int,
        clusters: Sequence[StoredCluster],
        rows: Float[Tensor, "rows width"],
        centroids: Float[Tensor, "clusters width"],
    ) -> None:
        """Store all rows of clusters of one region, cluster after cluster, and against these centroids. Raises
        `TierCapacityError` if a layer's first rows find no room. Raises `ValueError` if the number of rows is not that
        of the clusters, or exceeds the region."""
        (numbers, own), needed = self._numbers(clusters), self._needed
        if len(numbers) != len(rows):
            raise ValueError(f"{len(rows)} rows do not fit clusters of {len(numbers)}")
        if any(one.rows.stop > needed.rows or one.cluster >= needed.clusters for one in clusters):
            raise ValueError(f"{clusters} do not fit a region of {needed.rows} rows in {needed.clusters} clusters")
        if layer not in self._layers:
            self._open(layer, rows)
        bases = centroids.to(rows.dtype)
        if needed.codec.needs_base:
            self._centroids[layer].index_copy_(
                0, on_device(torch.from_numpy(self._bases(clusters)), rows.device), bases
            )
        # Half of the slots, so that copies of their rows overlap with encoding the others.
        for chosen, records in self._records(layer, numbers, max(1, needed.slots // 2)):
            memory, at = self._use(layer, numbers[chosen], records, fetched=False)
            for key, parts in records.items():
                self._residency.write(key, parts)
            tables = on_device(torch.from_numpy(np.stack([at, own[chosen], chosen])), rows.device)
            some = rows if len(chosen) == len(rows) else rows.index_select(0, tables[2])
            base = RowBase(bases, tables[1]) if needed.codec.needs_base else None
            with span(Op.ENCODE, layer):
                encode(needed.codec, some, memory, tables[0], base)
            for key in records:
                self._residency.patch(key)
        self._residency.rest()

    @spanned(Op.FETCH)
    def send(self, layer: int, clusters: Sequence[StoredCluster]) -> None:
        """Fetch clusters behind those sent before, as far as there are slots."""
        if not clusters:
            return
        numbers, _ = self._numbers(clusters)
        for _, records in self._records(layer, numbers, len(numbers)):
            for key, parts in records.items():
                self._ahead[key] = parts | self._ahead[key] if key in self._ahead else parts
        if self._ahead:
            self._residency.use([], self._following({}))

    def recall(self) -> None:
        """Forget clusters that were sent and not read."""
        self._ahead.clear()

    @spanned(Op.FETCH)
    def read(
        self, layer: int, clusters: Sequence[StoredCluster], out: Float[Tensor, "any width"], places: Sequence[slice]
    ) -> None:
        """Write the rows of clusters to their `places` of `out`. Compute waits for rows that are on their way. Raises
        `TransferError` if a copy of a row failed in either direction."""
        if not clusters:
            return
        self.send(layer, clusters)
        (numbers, own), codec = self._numbers(clusters), self._needed.codec
        to, bases = np.concatenate([np.arange(place.start, place.stop) for place in places]), self._bases(clusters)
        for chosen, records in self._records(layer, numbers, max(1, self._needed.slots)):
            memory, at = self._use(layer, numbers[chosen], records, fetched=True)
            tables = on_device(torch.from_numpy(np.stack([at, to[chosen], bases[own[chosen]]])), out.device)
            base = RowBase(self._centroids[layer], tables[2]) if codec.needs_base else None
            with span(Op.DECODE, layer):
                decode(codec, memory, tables[0], out, tables[1], base)
            for key in records:
                del self._ahead[key]
        self._residency.rest()

    def check_integrity(self) -> None:
        self._residency.check_integrity()

    def _open(self, layer: int, like: Float[Tensor, "rows width"]) -> None:
        needed, tiers, width = self._needed, self._tiers, like.shape[1]
        if needed.codec.needs_base:
            nbytes = self._sequences * needed.clusters * width * like.element_size()
            self._centroids[layer] = tiers.on_device(Account.CENTROIDS, nbytes).view(like.dtype).view(-1, width)
        if needed.tier is Tier.DEVICE:
            memory = tiers.on_device(Account.HIDDEN, self._sequences * needed.region_bytes)
            self._layers[layer] = memory.view(-1, needed.row_bytes)
            return
        for region in range(self._sequences):
            home = tiers.host_home(Account.HIDDEN, needed.region_bytes, needed.room)
            assert home.memory is not None, "it is in host memory"
            for number, part in enumerate(
                home.memory.split(needed.slot_bytes), region * self._per_region // self._each
            ):
                layout = Equal(needed.row_bytes, part.numel() // needed.row_bytes)
                record = Home(part.numel(), home.fence, memory=part)
                self._residency.place((layer, number), record, layout=layout, filled=False, layer=layer)
        self._layers[layer] = None

    def _numbers(self, clusters: Sequence[StoredCluster]) -> tuple[Numbers, Numbers]:
        """The numbers of the rows of clusters among those of all regions, and the index of each row's cluster."""
        starts = [one.region * self._per_region for one in clusters]
        rows = [start + np.arange(one.rows.start, one.rows.stop) for start, one in zip(starts, clusters, strict=True)]
        of = np.repeat(np.arange(len(clusters)), [len(each) for each in rows])
        return np.concatenate(rows), of

    def _bases(self, clusters: Sequence[StoredCluster]) -> Numbers:
        return np.array([one.region * self._needed.clusters + one.cluster for one in clusters])

    def _records(self, layer: int, numbers: Numbers, most: int) -> Iterator[tuple[Numbers, dict[Key, Parts]]]:
        """Rows in groups of up to `most` records: their indices in `numbers`, and the records; none on the device."""
        if self._layers[layer] is not None:
            yield np.arange(len(numbers)), {}
            return
        order = np.argsort(numbers, kind="stable")
        found, starts = np.unique(numbers[order] // self._each, return_index=True)
        ends, records = [*starts[1:].tolist(), len(numbers)], dict[Key, Parts]()
        for count, (record, start, stop) in enumerate(zip(found.tolist(), starts.tolist(), ends, strict=True), 1):
            first = record * self._each % self._per_region
            parts = np.zeros(min(self._each, self._needed.rows - first), dtype=bool)
            parts[numbers[order[start:stop]] % self._each] = True
            records[layer, record] = parts
            if len(records) == most or count == len(found):
                yield np.sort(order[starts[count - len(records)] : stop]), records
                records = {}

    def _use(
        self, layer: int, numbers: Numbers, records: Mapping[Key, Parts], *, fetched: bool
    ) -> tuple[UInt8[Tensor, "any row_bytes"], Numbers]:
        """Device memory that holds the rows, and their numbers there. `fetched`: whether they have to be fetched."""
        if (memory := self._layers[layer]) is not None:
            used = Asked if fetched else Stored
            nbytes = len(numbers) * self._needed.row_bytes
            self._record(used(tier=Tier.DEVICE, records=len(numbers), nbytes=nbytes))
            return memory, numbers
        wanted = [Wanted(key, parts if fetched else np.zeros_like(parts)) for key, parts in records.items()]
        views = self._residency.use(wanted, self._following(records))
        firsts = [(view.data_ptr() - self._slots.data_ptr()) // self._needed.row_bytes for view in views]
        of = np.searchsorted([record for _, record in records], numbers // self._each)
        return self._slots, np.array(firsts)[of] + numbers % self._each

    def _following(self, used: Mapping[Key, Parts]) -> list[Wanted]:
        return [Wanted(key, parts) for key, parts in self._ahead.items() if key not in used]
