"""A fetch under way: what was asked for, where it has got to, and the rows in the end."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.tiers.batches import Batch
from tiered.tiers.record import RecordKey
from tiered.tiers.record_book import Entry, nbytes_of

if TYPE_CHECKING:
    from tiered.tiers.fetches import Fetches


class Ticket:
    """What `TierManager.fetch` returns. `wait` gives the rows, in the order of the keys; or `close` gives it up.

    An open ticket holds staging slots, so every ticket has to be waited for or closed.

    Attributes:
        keys: what was asked for.
        shape: (rows, width) of the answer.
        nbytes: of the records.
    """

    def __init__(
        self,
        fetches: "Fetches",
        keys: Sequence[RecordKey],
        batches: Sequence[Batch],
        shape: tuple[int, int],
        check_open: Callable[[], None],
    ) -> None:
        self.keys = tuple(keys)
        self.shape = shape
        self._fetches = fetches
        self._check_open = check_open
        self._batches = list(batches)
        self.nbytes = sum(nbytes_of(batch.entries) for batch in batches)
        self._answer: tuple[Tensor, Tensor | None] | None = None  # `out` and `rows` of the first wait
        self._open = True

    def arrived(self) -> bool:
        """Whether compute would not have to wait. Never blocks."""
        self._fetches.send_waiting()
        return all(
            batch.tier is Tier.DEVICE or (batch.arrival is not None and batch.arrival.done()) for batch in self._batches
        )

    @property
    def set_out(self) -> bool:
        """Whether a part of it is in a staging slot, or needs none: a wait makes progress then."""
        return any(batch.buffer is not None for batch in self._batches)

    def unread(self) -> Iterator[Entry]:
        """The entries whose bytes no copy has been sent for: a reader of each is this ticket."""
        for batch in self._batches:
            if batch.reading:
                yield from batch.entries

    def wait(
        self,
        out: Float[Tensor, "any width"] | None = None,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> Float[Tensor, "any width"]:
        """Let compute wait for the records and decode them: row i of the answer goes to `out[rows[i]]`.

        On CUDA the host does not wait; the answer is ordered on the caller's current stream, as that of any kernel.

        Args:
            out: on the device, in any float dtype; None: a new tensor of `shape` in the manager's dtype.
            rows: distinct places in `out`; None: from its first row on.

        Raises:
            ValueError: waited for or closed before, or `out` or `rows` does not fit.
            TierCapacityError: tickets that nobody waits for hold every staging slot. The ticket stays open: wait again
                once that has changed, and the rest goes to the same `out`.
            RecordLostError, TransferError: a record's bytes are gone, or its copy failed. The ticket is closed.
        """
        if not self._open:
            raise ValueError("this ticket was waited for or closed already; fetch again")
        self._check_open()
        if self._answer is None:
            self._answer = self._checked(out, rows)
        elif out is not None and out is not self._answer[0]:
            raise ValueError("an earlier wait has written a part of the answer to another tensor; wait without `out`")
        out, rows = self._answer
        while self._batches:
            # Those that have set out give back the slots that the others wait for.
            batch = next((batch for batch in self._batches if batch.buffer is not None), self._batches[0])
            try:
                self._fetches.use(batch, out, rows)
            except TierCapacityError:
                raise
            except Exception:
                self.close()
                raise
            self._batches.remove(batch)
        self.close()
        return out

    def close(self) -> None:
        """Give up what has not been used. May be called again."""
        if self._open:
            self._open = False
            self._fetches.give_up(self, self._batches)
            self._batches.clear()

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, out: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        count, width = self.shape
        if out is None:
            if rows is not None:
                raise ValueError("rows say where in `out` each row goes: give `out` as well")
            out = torch.empty(count, width, dtype=self._fetches.dtype, device=self._fetches.device)
        if out.dim() != 2 or out.shape[1] != width or (rows is None and len(out) < count):
            raise ValueError(f"out has shape {tuple(out.shape)}; needed are {count} rows of width {width}")
        if rows is not None and (tuple(rows.shape) != (count,) or rows.dtype != torch.int64):
            raise ValueError(f"rows is {rows.dtype} {tuple(rows.shape)}; needed are {count} places in `out` as int64")
        return out, rows
