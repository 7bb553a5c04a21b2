"""The answers of experts that rows go to (arXiv 1701.06538): the oracle, in plain torch, and what runs on the CPU.

Experts go one after the other, ascending, over the rows that picked them, so the sum of a row has one order. On a CPU a
row's result is the same to the bit whatever rows it is beside: no product has fewer rows than `FEW_ROWS`, or more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.kernels.expert_table import ExpertTable, Matrix
from tiered.kernels.projection import few_at_a_time, project_few
from tiered.kernels.silu_mul_ref import silu_mul


class Picks(NamedTuple):
    """The experts of each row, ascending, and what each counts."""

    experts: Int[Tensor, "rows picked"]
    weights: Float32[Tensor, "rows picked"]


def add_experts(
    total: Float32[Tensor, "rows width"],
    rows: Float[Tensor, "rows width"],
    picks: Picks,
    table: ExpertTable,
    only: Sequence[int],
) -> None:
    """Add to `total`, for each row, the weighted answers of its experts that are in `only`, in ascending order.

    An answer is down · (gate · σ(gate) · up), rounded to the dtype of the rows at each step, and its weight is applied
    in float32. Calls with groups of experts, one group above the other, give the same bits as one call with all.

    Args:
        only: experts of the table, ascending.
    """
    picked, weights, wanted = picks.experts.shape[1], picks.weights.flatten(), {*only}
    experts = picks.experts.flatten()
    order = experts.argsort(stable=True)  # places in the table of picks, those of an expert together
    which, counts = (found.tolist() for found in experts[order].unique_consecutive(return_counts=True))
    for expert, of_expert in zip(which, order.split(counts), strict=True):
        if expert not in wanted:
            continue
        gate_up, down = table.matrices(expert)
        for places in few_at_a_time(of_expert):
            some = places // picked
            # No answer has a name here: none is there beside that of the next expert.
            total.index_add_(0, some, _answer(rows[some], gate_up, down).float().mul_(weights[places, None]))


def _answer(rows: Float[Tensor, "rows width"], gate_up: Matrix, down: Matrix) -> Float[Tensor, "rows width"]:
    gate, up = project_few(rows, gate_up).chunk(2, dim=-1)
    return project_few(_gated(gate, up), down)


def _gated(gate: Float[Tensor, "rows inner"], up: Float[Tensor, "rows inner"]) -> Float[Tensor, "rows inner"]:
    """`silu_mul`. On a CPU by `exp`, which is the same for an element in any place. torch's σ is not."""
    if not gate.is_cpu:
        return silu_mul(gate, up)
    gated = gate.to(torch.float32, copy=True).neg_().exp_().add_(1)
    return torch.div(gate, gated, out=gated).to(gate.dtype).mul_(up)
