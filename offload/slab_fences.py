"""The fences of a slab book's slots, which outlive the slots: new users wait for what earlier users left unfinished."""

from collections.abc import Iterable

from tiered.offload.fence import Event, Fence, Region
from tiered.offload.slabs import BookedSlot


class SlabFences:
    """One fence a slot. Not for several threads, as the fences themselves."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._rooms: dict[int, int] = {}  # slab → the class that its fences are of
        self._fences: dict[int, dict[int, Fence]] = {}  # slab → slot → fence
        self._former: dict[int, list[tuple[int, int, Fence]]] = {}  # slab → (first byte, end, fence) of earlier classes

    def begin(self, slab: int, slab_bytes: int, earlier: Iterable[Event]) -> None:
        """A new slab: `earlier` is under way on its bytes already."""
        self._former[slab] = [(0, slab_bytes, Fence(self.region, earlier))]

    def end(self, slab: int) -> list[Fence]:
        """A slab goes. Returns its fences with an access under way."""
        self._rooms.pop(slab, None)
        fences = [*self._fences.pop(slab, {}).values(), *(fence for _, _, fence in self._former.pop(slab, []))]
        return [fence for fence in fences if not fence.idle()]

    def fence(self, booked: BookedSlot) -> Fence:
        """The fence of a slot that was just booked. It waits for every unfinished access to any of its bytes.

        An access by an earlier user counts when that user's fence knew of it before the slot was released.
        """
        slab, room = booked.slab, booked.room
        if self._rooms.get(slab) != room:
            self._recut(slab, room)
        fences = self._fences[slab]
        fence = fences.get(booked.index)
        # An idle fence may end in a failed copy, which is no business of the new user.
        if fence is None or fence.idle():
            first, end = booked.index * room, (booked.index + 1) * room
            former = self._former[slab]
            former[:] = [(start, stop, old) for start, stop, old in former if not old.idle()]
            fence = fences[booked.index] = Fence(self.region)
            fence.inherit(old for start, stop, old in former if start < end and first < stop)
        return fence

    def unfinished(self) -> list[Fence]:
        """The fences with an access under way, of slots in use and of released ones."""
        current = [fence for fences in self._fences.values() for fence in fences.values()]
        former = [fence for entries in self._former.values() for _, _, fence in entries]
        return [fence for fence in [*current, *former] if not fence.idle()]

    def _recut(self, slab: int, room: int) -> None:
        """The slab changes its class: what is unfinished in its old slots is kept by bytes."""
        old = self._rooms.get(slab, 0)
        former = self._former.setdefault(slab, [])
        former += [(index * old, (index + 1) * old, fence) for index, fence in self._fences.get(slab, {}).items()]
        self._rooms[slab] = room
        self._fences[slab] = {}
