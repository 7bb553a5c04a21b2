"""Outputs of experts and their weighted sum (mixture of experts, arXiv 1701.06538): the oracle, in plain torch, used on
the CPU.

Experts may run in any order, because a row's outputs are summed only when all are there, ascending by expert. On a CPU
a row's result is bit for bit independent of the other rows: every product has a row count within `FEW_ROWS`.
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


def expert_outputs(
    outputs: Float[Tensor, "rows picked width"],
    rows: Float[Tensor, "rows width"],
    picks: Picks,
    table: ExpertTable,
    only: Sequence[int],
    activation: Activation = "silu",
) -> None:
    """Write the outputs of the experts in `only`, for each row that picked them, to the row's places in `outputs`.

    An output is down · (activation(gate) · up), rounded to the dtype of the rows at each step. Its bits do not depend
    on other experts of `only`, so experts may come in several calls, in any order.

    Args:
        outputs: contiguous; by row and by place of the expert in `picks`.
        only: distinct experts of the table.
    """
    picked, wanted = picks.experts.shape[1], {*only}
    experts, into = picks.experts.flatten(), outputs.flatten(0, 1)
    order = experts.argsort(stable=True)  # indices of picks, sorted by expert
    which, counts = (found.tolist() for found in experts[order].unique_consecutive(return_counts=True))
    for expert, of_expert in zip(which, order.split(counts), strict=True):
        if expert not in wanted:
            continue
        gate_up, down = table.matrices(expert)
        for places in few_at_a_time(of_expert):
            # No name keeps an output alive while the next expert's is computed.
            into[places] = _output(rows[places // picked], gate_up, down, activation)


def sum_outputs(
    outputs: Float[Tensor, "rows picked width"], weights: Float32[Tensor, "rows picked"]
) -> Float[Tensor, "rows width"]:
    """The weighted sum of each row's `outputs`, in their order and in float32, rounded to their dtype once."""
    rows, picked, width = outputs.shape
    total = torch.zeros(rows, width, dtype=torch.float32, device=outputs.device)
    for pick in range(picked):
        # Not in one operation with the sum, whose product would not be rounded on every machine.
        total += outputs[:, pick].to(torch.float32, copy=True).mul_(weights[:, pick, None])
    return total.to(outputs.dtype)


def _output(
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
