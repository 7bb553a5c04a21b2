"""Books: which slots of a ring are held. Integers only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hold:
    """The right to use slot `index`, from one acquire to its release; `turn` tells it from the holds before it."""

    index: int
    turn: int


class RingBooks:
    """`slots` slots that are handed out round robin.

    Raises:
        ValueError: fewer than one slot.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots = {slots} must be 1 or more")
        self.slots = slots
        self._holds: list[Hold | None] = [None] * slots
        self._next = 0  # where the search begins: the slot that has rested longest, if it is free
        self._turn = 0

    @property
    def held(self) -> int:
        """Slots that are held now."""
        return sum(hold is not None for hold in self._holds)

    def acquire(self) -> Hold | None:
        """The next free slot, in order of their numbers; None where all are held."""
        for step in range(self.slots):
            index = (self._next + step) % self.slots
            if self._holds[index] is None:
                self._next = (index + 1) % self.slots
                self._turn += 1
                self._holds[index] = hold = Hold(index, self._turn)
                return hold
        return None

    def holds(self, hold: Hold) -> bool:
        """Whether `hold` has not been released."""
        return self._holds[hold.index] is hold

    def release(self, hold: Hold) -> None:
        """Give the slot back.

        Raises:
            ValueError: released before, or never handed out by this ring.
        """
        if not (0 <= hold.index < self.slots and self.holds(hold)):
            raise ValueError(f"slot {hold.index} is not held (any more) by turn {hold.turn}: it was released before")
        self._holds[hold.index] = None

    def check_integrity(self) -> None:
        """Raise RuntimeError with the numbers where the books contradict themselves."""
        turns = [hold.turn for hold in self._holds if hold is not None]
        misplaced = [hold for index, hold in enumerate(self._holds) if hold is not None and hold.index != index]
        if misplaced or len(set(turns)) != len(turns) or any(turn > self._turn for turn in turns):
            raise RuntimeError(f"ring of {self.slots} slots, turn {self._turn}: holds {self._holds}")
        if not (len(self._holds) == self.slots and 0 <= self._next < self.slots):
            raise RuntimeError(f"ring of {self.slots} slots has {len(self._holds)} and goes on at {self._next}")
