"""Experts of a model that the device has no room for. Experts that routers pick are fetched to slots, and stay until
another expert needs the slot.

A layer's experts are used in groups: first those that are in slots, then the others as they arrive. While one group is
used, the other groups are fetched. After them come guesses: experts that the next layer's router picks for this layer's
input. A wrong guess costs a copy and changes no answer. So only guesses of a kind that was mostly right are fetched.
"""

import weakref
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
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
SURE = 0.95  # least share of right guesses for a kind to be fetched, among its last 128 to 256 guesses
MEMORY = 128
MOST_ROWS = 4  # rows that a kind tells apart: an expert that 4 rows would pick is as sure as one that more would
_Kind = tuple[bool, int, bool, int]


class StreamedExperts:
    """The experts of all layers with a mixture, in the slots of one residency."""

    def __init__(self, records: WeightRecords, now: WeightBytes) -> None:
        assert now.experts is not None, "there are experts"
        self._records, self._experts = records, now.experts
        self._last: dict[int, frozenset[int]] = {}  # by layer, the experts that rows last picked
        self._guesses = _Guesses(records.layers[-1])
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
        self, layer: int, picked: Sequence[int], likely: Mapping[int, int]
    ) -> Iterator[tuple[Sequence[int], ExpertTable]]:
        """The `picked` experts of a layer, in groups. A group stays in slots until the next one is taken. `likely`: how
        many rows would pick an expert of the next layer, by expert.

        Raises:
            TransferError: a copy failed.
        """
        assert self._homes is not None, "experts are used in slots"
        residency = self._homes.residency
        ready, coming, missing = list[int](), list[int](), list[int]()
        for expert in picked:
            key = layer, expert
            into = ready if residency.ready(key) else coming if residency.has(key) else missing
            into.append(expert)
        foreseen = self._guesses.judge(layer, picked)
        self._homes.tiers.record(Picked(used=len(picked), resident=len(picked) - len(missing), foreseen=foreseen))
        self._last[layer] = frozenset(picked)
        absent = {expert for expert in likely if not residency.has((layer + 1, expert))}
        sure = self._guesses.make(layer + 1, likely, absent)
        # Copies of guesses are under way already, so those come before what is missing.
        groups = [*_split(ready, self._most), *_split(coming + missing, min(GROUP, self._most))]
        ahead = [Wanted((layer, expert)) for group in groups for expert in group]
        ahead += [Wanted((layer + 1, expert)) for expert in sure]
        for group in groups:
            wanted, ahead = ahead[: len(group)], ahead[len(group) :]
            with span(Op.WEIGHTS):
                slots = residency.use(wanted, ahead)
            gate_up: list[Matrix | None] = [None] * self._experts
            down = gate_up.copy()
            for expert, slot in zip(group, slots, strict=True):
                gate_up[expert], down[expert] = self._records.views(slot)
            yield group, ExpertTable(gate_up, down)


class _Guesses:
    """The experts that the next layer will probably pick. All likely ones are judged, whether they are fetched or not.

    The kind of a guess is how many rows would pick the expert, how often all rows would pick, and whether it has a
    slot. Most picks recur, so guesses of experts in slots are surer. A pass over a prompt picks nearly all experts, so
    that every guess is right, which says nothing of a step. It ends in front of the last layer's experts, so those are
    a kind of their own.
    """

    def __init__(self, last: int) -> None:
        """`last`: the last layer with experts."""
        self._last, self._layer = last, 0
        self._kinds: dict[int, _Kind] = {}  # of the last guesses, which are of `_layer`, by expert
        self._right = defaultdict[_Kind, float](float)
        self._made = self._right.copy()

    def make(self, layer: int, likely: Mapping[int, int], missing: Collection[int]) -> list[int]:
        """The `likely` experts of a kind that was mostly right, the surest first.

        Args:
            layer: the layer of the experts.
            likely: experts, and how many rows would pick each.
            missing: experts without a slot.
        """
        self._layer, of_all = layer, (layer == self._last, sum(likely.values()))
        self._kinds = {e: (*of_all, e in missing, min(rows, MOST_ROWS)) for e, rows in likely.items()}
        shares = {expert: self._share(kind) for expert, kind in self._kinds.items()}
        return sorted((expert for expert in likely if shares[expert] >= SURE), key=shares.__getitem__, reverse=True)

    def judge(self, layer: int, picked: Sequence[int]) -> int:
        """Compare the last guesses with the experts that `layer` picked; returns how many of these were guessed. If it
        is another layer than theirs, all were wrong."""
        picked = picked if layer == self._layer else ()
        for expert, kind in self._kinds.items():
            self._made[kind] += 1
            self._right[kind] += expert in picked
            if self._made[kind] >= 2 * MEMORY:
                self._made[kind], self._right[kind] = self._made[kind] / 2, self._right[kind] / 2
        return sum(expert in self._kinds for expert in picked)

    def _share(self, kind: _Kind) -> float:
        return self._right[kind] / self._made[kind] if self._made[kind] else 0.0


def _split(experts: list[int], most: int) -> list[list[int]]:
    return [experts[start : start + most] for start in range(0, len(experts), most)]


def _recurs(last: Mapping[int, frozenset[int]], key: Hashable) -> bool:
    """Whether rows picked this expert when they last went through its layer, and so will probably pick it again."""
    assert isinstance(key, tuple), "an expert's"
    layer, expert = key
    return expert in last.get(layer, ())
