"""Books: what the updates of a call did, layer by layer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUpdate:
    """One layer in one forward that updates.

    Attributes:
        forward: number of the forward in the call, from 0.
        layer: which.
        drift: KL of every cluster since its sequence's last update, by sequence; empty where a sequence did not update.
        clusters: the clusters that were renewed, by sequence, in the order of their drift.
        rows: rows recomputed beside those of a plain step, by sequence.
        patched: clusters whose stored rows were replaced, by sequence.
        fetched_bytes: bytes of the records that were asked for, repairs of partly patched clusters included.
        ahead, on_demand, in_vain, skipped: clusters by how they came, see `FetchCounts`.
        repairs: clusters that were fetched because only some of their members were patched.
    """

    forward: int
    layer: int
    drift: Sequence[Sequence[float]]
    clusters: Sequence[Sequence[int]]
    rows: Sequence[int]
    patched: Sequence[int]
    fetched_bytes: int
    ahead: int
    on_demand: int
    in_vain: int
    skipped: int
    repairs: int

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return asdict(self)
