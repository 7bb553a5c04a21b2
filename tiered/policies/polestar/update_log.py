"""Books: what the updates of a call did, group of layers by group."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """One group of layers that share their clusters, in one forward that updates.

    Attributes:
        forward: number of the forward in the call, from 0.
        layer: the first layer of the group. Drift is measured and clusters are chosen there.
        layers: layers of the group; the last layer of the model is in no group.
        drift: KL of every cluster since its sequence's last update, by sequence; empty if a sequence did not update.
        clusters: the clusters that were renewed, by sequence, in the order of their drift.
        rows: rows recomputed in each of the layers beside those of a plain step, by sequence.
        patched: clusters whose stored rows were replaced, by sequence.
        fetched_bytes: bytes of all records that were fetched, of wrong guesses and of repairs too.
        ahead: clusters fetched on a right guess.
        on_demand: clusters fetched after they were chosen.
        in_vain: clusters fetched on a wrong guess.
        repairs: clusters fetched because only some of their members were recomputed.
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
