"""Where the matrices of a layer's experts lie: those of one expert may be anywhere, or in no memory at all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.host_values import on_device
from tiered.kernels.row_code import VECTOR

TILE_ROWS = 16  # rows of one expert that a program of a kernel takes: few of hundreds of experts get more in a step
Matrix = Float[Tensor, "out inner"] | CodedRows


@runtime_checkable
class Matrices(Protocol):
    """The matrix of every expert, perhaps cut only when it is asked for; None where an expert has none in this call."""

    def __getitem__(self, expert: int, /) -> Matrix | None: ...


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """The matrices of one layer's experts, all of one dtype and code. They stay where they are.

    A kernel reads each where it lies, in one piece, on the device or in pinned memory of the host.

    Attributes:
        gate_up: matrix [2 · inner, width] of every expert: the rows of its gate, and of what the gate multiplies.
        down: matrix [width, inner] of every expert.
    """

    gate_up: Matrices
    down: Matrices
    _sent: dict[tuple[torch.device | int, ...], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of_stacks(cls, gate_up: Matrix, down: Matrix, experts: int) -> "ExpertTable":
        """The table of so many `experts`, whose matrices lie one behind the other in each stack."""
        return cls(_Stack(gate_up, experts), _Stack(down, experts))

    def matrices(self, expert: int) -> tuple[Matrix, Matrix]:
        """Both matrices of `expert`. Raises `ValueError` if it has none in this call."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        if gate_up is None or down is None:
            raise ValueError(f"expert {expert} has no matrices in this call")
        return gate_up, down

    def addresses(self, only: Sequence[int], device: torch.device) -> Int64[Tensor, "only 3"]:
        """The number of each expert in `only`, and where its two matrices begin, on `device`: made without a wait, and
        kept for a next call with the same. Raises `ValueError` if an expert has no matrices, or one that does not begin
        at a whole 16 bytes."""
        asked = device, *only
        if asked not in self._sent:
            numbers = torch.as_tensor(only)
            found = torch.stack([numbers, *(_addresses(of, numbers) for of in (self.gate_up, self.down))], dim=1)
            if ((found[:, 1:] == 0) | (found[:, 1:] % VECTOR != 0)).any():
                for expert in only:
                    self.matrices(expert)
                raise ValueError(f"a matrix of an expert begins at no multiple of {VECTOR} bytes")
            self._sent.clear()
            self._sent[asked] = on_device(found, device)
        return self._sent[asked]


def scratch_numbers(pairs: int, experts: int) -> tuple[int, int, int]:
    """Numbers, int32, by which a kernel puts so many pairs of a row and one of its experts in order: the pair at each
    place, the place of each pair, and three of each tile that there can be."""
    return pairs, pairs, 3 * (experts + pairs // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Equal parts of `weight`, cut when they are asked for: to cut hundreds at every step would be slow."""

    weight: Matrix
    experts: int

    def __getitem__(self, expert: int, /) -> Matrix:
        rows = self.weight.shape[0] // self.experts
        return self.weight[expert * rows : (expert + 1) * rows]


def _addresses(matrices: Matrices, experts: Int64[Tensor, " only"]) -> Int64[Tensor, " only"]:
    """0 where an expert has none."""
    if isinstance(matrices, _Stack):
        return _bytes(matrices.weight).data_ptr() + experts * (matrices.weight.nbytes // matrices.experts)
    each = (matrices[expert] for expert in experts.tolist())
    return torch.tensor([0 if matrix is None else _bytes(matrix).data_ptr() for matrix in each])


def _bytes(matrix: Matrix) -> Tensor:
    return matrix.bytes if isinstance(matrix, CodedRows) else matrix
