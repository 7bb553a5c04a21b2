"""Selectors that know an uncached forward: they choose by the changes that its keys and values would make."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.kernels.attention_scores import attention_scores
from workloads.selectors import BlockLayer, Highest, Look, Scores, Selector
from workloads.uncached import layers_of, new_store, uncached_forward

KEPT = (Feature.KEY, Feature.VALUE)
PASSES_AT_ONCE = 32  # passes over the block, each with keys and values of its own


class Oracle(Highest):
    """Rows whose uncached keys and values change the attention branch of the block's pending rows most, each row alone.
    A change is its squares over layers and pending rows, over those of the residual stream behind it."""

    def scores(self, look: Look) -> Scores:
        step, model = look.step, look.forward.model
        fresh = uncached_forward(Forward, step, model, look.forward.ids, look.forward.keys(0).dtype)
        none = layers_of(fresh, look.forward.ids, slice(0, 0))
        sums = [self.change(look, of, fresh) for of, _ in zip(look.layers(), none, strict=True)]
        return torch.stack(sums).sum(0)

    def change(self, look: Look, of: BlockLayer, fresh: Forward) -> Scores:
        """The change by every row in one layer. p is the weight of a row, o the output, and e the growth of the row's
        share of the sum by its new score. The output becomes (o − p v + p e v′) / (1 − p + p e). The change is a sum of
        v′, v and o with weights by row, so each goes through the output projection once."""
        model, layer = look.forward.model, of.layer
        shape, sharing, pending = model.shape, model.shape.heads // model.shape.kv_heads, look.pending
        # Places of the pending rows, and of others behind them in sequences that have fewer, which count nothing.
        at = pending.long().sort(descending=True, stable=True).indices[:, : int(pending.sum(1).max())]
        counted, rows = pending.gather(1, at), Rows.at(at)
        weights, queries = rows.take(look.weights(of)), rows.take(of.queries)
        stores = look.forward.store, fresh.store
        (keys, values), (new_keys, new_values) = ([store.view(feature, layer) for feature in KEPT] for store in stores)
        old, new = (attention_scores(queries, each, shape.soft_cap) for each in (keys, new_keys))
        grown = (new - old).exp_()
        share = weights / (1 + weights * (grown - 1))
        output = rows.take(of.mixed.unflatten(-1, (shape.heads, -1)).transpose(1, 2))
        projection = self.projection(look, layer)
        stored = (each.repeat_interleave(sharing, 1) for each in (new_values, values))
        by_new, by_old, by_output = (each.float() @ projection for each in (*stored, output))
        branch = torch.einsum("bhpn,bhnw->bnpw", share * grown, by_new)
        branch -= torch.einsum("bhpn,bhnw->bnpw", share, by_old)
        branch += torch.einsum("bhpn,bhpw->bnpw", share * (1 - grown), by_output)
        beside = rows.take(of.hidden[:, None])[:, 0].float().square().sum(-1)
        return (branch.square_().sum(-1) / beside[:, None]).mul_(counted[:, None]).sum(-1)

    @staticmethod
    def projection(look: Look, layer: int) -> Float[Tensor, "heads head_dim width"]:
        """The layer's output projection of each head, without its bias."""
        model = look.forward.model
        units = torch.eye(model.shape.heads * model.shape.head_dim, device=look.forward.ids.device)
        units = units.to(look.forward.keys(layer).dtype)[None]
        moved = model.attention_out(layer, units) - model.attention_out(layer, torch.zeros_like(units[:, :1]))
        return moved[0].float().unflatten(0, (model.shape.heads, -1))


class OutputOracle(Selector):
    """Rows whose uncached keys and values, each row's alone, bring the logits of pending tokens nearest to those of
    `none`, in KL. It takes a pass over the block for each row outside, so a call has one sequence."""

    def choose(self, look: Look, count: int) -> Int[Tensor, "batch count"]:
        if (sequences := len(look.forward.ids)) != 1:
            raise ValueError(f"{sequences} sequences; a call of `oracle_output` has one")
        fresh, theirs = self._uncached(look)
        pending, columns = look.pending[0], look.outside.nonzero()[:, 0]
        theirs = theirs[0, pending].double().log_softmax(-1)
        kl = []
        for some in columns.split(PASSES_AT_ONCE):
            ours = self._block_logits(look, fresh, some)[:, pending].double().log_softmax(-1)
            kl.append((theirs.exp() * (theirs - ours)).sum(-1).mean(-1))
        return columns[torch.cat(kl).topk(count, largest=False).indices].sort().values[None]

    def _uncached(self, look: Look) -> tuple[FeatureStore, Float[Tensor, "1 rows vocab"]]:
        """Keys and values of all rows in all layers, and logits of the block."""
        model, ids = look.forward.model, look.forward.ids
        kept: dict[Feature, int] = dict.fromkeys(KEPT, model.shape.layers)
        store = new_store(model.shape, kept, ids, look.forward.keys(0).dtype)
        fresh = uncached_forward(Forward, look.step, model, ids, look.forward.keys(0).dtype)
        fresh.store = store
        block = slice(look.step.first_row, look.step.stop)
        return store, fresh.logits(Pass(ids, fresh.rows, block, final=look.step.start))

    def _block_logits(
        self, look: Look, fresh: FeatureStore, columns: Int[Tensor, " passes"]
    ) -> Float[Tensor, "passes rows vocab"]:
        """Logits of the block, once for each of `columns`, whose keys and values are `fresh` there."""
        forward, rows, model = look.forward, look.block, look.forward.model
        hidden = model.embed(rows.columns(forward.ids)).expand(len(columns), -1, -1)
        passes = torch.arange(len(columns), device=columns.device)
        (_, _, limits), *_ = forward.limits.of_rows(replace(rows, is_span=False), 1)
        for layer in range(model.shape.layers):
            normed, at = model.attention_norm(layer, hidden), forward.rotary[0].at(rows)
            stored = []
            for feature, own in zip(KEPT, model.keys_values(layer, normed, at), strict=True):
                part = forward.store.view(feature, layer).repeat(len(columns), 1, 1, 1)
                part[passes, :, columns] = fresh.view(feature, layer)[0][:, columns].transpose(0, 1)
                rows.put(part, own)
                stored.append(part)
            keys, values = stored
            mixed = model.attend(layer, model.queries(layer, normed, at), keys, values, limits)
            hidden = hidden + model.attention_out(layer, mixed)
            hidden = hidden + model.feed_forward(layer, hidden)
        return model.logits(hidden)
