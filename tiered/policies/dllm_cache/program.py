"""A step over an answer whose branches are cached: in each layer, all of its rows or those that have moved most.

Attention and MLP add one vector each to a row; where both are cached, a row that is not recomputed still passes its
layer. That is how dLLM-Cache (arXiv 2506.06295) renews other rows in every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.forward import Flow, Forward, add_branch
from tiered.kernels.host_values import on_device
from tiered.policies.dllm_cache.verify import Verifier, turns_of


@dataclass(frozen=True, slots=True)
class Work:
    """What a step recomputes, by sequence of the forward; with guidance, the unconditional ones follow.

    Attributes:
        first: first column that is recomputed: 0, where the prompt is; the answer's first (or that of the row that
            predicts it), where it is not; the canvas's length, where the sequence takes no part.
        rows: how many rows of the answer are recomputed in every layer; 0 where the sequence takes no part.
        clocks: forwards that the sequence has taken part in.
        due: whether its prompt is due, and its answer; neither is where it takes no part.
    """

    first: Sequence[int]
    rows: Sequence[int]
    clocks: Sequence[int]
    due: Sequence[tuple[bool, bool]]


class PromptEdge:
    """The prompt's last row between renewals of the prompt, as dLLM-Cache's authors have it where it predicts a token.

    Where predictions are shifted (Dream), that row predicts the answer's first token. In the authors' code (commit
    17235bff) it is a row of the prompt: from one renewal to the next only its first layer is computed afresh, and all
    other layers add what they added last, which is what this keeps.

    `rows`: how many of them there are, 1 for every family with shifted predictions so far.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._added: Float[Tensor, "batch rows width"] | None = None
        self._entered: Float[Tensor, "batch rows width"] | None = None

    def enter(self, hidden: Float[Tensor, "batch rows width"]) -> None:
        """The first layer has left `hidden` at the row."""
        self._entered = hidden.clone()

    def leave(self, hidden: Float[Tensor, "batch rows width"], renewed: Bool[Tensor, " batch"]) -> None:
        """The last layer has left `hidden`, which stays where the prompt is `renewed`, and is overwritten elsewhere. A
        batch may be the first sequences alone of those that have been there."""
        assert self._entered is not None, "the first layer is in front of the last"
        added = hidden - self._entered
        if self._added is None:
            self._added = added
        kept = self._added[: len(hidden)]
        kept.copy_(added.where(renewed[:, None, None], kept))
        hidden.copy_(self._entered.add_(kept))
        self._entered = None

    def keep(self, sequences: list[int], batch: int) -> None:
        """Go on with these sequences of a batch of `batch` alone (ascending), and with their second canvases."""
        if self._added is not None:
            firsts = range(0, len(self._added), batch)
            self._added = self._added[[first + number for first in firsts for number in sequences]]


class BranchStep:
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
        block: tuple[int, int],
        whole_layers: int = 0,
        edge: PromptEdge | None = None,
    ) -> None:
        """
        Args:
            work: what is due.
            answer: its columns, first and behind the last, the canvas's length.
            verifier: ranks rows.
            block: columns of the rows whose logits the step is for, first and behind the last.
            whole_layers: layers, the first ones, in which every sequence that takes part renews the whole answer.
            edge: keeps the rows in front of the answer that a step takes in where the prompt is not due; None: they are
                recomputed.
        """
        self._work, self._verifier, self._whole_layers, self._edge = work, verifier, whole_layers, edge
        self._start, self._stop = answer
        self._block = (max(0, block[0] - self._start), block[1] - self._start)

    def expected_rows(self, span: int, layers: int) -> float:
        """Rows of the first sequence that a layer recomputes, of the `span` that the step goes over, on average."""
        left_out = self._stop - self._start - self._work.rows[0]
        return span - left_out * max(0, layers - self._whole_layers) / layers

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
        assert flow.rows.start is not None, "the step goes over a span"
        columns = flow.rows.positions(batch, flow.hidden.device)
        first = on_device(work.first[:batch], columns.device)[:, None]
        self._here = [column < self._stop for column in work.first[:batch]]
        self._rows = list(work.rows[:batch])
        everywhere = all(column == flow.rows.start for column in work.first[:batch])
        self._span = Rows(flow.rows.count, flow.rows.start, valid=None if everywhere else columns >= first)
        self._head = self._start - flow.rows.start  # rows in front of the answer
        # A row that stands still may attend to rows that have moved, as a mask does in the first layer: still rows take
        # turns. One of the chosen rows is usually the token that was committed last.
        length = self._block[1] - self._block[0]
        starts = [clock * max(1, rows - 1) % length for clock, rows in zip(work.clocks, self._rows, strict=False)]
        self._turns = turns_of(on_device(starts, columns.device), self._stop - self._start, self._block)

    def _first_needed(self, forward: Forward, layer: int, flow: Flow) -> int:
        """Of the rows in front of the answer, those from here on are needed behind the layer."""
        return min(self._head, flow.output.start) if layer == forward.model.shape.layers - 1 else 0

    def _whole(self, forward: Forward, layer: int, flow: Flow) -> Flow:
        """A plain layer, whose branches are kept."""
        rows, hidden, first = self._span, flow.hidden, self._first_needed(forward, layer, flow)
        keep = partial(self._keep, forward, layer, first)
        forward.write(layer, rows, hidden)
        forward.attend(layer, rows[first:], hidden[:, first:], keep=keep)
        forward.mlp(layer, hidden[:, first:], keep=keep)
        return Flow(flow.rows, hidden, flow.output, computed=rows.count)

    def _keep(
        self,
        forward: Forward,
        layer: int,
        first: int,
        feature: Feature,
        part: slice,
        branch: Float[Tensor, "batch rows width"],
    ) -> None:
        """Store what of a part's branch belongs to the answer; parts begin with row `first`."""
        skipped = max(0, self._head - first - part.start)
        if skipped < branch.shape[1]:
            rows = self._span[first + part.start + skipped : first + part.stop]
            forward.store.write(feature, layer, rows, branch[:, None, skipped:])

    def _chosen(self, forward: Forward, layer: int, flow: Flow, counts: Sequence[int]) -> Flow:
        """The prompt, where it is there, and the answer's farthest rows; keys and values of all of them before any
        attends."""
        model, store, head = forward.model, forward.store, self._head
        prompt, answer = flow.hidden[:, :head], flow.hidden[:, head:]
        forward.write(layer, self._span[:head], prompt)
        rows = self._farthest(forward, layer, answer, counts)
        parts = [rows[part] for part in forward.parts(rows.count, len(answer))]
        for part in parts:
            forward.write_keys_values(layer, part, model.attention_norm(layer, self._taken(answer, part)))
        needed = slice(self._first_needed(forward, layer, flow), head)
        forward.attend(layer, self._span[needed], prompt[:, needed])
        forward.mlp(layer, prompt[:, needed])
        for part in parts:
            branch = forward.attention(layer, part, model.attention_norm(layer, self._taken(answer, part)))
            store.write(Feature.ATTN_OUT, layer, part, branch[:, None])
            del branch
        add_branch(answer, slice(None), store.view(Feature.ATTN_OUT, layer)[:, 0])
        for part in parts:
            branch = model.feed_forward(layer, self._taken(answer, part))
            store.write(Feature.FFN_OUT, layer, part, branch[:, None])
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
        ranked = self._verifier.ranked(forward, layer, self._span[self._head :], hidden, clocks, self._turns)
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
