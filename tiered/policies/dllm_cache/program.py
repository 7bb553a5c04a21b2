"""A step over an answer with cached branches, which recomputes all of its rows in a layer, or those that moved most.

Attention and MLP each add one vector to a row. If both are cached, a row passes a layer without being recomputed. So
dLLM-Cache (arXiv 2506.06295) can recompute other rows in every layer, those whose values are least similar to the
cached ones (section 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Forward, add_branch
from tiered.forward.passes import Pass
from tiered.kernels.coded_rows import Heads
from tiered.kernels.host_values import on_device
from tiered.kernels.rms_norm_ref import Hidden

# Below this distance between directions (cosine 1 − 5e-7) a movement may be rounding. Rounding must not choose among
# still rows, or a sequence's answer in a batch would differ from that alone.
STILL = 2**-10
_TINY = 1e-30  # length of a row of zeros


@dataclass(frozen=True, slots=True)
class BranchWork:
    """The work of a step, by sequence of the forward; with guidance, the unconditional ones follow.

    Attributes:
        first: first column to recompute: 0 with the prompt, else the answer's first or that of the row that predicts
            it; the canvas's length for a sequence that waits.
        rows: rows of the answer that every layer recomputes; 0 for a sequence that waits.
        clocks: forwards of the sequence so far.
        due: whether the prompt is due, and whether the answer is; both False for a sequence that waits.
    """

    first: Sequence[int]
    rows: Sequence[int]
    clocks: Sequence[int]
    due: Sequence[tuple[bool, bool]]


class BranchStep:
    """Layer program over a span of rows: the answer, preceded by the prompt if any sequence's prompt is due.

    If every sequence recomputes its whole answer, a layer is a plain one that also keeps the answer's branches.
    Otherwise it recomputes a sequence's farthest rows, and adds cached branches to the others. Filler rows, computed
    but never written, make all sequences equally long.
    """

    def __init__(self, work: BranchWork, answer: tuple[int, int], block: tuple[int, int]) -> None:
        """`answer`, `block`: first column, and the column after the last, of the answer and of the rows whose logits
        the step needs."""
        self._work = work
        self._start, self._stop = answer
        self._head = self._start - min(work.first)  # rows in front of the answer
        # Its rows in the answer, at least the first: where a row predicts the next token, a block of one token may have
        # its row in front of the answer.
        first = max(0, block[0] - self._start)
        self._block = (first, max(first + 1, block[1] - self._start))

    def expected_rows(self, span: int) -> float:
        """Mean rows of the first sequence that a layer recomputes, of the `span` rows of the step."""
        return span - (self._stop - self._start - self._work.rows[0])

    def __call__(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        if layer == 0:
            self._begin(pass_)
        answer, counts = self._stop - self._start, self.counts(layer)
        if all(count == answer for count, here in zip(counts, self._here, strict=True) if here):
            return self._whole(forward, layer, pass_)
        return self._chosen(forward, layer, pass_, counts)

    def counts(self, layer: int) -> Sequence[int]:
        """Number of the answer's rows that each sequence recomputes in `layer`."""
        return self._rows

    def _begin(self, pass_: Pass) -> None:
        work, batch = self._work, len(pass_.hidden)
        columns = pass_.rows.index
        first = on_device(work.first[:batch], columns.device)[:, None]
        self._here = [column < self._stop for column in work.first[:batch]]
        self._rows = list(work.rows[:batch])
        everywhere = all(column == min(work.first) for column in work.first[:batch])
        self._span = replace(pass_.rows, valid=None if everywhere else columns >= first)
        # A still row may attend to moved rows, as a mask does in the first layer, so still rows take turns. One of the
        # chosen rows is usually the token that was committed last.
        length = self._block[1] - self._block[0]
        starts = [clock * max(1, rows - 1) % length for clock, rows in zip(work.clocks, self._rows, strict=False)]
        self._turns = turns_of(on_device(starts, columns.device), self._stop - self._start, self._block)

    def _first_needed(self, forward: Forward, layer: int, pass_: Pass) -> int:
        """First of the rows before the answer that are needed after the layer."""
        return min(self._head, pass_.output.start) if layer == forward.model.shape.layers - 1 else 0

    def _whole(self, forward: Forward, layer: int, pass_: Pass) -> Pass:
        rows, hidden, first = self._span, pass_.hidden, self._first_needed(forward, layer, pass_)
        keep = partial(self._keep, forward, layer, first)
        forward.write(layer, rows, hidden)
        forward.attend(layer, rows[first:], hidden[:, first:], keep=keep, waits=True)
        forward.mlp(layer, hidden[:, first:], keep=keep)
        return replace(pass_, computed=rows.count)

    def _keep(self, forward: Forward, layer: int, first: int, feature: Feature, part: slice, branch: Hidden) -> None:
        skipped = max(0, self._head - first - part.start)
        if skipped < branch.shape[1]:
            rows = self._span[first + part.start + skipped : first + part.stop]
            forward.store.write(feature, layer, rows, branch[:, None, skipped:])

    def _chosen(self, forward: Forward, layer: int, pass_: Pass, counts: Sequence[int]) -> Pass:
        """Recompute the prompt, if present, and the answer's farthest rows. All keys and values are written before any
        row attends."""
        model, store, head = forward.model, forward.store, self._head
        prompt, answer = pass_.hidden[:, :head], pass_.hidden[:, head:]
        forward.write(layer, self._span[:head], prompt)
        rows = self._farthest(forward, layer, answer, counts)
        parts = [rows[part] for part in forward.parts(rows.count, len(answer))]
        for part in parts:
            forward.write_keys_values(layer, part, self._taken(answer, part))
        needed = slice(self._first_needed(forward, layer, pass_), head)
        forward.attend(layer, self._span[needed], prompt[:, needed], waits=True)
        forward.mlp(layer, prompt[:, needed])
        for part in parts:
            branch = forward.attention(layer, part, model.attention_norm(layer, self._taken(answer, part)))
            store.write(Feature.ATTN_OUT, layer, part, branch[:, None])
            del branch
        add_branch(answer, slice(None), store.view(Feature.ATTN_OUT, layer)[:, 0])
        for part in parts:
            branch = model.feed_forward(layer, self._taken(answer, part), forward.note_picks)
            store.write(Feature.FFN_OUT, layer, part, branch[:, None])
            del branch
        add_branch(answer, slice(None), store.view(Feature.FFN_OUT, layer)[:, 0])
        return replace(pass_, computed=self._head + rows.count)

    def _farthest(self, forward: Forward, layer: int, hidden: Hidden, counts: Sequence[int]) -> Rows:
        most, answer = max(counts), range(self._start, self._stop)
        if not most:
            return Rows.at(torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device), within=answer)
        ranked = self._ranked(forward, layer, hidden)
        index, valid = ranked[:, :most] + self._start, None
        if min(counts) < most:
            numbers = torch.arange(most, device=index.device)
            valid = numbers < on_device(counts, index.device)[:, None]
        return Rows.at(index, valid, within=answer)

    @spanned(Op.VERIFY)
    def _ranked(self, forward: Forward, layer: int, hidden: Hidden) -> Int[Tensor, "batch rows"]:
        answer = self._span[self._head :]
        parts = forward.parts(answer.count, len(hidden))
        moved = [self.moved(forward, layer, answer[part], hidden[:, part]) for part in parts]
        return farthest_first(torch.cat(moved, dim=1), self._turns)

    def moved(self, forward: Forward, layer: int, rows: Rows, hidden: Hidden) -> Float32[Tensor, "batch rows"]:
        """Distance of each row's values from the cached ones; `hidden`: the layer's input."""
        values = forward.model.values(layer, forward.model.attention_norm(layer, hidden))
        return distances(values, forward.store.rows(Feature.VALUE, layer, rows))

    @spanned(Op.GATHER)
    def _taken(self, hidden: Float[Tensor, "batch answer width"], rows: Rows) -> Hidden:
        return hidden.gather(1, (rows.index - self._start)[:, :, None].expand(-1, -1, hidden.shape[2]))


def distances(new: Heads, cached: Heads) -> Float32[Tensor, "batch rows"]:
    """Distance of each row's direction, over all heads, from the cached one; 0 if it may be rounding. It is √(2 −
    2·cos), which orders rows as the cosine does, and stays exact when the cosine rounds to 1."""
    difference = (new / _length(new)).sub_(cached / _length(cached))
    apart = torch.linalg.vector_norm(difference, dim=(1, 3), dtype=torch.float32)
    return apart.masked_fill_(apart <= STILL, 0.0)


def farthest_first(apart: Float32[Tensor, "batch rows"], turns: Int[Tensor, "batch rows"]) -> Int[Tensor, "batch rows"]:
    """The rows by falling distance; rows of equal distance are in the order of `turns`, which has every row once."""
    return turns.gather(1, apart.gather(1, turns).argsort(dim=1, descending=True, stable=True))


def turns_of(starts: Int[Tensor, " batch"], rows: int, block: tuple[int, int]) -> Int[Tensor, "batch rows"]:
    """The rows of the current `block`, rotated to begin with its row number `starts[b]`; then the rows behind it, then
    those before it. `block`: its first row, and the row after its last."""
    first, count = block[0], block[1] - block[0]
    numbers = torch.arange(rows, device=starts.device)
    return (first + torch.where(numbers < count, (numbers + starts[:, None]) % count, numbers)) % rows


def _length(rows: Heads) -> Float32[Tensor, "batch 1 rows 1"]:
    return torch.linalg.vector_norm(rows, dim=(1, 3), keepdim=True, dtype=torch.float32).clamp_(min=_TINY)
