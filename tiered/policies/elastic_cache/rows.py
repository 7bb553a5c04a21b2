"""The rows of a step of Elastic-Cache, and the rows that join when a sequence begins to recompute all of its rows.

    rows of a step   | predicting | window, just committed | tracked tokens | all others of the sequences that are due |
    numbered up to   0         output                     near            count                             rows.count

The window is the first masked columns of each sequence; the first rows predict its candidates. The last group is in the
step of a sequence that is due, or joins later (`Widening`).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.canvas import PENDING, PROMPT
from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows, rows_where
from tiered.core.spans import spanned
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.host_values import on_device
from tiered.models.shape import ModelShape
from tiered.policies.base import Step

NONE = -1  # column for no tracked token


class Tracked:
    """Columns and last queries of the most attended tokens of each layer and sequence. The last layer tracks none.

    The previous step's attention is recomputed from the queries and the keys that are still in the cache. A query takes
    `head_dim` numbers a head, an attention row one for each column.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: Int[Tensor, "layers batch tracked"] | None = None
        self._queries: Float[Tensor, "layers batch heads tracked head_dim"] | None = None

    def begin(self, shape: ModelShape, batch: int, length: int, like: Tensor) -> None:
        """Allocate before the first step; `like`: a tensor with the dtype and device of queries."""
        if self._columns is None:
            layers, count = shape.layers - 1, min(self._count, length)
            self._columns = torch.full((layers, batch, count), NONE, device=like.device)
            self._queries = like.new_zeros(layers, batch, shape.heads, count, shape.head_dim)

    @property
    def count(self) -> int:
        assert self._columns is not None, "a step begins with `begin`"
        return self._columns.shape[2]

    def columns(self, layer: int) -> Int[Tensor, "batch tracked"]:
        """Columns of the tokens of `layer`; `NONE` if fewer tokens are committed."""
        assert self._columns is not None, "a step begins with `begin`"
        return self._columns[layer]

    def queries(self, layer: int) -> Float[Tensor, "batch heads tracked head_dim"]:
        """Queries of the tokens of `layer` in the last step."""
        assert self._queries is not None, "a step begins with `begin`"
        return self._queries[layer]

    def put(
        self,
        layer: int,
        columns: Int[Tensor, "batch tracked"],
        queries: Float[Tensor, "batch heads tracked head_dim"],
        here: Bool[Tensor, " batch #tracked"],
    ) -> None:
        """Track other tokens in `layer`, where `here` is True."""
        kept = self.columns(layer)
        torch.where(here, columns, kept, out=kept)
        self.put_queries(layer, queries, here)

    def put_queries(
        self, layer: int, queries: Float[Tensor, "batch heads tracked head_dim"], here: Bool[Tensor, " batch #tracked"]
    ) -> None:
        """Replace queries of the tokens of `layer`, where `here` is True."""
        kept = self.queries(layer)
        torch.where(here[:, None, :, None], queries, kept, out=kept)

    def mask(self, committed: Bool[Tensor, "batch length"]) -> Bool[Tensor, "batch length"]:
        """True at the tokens that any layer tracks, with the shape of `committed`."""
        batch, length = committed.shape
        mask = committed.new_zeros(batch, length + 1)
        if self._columns is not None:
            columns = self._columns.transpose(0, 1).flatten(1)
            mask.scatter_(1, columns.where(columns != NONE, length), True)
        return mask[:, :length]

    def keep(self, sequences: list[int]) -> None:
        if self._columns is not None and self._queries is not None:
            self._columns, self._queries = self._columns[:, sequences], self._queries[:, sequences]


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The rows at a step's beginning.

    Attributes:
        rows, output, near, count: as in the table above, with filler behind the rows of each kind.
        others: rows behind the first `count`, of every sequence; None if no sequence is due.
        window: first masked columns of each sequence, whose attention is summed.
        in_window: False at filler of `window`.
        committed: True for columns with a fixed token.
        active, due: True for sequences in the step, and for those that recompute every row.
        all_active, all_due: whether all sequences are active, and whether all active ones are due.
    """

    rows: Rows
    output: slice
    near: int
    count: int
    others: Rows | None
    window: Int[Tensor, "batch window"]
    in_window: Bool[Tensor, "batch window"]
    committed: Bool[Tensor, "batch length"]
    active: Bool[Tensor, " batch"]
    due: Bool[Tensor, " batch"]
    all_active: bool
    all_due: bool


def step_rows(step: Step, window: int, tracked: Tracked, due: tuple[bool, ...]) -> WindowRows:
    """Rows of a step with the first `window` masked columns of each sequence, which may be beyond the block. `due`:
    True for sequences that recompute every row. Waiting sequences have no rows."""
    canvas = step.canvas
    device = canvas.tokens.device
    active, forwards = (on_device(values, device) for values in (step.active, step.forwards))
    masked = canvas.committed_at == PENDING
    first = masked & (masked.cumsum(dim=1) <= window) & active[:, None]
    candidates = first.clone()
    candidates[:, step.stop :] = False
    # Row r predicts column r + shift. The roll does not wrap around, because a prompt comes first.
    predicting = candidates.roll(step.first_row - step.start, dims=1)
    recent = (canvas.committed_at == forwards[:, None] - 1) & (canvas.committed_at > PROMPT)
    here = active[:, None].expand_as(masked)
    everything = [here] if any(due) else []
    rows, counts = rows_where(predicting, (first | recent) & here, tracked.mask(masked) & here, *everything)
    near, count = sum(counts[:2]), sum(counts[:3])
    all_due = due == step.active
    is_due = on_device(due, device)
    others = rows[count:] if everything else None
    if others is not None and not all_due:
        behind = torch.arange(rows.count, device=device) >= count
        rows = rows.only(~behind | is_due[:, None])
    most = min(window, canvas.length - canvas.prompt_length)
    columns = first.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    key_mask = canvas.key_mask()
    return WindowRows(
        rows=rows,
        output=slice(0, counts[0]),
        near=near,
        count=count,
        others=others,
        window=columns,
        in_window=first.gather(1, columns),
        committed=~masked if key_mask is None else ~masked & key_mask,
        active=active,
        due=is_due,
        all_active=all(step.active),
        all_due=all_due,
    )


class Widening:
    """The rows of a running step: its own first, followed by all others as soon as any sequence needs them.

    Attributes:
        full: True for sequences that recompute every row.
        narrow: True for active sequences that do not.
        settled: whether no sequence is narrow.
        place: number of each column's row among the valid rows; −1 for no row.
    """

    def __init__(self, step: WindowRows, pass_: Pass, length: int) -> None:
        self.full, self.settled = step.due.clone(), step.all_due
        self.narrow = step.active & ~step.due
        self._step, self._others = step, step.others
        self._twice = len(pass_.hidden) > len(step.due)
        self._length = length
        self.place = self._places(pass_.rows)

    def others(self) -> Int[Tensor, ""]:
        """Most rows of a sequence that are missing in the step; 0 after they were added."""
        if self._others is not None:
            return self.place.new_zeros(())
        return ((self.place < 0) & self._step.active[:, None]).sum(dim=1).amax()

    @spanned(Op.GATHER)
    def widened(self, forward: Forward, layer: int, pass_: Pass, moved: Bool[Tensor, " batch"], others: int) -> Pass:
        """`pass_` with all rows of the sequences in `full`. Rows of `moved` begin with the stored hidden states of
        `layer`. `others`: result of `others()`."""
        count, hidden = self._step.count, pass_.hidden
        if self._others is None:
            self._others = self._beside(others)
            hidden = hidden.new_empty(len(hidden), count + others, hidden.shape[2])
            hidden[:, :count] = pass_.hidden
        behind = self._others.doubled() if self._twice else self._others
        begin, full = self._both(moved)[:, None, None], self._both(self.full)[:, None]
        stored = forward.store.view(Feature.HIDDEN, layer)
        for part in forward.parts(behind.count, len(hidden)):
            values, target = behind[part].take(stored)[:, 0], hidden[:, count:][:, part]
            if hidden is pass_.hidden:
                torch.where(begin, values, target, out=target)
            else:
                target.copy_(values)
        front, behind = pass_.rows[:count], behind.only(full)
        rows = Rows.at(torch.cat([front.index, behind.index], dim=1), torch.cat([front.flags, behind.flags], dim=1))
        self.place = self._places(rows)
        return replace(pass_, rows=rows, hidden=hidden)

    def widen(self, moved: Bool[Tensor, " batch"]) -> None:
        """Mark `moved`, which are narrow, as full."""
        self.full |= moved
        self.narrow ^= moved

    def _beside(self, count: int) -> Rows:
        beside = self.place < 0
        index = beside.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        valid = torch.arange(count, device=index.device) < beside.sum(dim=1, keepdim=True)
        return Rows.at(index, valid & self._step.active[:, None])

    def _places(self, rows: Rows) -> Int[Tensor, "batch length"]:
        index, valid = rows.index[: len(self.full)], rows.flags[: len(self.full)]
        numbers = torch.arange(rows.count, device=index.device).expand_as(index)
        # One more column receives the invalid rows.
        place = index.new_full((len(index), self._length + 1), -1)
        return place.scatter_(1, index.where(valid, self._length), numbers)[:, : self._length]

    def _both(self, mask: Bool[Tensor, " batch"]) -> Bool[Tensor, " sequences"]:
        return torch.cat([mask, mask]) if self._twice else mask
