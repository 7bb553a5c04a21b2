"""Layers with a mixture of experts in the place of the MLP (arXiv 1701.06538).

A row goes to the experts that its router picks, and to the shared one if there is any. Experts go one after the other,
ascending, over the rows that picked them, so the sum of a row has one order. On a CPU a row's result is the same to the
bit whatever rows it is beside: no product has fewer rows than `FEW_ROWS`, or more. There is no kernel for experts yet:
on CUDA a layer waits for the host, which reads what experts were picked.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from tiered.core.rows import parts_of
from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.rms_norm_ref import Hidden
from tiered.kernels.silu_mul_ref import silu_mul
from tiered.models.base import DiffusionModel, RouterProbe
from tiered.models.layout import ModelConfig
from tiered.models.projection import FEW_ROWS, project
from tiered.models.router import Picks, Router
from tiered.models.shape import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """What the forward of a mixture needs beside the sizes and what every forward needs."""

    router: Router


class MixtureModel(DiffusionModel):
    config: MixtureConfig

    def feed_forward(self, layer: int, hidden: Hidden, probe: RouterProbe | None = None) -> Hidden:
        block, experts = self.blocks[layer], self._experts
        if layer in experts.dense:
            return super().feed_forward(layer, hidden, probe)
        normed = block.ff_norm(hidden)
        rows = normed.flatten(0, 1)
        picks = self.picks(layer, rows)
        if probe is not None:
            probe(layer, picks.experts)
        branch = self._mixed(layer, rows, picks).view(normed.shape)
        if experts.shared_width:
            branch += self._gated(normed, block.shared_proj, block.shared_up, block.shared_out)
        return branch

    @property
    def _experts(self) -> Experts:
        assert self.shape.experts is not None, "a mixture has experts"
        return self.shape.experts

    def picks(self, layer: int, rows: Float[Tensor, "rows width"]) -> Picks:
        """The experts that normed `rows` go to."""
        block = self.blocks[layer]
        # The logits have no name here: they are gone once there are scores.
        return self.config.router.pick(_logits(rows, block.router), getattr(block, "router_bias", None))

    def _mixed(self, layer: int, rows: Float[Tensor, "rows width"], picks: Picks) -> Float[Tensor, "rows width"]:
        """The weighted sum of what each row's experts answer."""
        block, width, picked = self.blocks[layer], rows.shape[1], picks.experts.shape[1]
        inner, outer = block.experts_in.weight, block.experts_out.weight
        experts = picks.experts.flatten()
        order = experts.argsort(stable=True)  # places in the table of picks, those of an expert together
        which, counts = (found.tolist() for found in experts[order].unique_consecutive(return_counts=True))
        weights, both = picks.weights.flatten(), 2 * self._experts.width
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for expert, of_expert in zip(which, order.split(counts), strict=True):
            gate_up = inner[expert * both : (expert + 1) * both]
            down = outer[expert * width : (expert + 1) * width]
            for part in _parts(len(of_expert)):
                places = of_expert[part]
                some = places // picked
                # No answer has a name here: none is there beside that of the next expert.
                total.index_add_(0, some, _expert(rows[some], gate_up, down).float().mul_(weights[places, None]))
        return total.to(rows.dtype)


def _logits(
    rows: Float[Tensor, "rows width"], router: Float32[Tensor, "experts width"]
) -> Float32[Tensor, "rows experts"]:
    logits = torch.empty(len(rows), len(router), device=rows.device)
    for part in _parts(len(rows)):
        logits[part] = _steady(rows[part].float(), router)
    return logits


def _expert(
    rows: Float[Tensor, "rows width"],
    gate_up: Float[Tensor, "both width"] | CodedRows,
    down: Float[Tensor, "width inner"] | CodedRows,
) -> Float[Tensor, "rows width"]:
    gate, up = _steady(rows, gate_up).chunk(2, dim=-1)
    return _steady(_gated(gate, up), down)


def _gated(gate: Float[Tensor, "rows inner"], up: Float[Tensor, "rows inner"]) -> Float[Tensor, "rows inner"]:
    """`silu_mul`. On a CPU by `exp`, which is the same for an element in any place. torch's σ is not."""
    if not gate.is_cpu:
        return for_device(silu_mul, gate.device)(gate, up)
    gated = gate.to(torch.float32, copy=True).neg_().exp_().add_(1)
    return torch.div(gate, gated, out=gated).to(gate.dtype).mul_(up)


def _steady(
    rows: Float[Tensor, "rows inner"], weight: Float[Tensor, "out inner"] | CodedRows
) -> Float[Tensor, "rows out"]:
    """`project` of no more rows than `_parts` has, the same to the bit on a CPU however many there are."""
    lacking = FEW_ROWS[0] - len(rows)
    if not rows.is_cpu or lacking <= 0:
        return project(rows, weight)
    return project(F.pad(rows, (0, 0, 0, lacking)), weight)[: len(rows)]


def _parts(rows: int) -> list[slice]:
    return parts_of(rows, FEW_ROWS[-1])
