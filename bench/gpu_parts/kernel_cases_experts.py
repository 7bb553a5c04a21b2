"""Cases of a mixture's experts: rows through the few that each of them picked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from gpu_parts.kernel_cases_layer import ACTIVATIONS
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.expert_outputs_ref import Picks
from tiered.kernels.expert_table import ExpertTable, Matrix
from tiered.kernels.gate_mul_ref import Activation
from tiered.kernels.row_code import WeightCode


class Given(NamedTuple):
    """`outputs` are those of each row's experts; `only` are the experts that the host knows to be picked."""

    outputs: Tensor
    rows: Tensor
    picks: Picks
    table: ExpertTable
    only: list[int]


@dataclass(frozen=True, kw_only=True)
class ExpertOutputs(KernelCase):
    """Outputs and their sum. `experts`: number of experts among which the rows of a step pick. Sizes are LLaDA2-mini's.
    Gates, outputs and sums are rounded, and so are the values of int4."""

    kernel, into, roundings = "expert_outputs", "outputs", 5
    code: WeightCode | None = None
    rows: int
    experts: int = 72
    picked: int = 8
    width: int = 2048
    inner: int = 512
    activation: Activation = "silu"

    def tiny(self) -> Self:
        return replace(self, rows=min(self.rows, 19), experts=5, picked=2, width=48, inner=40)

    def draw(self, generator: torch.Generator) -> Given:
        def stack(out: int, inner: int) -> Matrix:
            weight = normal(generator, self.experts * out, inner, dtype=self.dtype).mul_(inner**-0.5)
            return weight if self.code is None else CodedRows.of(weight, self.code)

        scores = torch.rand(self.rows, self.experts, generator=generator, device=generator.device)
        highest = scores.topk(self.picked)
        experts = highest.indices.sort(dim=1).values
        table = ExpertTable.of_stacks(stack(2 * self.inner, self.width), stack(self.width, self.inner), self.experts)
        rows = normal(generator, self.rows, self.width, dtype=self.dtype)
        outputs = rows.new_zeros(self.rows, self.picked, self.width)
        return Given(outputs, rows, Picks(experts, highest.values), table, experts.unique().tolist())

    def run(self, given: Given, room: Sequence[Tensor]) -> Sequence[Tensor]:
        op(self.kernel)(room[0], *given[1:], self.activation)
        return [op(self.kernel, "sum_outputs")(room[0], given.picks.weights)]

    def truth(self, given: Given) -> Sequence[Tensor]:
        rows = given.rows.double()
        total = torch.zeros_like(rows)
        for expert in given.only:
            gate_up, down = (
                (replace(each, dtype=torch.float32).values() if isinstance(each, CodedRows) else each).double()
                for each in given.table.matrices(expert)
            )
            row, pick = (given.picks.experts == expert).nonzero().T
            gate, up = (rows[row] @ gate_up.mT).chunk(2, dim=1)
            total[row] += given.picks.weights[row, pick, None] * ((ACTIVATIONS[self.activation](gate) * up) @ down.mT)
        return (total,)

    def moved(self, given: Given) -> int:
        matrices = sum(each.nbytes for expert in given.only for each in given.table.matrices(expert))
        return size(given.rows, given.rows, *given.picks) + matrices

    def arithmetic(self, given: Given) -> int:
        return 2 * self.rows * self.picked * 3 * self.width * self.inner


def _wide(code: WeightCode | None) -> ExpertOutputs:
    """A case with the sizes and the activation of DiffusionGemma, whose canvases are wide."""
    return ExpertOutputs(code=code, rows=256, experts=128, width=2816, inner=704, activation="gelu")


CHECKED: tuple[KernelCase, ...] = (
    *(ExpertOutputs(code=code, rows=32) for code in (None, *WeightCode)),
    *(_wide(code) for code in (None, WeightCode.INT4)),
    *(ExpertOutputs(code=code, rows=33, dtype=torch.float32) for code in (None, *WeightCode)),
)
TIMED: tuple[KernelCase, ...] = (
    *(ExpertOutputs(code=code, rows=32) for code in (None, *WeightCode)),
    *(_wide(code) for code in (None, WeightCode.INT4)),
    *(ExpertOutputs(code=code, rows=512) for code in (None, WeightCode.INT4)),
)
