"""Selectors of the rows outside the block that an update renews: by chance, in turn, by attention, or by drift.

A selector by attention or drift first runs the block over the cache as it stands, and writes its keys and values. The
update writes them anew. So the selector decides by the present tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tiered.core.rows import Rows
from tiered.forward.attention_weights import attention_weights
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.log_sum_exp import LogSumExp
from tiered.policies.base import Step
from tiered.policies.polestar.drift import Changed, DriftReference, LayerKeys

Scores = Float[Tensor, "batch length"]
FEW = 0.15  # share of the rows up to which their changes to the log-sum-exps take less time than those of all rows


class BlockLayer(NamedTuple):
    """The block in one layer, over the cache as it stands: its queries, its attention over heads joined, and its
    residual stream behind the attention."""

    layer: int
    queries: Float[Tensor, "batch heads rows head_dim"]
    mixed: Float[Tensor, "batch rows heads_width"]
    hidden: Float[Tensor, "batch rows width"]


@dataclass(frozen=True, slots=True)
class Look:
    """The state that a selector may read before an update."""

    forward: Forward
    step: Step

    @property
    def block(self) -> Rows:
        """Rows that any step recomputes; a span."""
        return self.forward.rows[self.step.first_row : self.step.stop]

    @property
    def outside(self) -> Bool[Tensor, " length"]:
        """True at columns outside the block."""
        columns = self.forward.rows.index[0]
        return (columns < self.step.first_row) | (columns >= self.step.stop)

    @property
    def pending(self) -> Bool[Tensor, "batch rows"]:
        """True at rows of the block that predict a pending token."""
        step, ids = self.step, self.forward.ids
        found = torch.zeros(len(ids), self.block.count, dtype=torch.bool, device=ids.device)
        found[:, : step.last_row - step.first_row] = step.canvas.pending(step.start, step.stop)
        return found

    def layers(self) -> Iterator[BlockLayer]:
        """A plain step without logits, layer by layer. It writes the block's keys and values."""
        forward, rows = self.forward, self.block
        hidden = forward.model.embed(rows.columns(forward.ids))
        for layer in range(forward.model.shape.layers):
            forward.enter(layer)
            normed = forward.write_keys_values(layer, rows, hidden)
            queries = forward.queries(layer, rows, normed)
            mixed = forward.attended(layer, rows, queries)
            hidden = hidden + forward.model.attention_out(layer, mixed)
            yield BlockLayer(layer, queries, mixed, hidden)
            hidden = hidden + forward.model.feed_forward(layer, hidden)
        forward.enter(0)

    def weights(self, of: BlockLayer) -> Float[Tensor, "batch heads rows length"]:
        """Attention weights of the block's rows, by column."""
        model, keys = self.forward.model, self.forward.keys(of.layer)
        cap, sinks = model.shape.soft_cap, model.sink_keys(of.layer)
        return attention_weights(of.queries, keys, None, soft_cap=cap, sink_keys=sinks)[0]


class QuickKeys(LayerKeys):
    """Keys whose log-sum-exps come from torch's attention on a CPU. There it takes half the time for as many queries as
    there are columns. Models of studies have no sinks, caps, or masks."""

    def log_sums(self, queries: Float[Tensor, "batch heads clusters head_dim"]) -> LogSumExp:
        if not queries.is_cpu:
            return super().log_sums(queries)
        assert self.key_mask is None and self.soft_cap is None and self.sink_keys is None
        assert isinstance(self.keys, Tensor)
        keys = self.keys.repeat_interleave(queries.shape[1] // self.keys.shape[1], 1)
        _, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, keys)
        return LogSumExp(sums, torch.ones_like(sums))


class Selector(ABC):
    """Chooses rows in one call, of each sequence by itself; a function of the call and of its seed.

    Attributes:
        draws: generator of each sequence, from the first block on.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self.draws = seed, list[torch.Generator]()

    def begin(self, batch: int, length: int) -> None:
        """A block begins: a refresh renews all of `length` rows of `batch` sequences."""
        self.draws = self.draws or [torch.Generator().manual_seed(self._seed + number) for number in range(batch)]

    def keep(self, sequences: list[int]) -> None:
        """Remember only these sequences (ascending)."""
        self.draws = [self.draws[number] for number in sequences]

    def layer(self, forward: Forward, layer: int, pass_: Pass, step: Step) -> Pass:
        """A layer of a refresh or an update."""
        return forward.dense(layer, pass_)

    @abstractmethod
    def choose(self, look: Look, count: int) -> Int[Tensor, "batch count"]:
        """`count` columns outside the block of each sequence, ascending."""


class Highest(Selector):
    """Chooses the rows with the highest scores."""

    def choose(self, look: Look, count: int) -> Int[Tensor, "batch count"]:
        return self.scores(look).masked_fill(~look.outside, -torch.inf).topk(count).indices.sort().values

    @abstractmethod
    def scores(self, look: Look) -> Scores:
        """Scores by column; those of the block have no meaning."""


class Random(Highest):
    """Random rows."""

    def scores(self, look: Look) -> Scores:
        drawn = [torch.rand(look.forward.length, generator=own) for own in self.draws]
        return torch.stack(drawn).to(look.forward.ids.device)


class RoundRobin(Selector):
    """Columns in order, from the last chosen one on; the first column follows the last one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._next = 0

    def choose(self, look: Look, count: int) -> Int[Tensor, "batch count"]:
        columns = look.outside.nonzero()[:, 0]
        at = int((columns < self._next).sum())
        chosen = columns.roll(-at)[:count]
        self._next = int(chosen[-1]) + 1
        return chosen.sort().values.expand(len(look.forward.ids), -1)


class Oldest(Random):
    """Rows that were renewed longest ago; random ones of equal age."""

    def begin(self, batch: int, length: int) -> None:
        super().begin(batch, length)
        self._age = torch.zeros(batch, length, dtype=torch.int64)

    def choose(self, look: Look, count: int) -> Int[Tensor, "batch count"]:
        chosen = super().choose(look, count)
        self._age.add_(1).scatter_(1, chosen.cpu(), 0)
        return chosen

    def scores(self, look: Look) -> Scores:
        return self._age.to(look.forward.ids.device) + super().scores(look)


class Attention(Highest):
    """Rows with most attention from the block, over layers, heads and rows."""

    def scores(self, look: Look) -> Scores:
        asking = self.asking(look)[:, None, :, None]
        return torch.stack([(look.weights(of) * asking).sum(dim=(1, 2)) for of in look.layers()]).sum(0)

    def asking(self, look: Look) -> Bool[Tensor, "batch rows"]:
        """The block's rows whose attention counts."""
        return torch.ones_like(look.pending)


class PendingAttention(Attention):
    """Rows with most attention from rows of the block that predict a pending token."""

    def asking(self, look: Look) -> Bool[Tensor, "batch rows"]:
        return look.pending


class LayerAttention(PendingAttention):
    """Rows with most attention from pending rows in one layer alone."""

    def __init__(self, seed: int, *, layer: int) -> None:
        super().__init__(seed)
        self._layer = layer

    def scores(self, look: Look) -> Scores:
        asking = self.asking(look)[:, None, :, None]
        return next((look.weights(of) * asking).sum(dim=(1, 2)) for of in look.layers() if of.layer == self._layer)


class Drift(Highest):
    """Rows whose attention has drifted most since the last update, the mean over heads and layers. It is Polestar's
    drift of clusters of one row. No other row reads the last layer's attention of a row, so it is left out."""

    of_output: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._queries: dict[int, Tensor] = {}
        self._references: dict[int, DriftReference] = {}

    def keep(self, sequences: list[int]) -> None:
        super().keep(sequences)
        self._queries = {layer: of[sequences] for layer, of in self._queries.items()}
        self._references = {layer: of.of_sequences(sequences) for layer, of in self._references.items()}

    def layer(self, forward: Forward, layer: int, pass_: Pass, step: Step) -> Pass:
        if layer == forward.model.shape.layers - 1:
            return forward.dense(layer, pass_)
        rows, block = pass_.rows, Look(forward, step).block
        queries = forward.queries(layer, rows, forward.model.attention_norm(layer, pass_.hidden))
        attended = QuickKeys.of(forward, layer, values=self.of_output)
        if rows.is_span:  # a refresh
            self._queries[layer], reference = queries.clone(), None
        else:
            rows.put(self._queries[layer], queries)
            reference = self._references[layer]
        if reference is None or rows.count > FEW * forward.length:
            pass_ = forward.dense(layer, pass_)
            reference = DriftReference.of(self._queries[layer], attended, block)
        else:
            # The look before the update has written the block's keys, but not those of the chosen rows behind them.
            chosen = attended.at(rows[block.count :])
            then = tuple(torch.cat(each, dim=2) for each in zip(reference.block, chosen, strict=True))
            pass_ = forward.dense(layer, pass_)
            changed = Changed(rows, then, slice(0, block.count))
            _, reference = reference.measured(self._queries[layer], attended, changed)
            reference.recenter(queries, attended, rows.index, rows.valid)
            if len(lost := _in_any(reference.sums.peak.isnan().any(1))):
                some = self._queries[layer][:, :, lost]
                reference.recenter(some, attended, lost.expand(len(some), -1))
        self._references[layer] = reference
        return pass_

    def scores(self, look: Look) -> Scores:
        return torch.stack([self.drift(look, of.layer) for of in look.layers() if of.layer in self._queries]).mean(0)

    def drift(self, look: Look, layer: int) -> Scores:
        """The drift of every row in `layer`, once the block's keys are written there: nothing else has changed."""
        attended, reference = QuickKeys.of(look.forward, layer, values=self.of_output), self._references[layer]
        changed = Changed(look.block, reference.block, slice(None))
        drift, now = reference.measured(self._queries[layer], attended, changed)
        if len(lost := _in_any(drift.isnan())):
            drift, _ = reference.mended(drift, now, lost, self._queries[layer], attended, changed)
        return drift


def _in_any(lost: Bool[Tensor, "batch length"]) -> Int[Tensor, " rows"]:
    """Rows that are True in any sequence."""
    return lost.any(0).nonzero()[:, 0]


class OutputDrift(Drift):
    """Rows whose attention's output has drifted most."""

    of_output: ClassVar[bool] = True


class FirstDrift(Drift):
    """Rows whose attention has drifted most in the first layer alone."""

    def scores(self, look: Look) -> Scores:
        return next(self.drift(look, of.layer) for of in look.layers())


class DriftAttention(Drift):
    """The drift of a row times its attention from the block."""

    def scores(self, look: Look) -> Scores:
        drift, mass = [], []
        for of in look.layers():
            mass.append(look.weights(of).sum(dim=(1, 2)))
            if of.layer in self._queries:
                drift.append(self.drift(look, of.layer))
        return torch.stack(drift).mean(0) * torch.stack(mass).sum(0)
