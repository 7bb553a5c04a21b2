"""Books: records of a call's updates, by group of layers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """The update of one group of layers, which share their clusters, in one forward.

    Attributes:
        forward: number of the forward in the call, from 0.
        layer: first layer of the group, in which drift is measured and clusters are chosen.
        layers: number of layers of the group; the last layer of the model is in no group.
        drift: drift of every cluster since its sequence's last update, by sequence; empty if a sequence did not update.
        clusters: updated clusters, by sequence, in the order of their drift.
        rows: rows recomputed in each layer beside those of a plain step, by sequence.
        patched: number of clusters whose stored rows were replaced, by sequence.
        fetched_bytes: bytes of all fetched records, including wrong guesses and repairs.
        ahead: number of clusters fetched on a right guess.
        on_demand: number of clusters fetched after they were chosen.
        in_vain: number of clusters fetched on a wrong guess.
        repairs: number of clusters fetched because only some of their members were recomputed.
    """

    forward: int
    layer: int
    layers: int
    drift: Sequence[Sequence[float]]
    clusters: Sequence[Sequence[int]]
    rows: Sequence[int]
    patched: Sequence[int]
    fetched_bytes: int = 0
    ahead: int = 0
    on_demand: int = 0
    in_vain: int = 0
    repairs: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
