"""Weighted sum of expert outputs (mixture of experts, arXiv 1701.06538): the oracle, in plain torch, used on the CPU.

Experts run one after the other, ascending, over the rows that picked them, so the sum of a row has one order. On a CPU
a row's result is bit for bit independent of the other rows, because every product has a row count within `FEW_ROWS`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tiered.kernels.expert_table import ExpertTable, Matrix
from tiered.kernels.gate_mul_ref import Activation, gate_mul
from tiered.kernels.projection import few_at_a_time, project_few


class Picks(NamedTuple):
    """The experts of each row, ascending, and their weights."""

    experts: Int[Tensor, "rows picked"]
    weights: Float32[Tensor, "rows picked"]


def add_experts(
    total: Float32[Tensor, "rows width"],
    rows: Float[Tensor, "rows width"],
    picks: Picks,
    table: ExpertTable,
    only: Sequence[int],
    activation: Activation = "silu",
) -> None:
    """Add to `total`, for each row, the weighted outputs of its experts that are in `only`, in ascending order.

    An output is down · (activation(gate) · up), rounded to the dtype of the rows at each step. Its weight is applied in
    float32. Calls with ascending groups of experts give the same bits as one call with all of them.

    Args:
        only: experts of the table, ascending.
    """
    picked, weights, wanted = picks.experts.shape[1], picks.weights.flatten(), {*only}
    experts = picks.experts.flatten()
    order = experts.argsort(stable=True)  # indices of picks, sorted by expert
    which, counts = (found.tolist() for found in experts[order].unique_consecutive(return_counts=True))
    for expert, of_expert in zip(which, order.split(counts), strict=True):
        if expert not in wanted:
            continue
        gate_up, down = table.matrices(expert)
        for places in few_at_a_time(of_expert):
            some = places // picked
            # No name keeps an output alive while the next expert's is computed.
            total.index_add_(
                0, some, _answer(rows[some], gate_up, down, activation).float().mul_(weights[places, None])
            )


def _answer(
    rows: Float[Tensor, "rows width"], gate_up: Matrix, down: Matrix, activation: Activation
) -> Float[Tensor, "rows width"]:
    gate, up = project_few(rows, gate_up).chunk(2, dim=-1)
    return project_few(_gated(gate, up, activation), down)


def _gated(
    gate: Float[Tensor, "rows inner"], up: Float[Tensor, "rows inner"], activation: Activation
) -> Float[Tensor, "rows inner"]:
    """`gate_mul`. On a CPU by `exp`, whose result does not depend on an element's place. That of torch's σ and
    tanh does."""
    if not gate.is_cpu:
        return gate_mul(gate, up, activation)
    steep = gate.to(torch.float32, copy=True)
    if activation == "gelu":  # as in gate_mul.py
        steep.square_().mul_(0.044715).add_(1).mul_(gate).mul_(1.5957691216057308)
    steep.neg_().exp_().add_(1)
    return torch.div(gate, steep, out=steep).to(gate.dtype).mul_(up)
