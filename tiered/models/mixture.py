"""Layers with a mixture of experts instead of the MLP (arXiv 1701.06538).

A row goes to the experts that its router picks, and to the shared one, if any. The host reads the picks of a layer
once, for statistics and for fetching experts. Not measured on a GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.kernels.choice import for_device
from tiered.kernels.expert_outputs_ref import Picks, expert_outputs, sum_outputs
from tiered.kernels.expert_table import ExpertTable
from tiered.kernels.projection import few_at_a_time, project_few
from tiered.kernels.rms_norm_ref import Hidden
from tiered.models.base import DiffusionModel, RouterProbe
from tiered.models.layout import ModelConfig
from tiered.models.router import Router, picked_experts, rows_by_expert
from tiered.models.shape import Experts

# Experts and their matrices, which stay in place until the next group is taken.
Group = tuple[Sequence[int], ExpertTable]


@runtime_checkable
class ExpertSource(Protocol):
    """Experts that are not all on the device."""

    def groups(self, layer: int, picked: Sequence[int], likely: Mapping[int, int]) -> Iterable[Group]:
        """The `picked` experts of a layer, in groups. `likely`: how many rows would pick an expert of the next layer,
        by expert."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """Settings of a mixture's forward beside those of `ModelConfig`."""

    router: Router


class MixtureModel(DiffusionModel):
    """A model whose layers have mixtures of experts.

    Attributes:
        streamed: fetches experts to the device; None if all are there.
    """

    config: MixtureConfig
    streamed: ExpertSource | None = None

    def feed_forward(
        self, layer: int, hidden: Hidden, probe: RouterProbe | None = None, normed: Hidden | None = None
    ) -> Hidden:
        block, experts = self.blocks[layer], self._experts
        if layer in experts.dense:
            return super().feed_forward(layer, hidden, probe, normed)
        normed = self.mlp_norm(layer, hidden) if normed is None else normed
        branch = self.routed(layer, hidden, normed, normed, probe)
        if experts.shared_width:
            branch += self._gated(normed, block.shared_proj, block.shared_up, block.shared_out)
        return branch

    def routed(
        self, layer: int, hidden: Hidden, normed: Hidden, ranked: Hidden, probe: RouterProbe | None = None
    ) -> Hidden:
        """The weighted outputs of experts over `normed` rows, which the router picks by `ranked` rows. `hidden`: the
        rows, of which both were made."""
        rows = normed.flatten(0, 1)
        picks = self.picks(layer, ranked.flatten(0, 1))
        del ranked
        likely = None if self.streamed is None else self.likely(layer + 1, hidden)
        asked = picks.experts[None] if likely is None else torch.stack([picks.experts, likely])
        of_rows, *of_next = asked.cpu()  # on CUDA the host waits here
        picked = picked_experts(of_rows)
        if probe is not None:
            probe(layer, of_rows, picked)
        if self.streamed is None:
            block = self.blocks[layer]
            stacks = block.experts_in.weight, block.experts_out.weight
            groups = [(picked, ExpertTable.of_stacks(*stacks, self._experts.count))]
        else:
            groups = self.streamed.groups(layer, picked, rows_by_expert(of_next[0]) if of_next else {})
        return self._mixed(rows, picks, groups).view(normed.shape)

    def ranked(self, layer: int, hidden: Hidden) -> Hidden:
        """The rows that the router of a layer reads."""
        return self.blocks[layer].ff_norm(hidden)

    @property
    def _experts(self) -> Experts:
        assert self.shape.experts is not None, "a mixture has experts"
        return self.shape.experts

    def picks(self, layer: int, rows: Float[Tensor, "rows width"]) -> Picks:
        """The experts that `rows` go to; `rows` as from `ranked`."""
        block = self.blocks[layer]
        # No name keeps the logits alive once there are scores.
        return self.config.router.pick(_logits(rows, block.router), getattr(block, "router_bias", None))

    def likely(self, layer: int, hidden: Hidden) -> Int[Tensor, "rows picked"] | None:
        """The experts that the router of `layer` picks for rows of `hidden`, the input of the previous layer; None for
        a layer without a router."""
        if layer not in self.shape.recorded:
            return None
        return self.picks(layer, self.ranked(layer, hidden).flatten(0, 1)).experts

    def _mixed(
        self, rows: Float[Tensor, "rows width"], picks: Picks, groups: Iterable[Group]
    ) -> Float[Tensor, "rows width"]:
        """The weighted sum of the outputs of each row's experts, each of which is in one group."""
        outputs = rows.new_empty(*picks.experts.shape, rows.shape[1])
        for group, table in groups:
            for_device(expert_outputs, rows.device)(outputs, rows, picks, table, group, self._activation)
        return for_device(sum_outputs, rows.device)(outputs, picks.weights)


def _logits(
    rows: Float[Tensor, "rows width"], router: Float32[Tensor, "experts width"]
) -> Float32[Tensor, "rows experts"]:
    logits = torch.empty(len(rows), len(router), device=rows.device)
    for some, into in zip(few_at_a_time(rows), few_at_a_time(logits), strict=True):
        into.copy_(project_few(some.float(), router))
    return logits
