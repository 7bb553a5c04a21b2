"""The shift of each row's last-layer attention since the step before, for commit rules that need it."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import spanned
from tiered.forward.attention_bytes import AttentionChunk
from tiered.forward.attention_weights import chunks, masked_scores
from tiered.kernels.coded_rows import Columns, Heads
from tiered.kernels.divergence import divergence_terms
from tiered.kernels.host_values import on_device


class AttentionShift:
    """Keeps the attention log-probabilities of a block's rows and compares them with the next step's (arXiv
    2607.14107).

    The rows are those whose logits the step needs, so entry i of the shift belongs to the block's token i even with a
    prediction shift. Each row passes the last layer's attention at most once a step.

    Attributes:
        shift: KL in nats of each row's attention in this step from its attention when it was last computed, mean over
            heads. NaN for a row not computed in this step, or never before.
    """

    def __init__(
        self,
        log_rows: Float32[Tensor, "batch heads block columns"],
        chunk: AttentionChunk,
        *,
        soft_cap: float | None = None,
        sink_keys: Float[Tensor, "heads sinks head_dim"] | None = None,
    ) -> None:
        """
        Args:
            log_rows: buffer of log-probabilities, of the canvas's columns followed by the sinks. With guidance it has
                the first half of the forward's sequences.
            soft_cap, sink_keys: the last layer's. A noise mask is not needed, because it hides nothing from a block's
                rows.
        """
        self._log_rows, self._chunk = log_rows, chunk
        self._soft_cap, self._sink_keys = soft_cap, sink_keys
        batch, _, block_length, _ = log_rows.shape
        self._known = torch.zeros(batch, block_length, dtype=torch.bool, device=log_rows.device)
        self._stored = False

    def begin_step(self, first_row: int, *, forget: Sequence[bool]) -> None:
        """Begin a forward that needs the rows from column `first_row`. `forget`: True for a sequence without a step
        before."""
        self._first_row = first_row
        batch, _, block_length, _ = self._log_rows.shape
        if not self._stored:
            self._known.zero_()
        elif any(forget):
            self._known &= ~on_device(forget, self._known.device)[:, None]
        self._compare = self._stored and not all(forget)
        self._stored = True  # true when the next step begins
        self.shift = self._log_rows.new_full((batch, block_length), torch.nan)

    def keep(self, sequences: list[int]) -> None:
        """Keep only these sequences (ascending), at a block's end."""
        # Kept rows are dropped, not moved: the next block has other rows.
        self._log_rows, self._stored = self._log_rows[: len(sequences)], False
        self._known = self._known[: len(sequences)]

    @spanned(Op.DRIFT)
    def observe(self, rows: Rows, queries: Heads, keys: Columns, key_mask: Bool[Tensor, "batch length"] | None) -> None:
        """Compare the rows that the step needs; called in the last layer's attention."""
        batch, _, block_length, _ = self._log_rows.shape
        queries, keys = queries[:batch], keys[:batch]
        key_mask = None if key_mask is None else key_mask[:batch]
        if rows.is_span:
            first = max(rows.within.start, self._first_row)
            stop = min(rows.within.stop, self._first_row + block_length)
            if first < stop:
                queries = queries[:, :, first - rows.within.start : stop - rows.within.start]
                self._enter(slice(first - self._first_row, stop - self._first_row), None, queries, keys, key_mask)
            return
        place, present = self._places(rows, batch, block_length)
        queries = queries.gather(2, place[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
        self._enter(slice(0, block_length), present, queries, keys, key_mask)

    def _places(
        self, rows: Rows, batch: int, block_length: int
    ) -> tuple[Int[Tensor, "batch block"], Bool[Tensor, "batch block"]]:
        index = rows.index[:batch]
        needed = torch.arange(self._first_row, self._first_row + block_length, device=index.device)
        same = index[:, None, :] == needed[None, :, None]
        if rows.valid is not None:
            same &= rows.valid[:batch, None, :]
        return same.int().argmax(dim=-1), same.any(dim=-1)

    def _enter(
        self,
        block_rows: slice,
        present: Bool[Tensor, "batch block"] | None,
        queries: Heads,
        keys: Columns,
        key_mask: Bool[Tensor, "batch length"] | None,
    ) -> None:
        """Compare rows of the block with the kept ones, and replace these. `present`: None for all rows."""
        batch, heads, rows, _ = queries.shape
        shift = queries.new_zeros(batch, rows, dtype=torch.float32)
        at_once = {"sequences": self._chunk.sequences, "heads_at_once": self._chunk.heads, "rows_at_once": max(1, rows)}
        for sequences, some, of_keys, _ in chunks(batch, heads, keys.shape[1], rows, **at_once):
            scores, of_sinks = masked_scores(
                queries[sequences, some],
                keys[sequences, of_keys],
                None if key_mask is None else key_mask[sequences],
                soft_cap=self._soft_cap,
                sink_keys=None if self._sink_keys is None else self._sink_keys[some],
            )
            log_rows = (scores if of_sinks is None else torch.cat([scores, of_sinks], dim=-1)).log_softmax(dim=-1)
            del scores, of_sinks
            kept = self._log_rows[sequences, some, block_rows]
            if self._compare:
                shift[sequences] += divergence_terms(log_rows, kept).sum(dim=-1).sum(dim=1)
            if present is not None:
                log_rows = log_rows.where(present[sequences, None, :, None], kept)
            kept.copy_(log_rows)
        known = self._known[:, block_rows]
        if self._compare:
            shift = shift.div_(heads).masked_fill_(~known, torch.nan)
            self.shift[:, block_rows] = shift if present is None else shift.where(present, self.shift[:, block_rows])
        known |= True if present is None else present
