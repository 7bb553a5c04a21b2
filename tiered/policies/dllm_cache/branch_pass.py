"""One pass over an answer whose branches are cached: in each layer, all of its rows or those that have moved most."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.costs import part_rows
from tiered.forward.forward import Flow, Forward, add_branch
from tiered.kernels.host_values import on_device
from tiered.policies.dllm_cache.prompt_edge import PromptEdge
from tiered.policies.dllm_cache.verify import Verifier
from tiered.policies.dllm_cache.work import Work


class BranchPass:
    """Layer program over a span of rows: the answer, and the prompt in front of it where some sequence's is due.

    Where every sequence renews its whole answer, a layer is a plain one that also keeps the answer's branches. Else it
    recomputes a sequence's farthest rows, and adds cached branches to all others. Sequences may ask for different
    numbers of rows; filler that is computed and never written makes them even.
    """

    def __init__(
        self,
        work: Work,
        answer: tuple[int, int],
        verifier: Verifier,
        *,
        block: int,
        whole_layers: int = 0,
        edge: PromptEdge | None = None,
    ) -> None:
        """
        Args:
            work: what is due.
            answer: its columns, first and behind the last, the canvas's length.
            verifier: ranks rows.
            block: the current block's first row, by its column.
            whole_layers: layers, the first ones, in which whoever takes part renews the whole answer.
            edge: keeps the rows in front of the answer that a pass takes in where the prompt is not due; None: they are
                recomputed.
        """
        self._work, self._verifier, self._whole_layers, self._edge = work, verifier, whole_layers, edge
        self._start, self._stop = answer
        self._block = max(0, block - self._start)

    def __call__(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        if layer == 0:
            self._begin(flow)
        answer = self._stop - self._start
        counts = [answer if whole else 0 for whole in self._here] if layer < self._whole_layers else self._rows
        if all(count == answer for count, here in zip(counts, self._here, strict=True) if here):
            flow = self._whole(forward, layer, flow)
        else:
            flow = self._chosen(forward, layer, flow, counts)
        if self._edge is not None:
            self._pass_over(self._edge, flow.hidden, layer, forward.model.shape.layers - 1)
        return flow

    def _pass_over(self, edge: PromptEdge, hidden: Float[Tensor, "batch rows width"], layer: int, last: int) -> None:
        """Let rows in front of the answer leave no trace behind the first layer, where the prompt is not due."""
        rows = hidden[:, self._head - edge.rows : self._head]
        due = on_device([prompt for prompt, _ in self._work.due[: len(hidden)]], hidden.device)
        if layer == 0:
            edge.enter(rows)
            columns = self._span.positions(len(hidden), hidden.device)
            passed = ~due[:, None] & (columns < self._start)
            self._span = replace(self._span, valid=~passed if self._span.valid is None else self._span.valid & ~passed)
        if layer == last:
            edge.leave(rows, due)

    def _begin(self, flow: Flow) -> None:
        work, batch = self._work, len(flow.hidden)
        assert flow.rows.start is not None, "the pass goes over a span"
        columns = flow.rows.positions(batch, flow.hidden.device)
        first = on_device(work.first[:batch], columns.device)[:, None]
        self._here = [column < self._stop for column in work.first[:batch]]
        self._rows = list(work.rows[:batch])
        everywhere = all(column == flow.rows.start for column in work.first[:batch])
        self._span = Rows(flow.rows.count, flow.rows.start, valid=None if everywhere else columns >= first)
        self._head = self._start - flow.rows.start  # rows in front of the answer

    def _first_needed(self, forward: Forward, layer: int, flow: Flow) -> int:
        """Of the rows in front of the answer, those from here on are needed behind the layer."""
        return min(self._head, flow.output.start) if layer == forward.model.shape.layers - 1 else 0

    def _whole(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        """A plain layer, whose branches are kept."""
        model, rows, hidden = forward.model, self._span, flow.hidden
        size = part_rows(len(hidden))
        self._write(forward, layer, rows, hidden, size)
        for part in _parts(self._first_needed(forward, layer, flow), rows.count, size):
            branch = forward.attention(layer, rows[part], model.attention_norm(layer, hidden[:, part]))
            self._keep(forward, Feature.ATTN_OUT, layer, part, branch)
            add_branch(hidden, part, branch)
            del branch  # not held while the MLP runs
            branch = model.feed_forward(layer, hidden[:, part])
            self._keep(forward, Feature.FFN_OUT, layer, part, branch)
            add_branch(hidden, part, branch)
        return Flow(flow.rows, hidden, flow.output, computed=rows.count)

    def _keep(
        self, forward: Forward, feature: Feature, layer: int, part: slice, branch: Float[Tensor, "batch rows width"]
    ) -> None:
        """Store what of a part's branch belongs to the answer."""
        skipped = max(0, self._head - part.start)
        if skipped < branch.shape[1]:
            rows = self._span[part.start + skipped : part.stop]
            forward.store.write(feature, layer, rows, branch[:, None, skipped:])

    def _chosen(self, forward: Forward, layer: int, flow: Flow, counts: Sequence[int]) -> Flow:
        """The prompt, where it is there, and the answer's farthest rows; keys and values of all of them before any
        attends."""
        model, store, size = forward.model, forward.store, part_rows(len(flow.hidden))
        prompt, answer = flow.hidden[:, : self._head], flow.hidden[:, self._head :]
        prompt_rows = self._span[: self._head]
        self._write(forward, layer, prompt_rows, prompt, size)
        rows = self._farthest(forward, layer, answer, counts)
        for part in rows.parts(size):
            forward.write_keys_values(layer, rows[part], model.attention_norm(layer, self._taken(answer, rows[part])))
        needed = self._first_needed(forward, layer, flow)
        for part in _parts(needed, self._head, size):
            normed = model.attention_norm(layer, prompt[:, part])
            add_branch(prompt, part, forward.attention(layer, prompt_rows[part], normed))
            del normed
            add_branch(prompt, part, model.feed_forward(layer, prompt[:, part]))
        for part in rows.parts(size):
            normed = model.attention_norm(layer, self._taken(answer, rows[part]))
            store.write(Feature.ATTN_OUT, layer, rows[part], forward.attention(layer, rows[part], normed)[:, None])
        add_branch(answer, slice(None), store.view(Feature.ATTN_OUT, layer)[:, 0])
        for part in rows.parts(size):
            branch = model.feed_forward(layer, self._taken(answer, rows[part]))
            store.write(Feature.FFN_OUT, layer, rows[part], branch[:, None])
            del branch
        add_branch(answer, slice(None), store.view(Feature.FFN_OUT, layer)[:, 0])
        return Flow(flow.rows, flow.hidden, flow.output, computed=self._head + rows.count)

    def _farthest(
        self, forward: Forward, layer: int, hidden: Float[Tensor, "batch rows width"], counts: Sequence[int]
    ) -> Rows:
        """The `counts[b]` rows of sequence b that have moved most, filler behind."""
        most, span = max(counts), (self._start, self._stop)
        if not most:
            return Rows.at(torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device), within=span)
        clocks = self._work.clocks[: len(hidden)]
        ranked = self._verifier.ranked(forward, layer, self._span[self._head :], hidden, clocks, self._block)
        index, valid = ranked[:, :most] + self._start, None
        if min(counts) < most:
            numbers = torch.arange(most, device=index.device)
            valid = numbers < on_device(counts, index.device)[:, None]
        return Rows.at(index, valid, within=span)

    @spanned(Op.GATHER)
    def _taken(self, hidden: Float[Tensor, "batch answer width"], rows: Rows) -> Float[Tensor, "batch rows width"]:
        """A copy of the answer's `rows`."""
        assert rows.index is not None, "farthest rows are scattered"
        return hidden.gather(1, (rows.index - self._start)[:, :, None].expand(-1, -1, hidden.shape[2]))

    @staticmethod
    def _write(forward: Forward, layer: int, rows: Rows, hidden: Float[Tensor, "batch rows width"], size: int) -> None:
        """Keys and values of `rows`, part by part."""
        for part in rows.parts(size):
            forward.write_keys_values(layer, rows[part], forward.model.attention_norm(layer, hidden[:, part]))


def _parts(first: int, stop: int, size: int) -> list[slice]:
    """Slices of at most `size` places that cover those from `first` to `stop`."""
    return [slice(start, min(start + size, stop)) for start in range(first, stop, size)]
