"""Experts of a model that the device has no room for. Experts that routers pick are fetched to slots, and stay until
another expert needs the slot.

A layer's experts are used in groups: first those that are in slots, then the others as they arrive. While one group is
used, the other groups are fetched, and then the experts that the next layer will probably pick. A wrong guess costs a
copy and changes no answer.
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial

from tiered.core.events import Picked
from tiered.core.ops import Op
from tiered.core.spans import span
from tiered.forward.weight_bytes import WeightBytes
from tiered.forward.weight_homes import WeightHomes
from tiered.forward.weight_records import WeightRecords
from tiered.kernels.expert_table import ExpertTable, Matrix
from tiered.tiers.parts import Wanted

GROUP = 8  # experts that arrive: few, so that copies overlap computation; several, so that they share one wait


class StreamedExperts:
    """The experts of all layers with a mixture, in the slots of one residency."""

    def __init__(self, records: WeightRecords, now: WeightBytes) -> None:
        assert now.experts is not None, "there are experts"
        self._records, self._experts = records, now.experts
        self._last: dict[int, frozenset[int]] = {}  # by layer, the experts that rows last picked
        self._guessed: frozenset[int] = frozenset()
        self._homes: WeightHomes | None = None
        self._most = 1
        self.recurs = partial(_recurs, self._last)

    def open(self, homes: WeightHomes, slots: int) -> None:
        """Let the model use experts in `slots`. A group takes half of them at most: the next one comes meanwhile."""
        self._homes, self._most = homes, max(1, slots // 2)
        self._last.clear()
        # No cycle: a runtime that is dropped gives its memory and threads back at once.
        self._records.model.streamed = weakref.proxy(self)

    def close(self) -> None:
        self._homes = self._records.model.streamed = None

    def groups(
        self, layer: int, picked: Sequence[int], likely: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], ExpertTable]]:
        """The `picked` experts of a layer, in groups. A group stays in slots until the next one is taken. `likely`:
        experts that rows will probably pick in the next layer.

        Raises:
            TransferError: a copy failed.
        """
        assert self._homes is not None, "experts are used in slots"
        residency, following = self._homes.residency, layer + 1
        ready = [expert for expert in picked if residency.ready((layer, expert))]
        coming = [expert for expert in picked if expert not in {*ready}]
        # Copies of guesses are under way; those of others follow them.
        missing = {expert for expert in coming if residency.missing(Wanted((layer, expert))).any()}
        coming.sort(key=missing.__contains__)
        foreseen = len(self._guessed.intersection(picked))
        self._homes.tiers.record(Picked(used=len(picked), resident=len(picked) - len(missing), foreseen=foreseen))
        self._last[layer], self._guessed = frozenset(picked), frozenset(likely)
        groups = [*_split(ready, self._most), *_split(coming, min(GROUP, self._most))]
        ahead = [Wanted((layer, expert)) for group in groups for expert in group]
        ahead += [Wanted((following, expert)) for expert in likely]
        for group in groups:
            wanted, ahead = ahead[: len(group)], ahead[len(group) :]
            with span(Op.WEIGHTS):
                slots = residency.use(wanted, ahead)
            gate_up: list[Matrix | None] = [None] * self._experts
            down = gate_up.copy()
            for expert, slot in zip(group, slots, strict=True):
                gate_up[expert], down[expert] = self._records.views(slot)
            yield group, ExpertTable(gate_up, down)


def _split(experts: list[int], most: int) -> list[list[int]]:
    return [experts[start : start + most] for start in range(0, len(experts), most)]


def _recurs(last: Mapping[int, frozenset[int]], key: Hashable) -> bool:
    """Whether rows picked this expert when they last went through its layer, and so will probably pick it again."""
    assert isinstance(key, tuple), "an expert's"
    layer, expert = key
    return expert in last.get(layer, ())
