"""The matrices of a layer's experts, each at any address, or missing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.host_values import on_device
from tiered.kernels.row_code import VECTOR

TILE_ROWS = 16  # rows of one expert in a program of a kernel: with hundreds of experts few have more in a step
Matrix = Float[Tensor, "out inner"] | CodedRows


@runtime_checkable
class Matrices(Protocol):
    """The matrix of every expert, maybe sliced on access; None for an expert without one in this call."""

    def __getitem__(self, expert: int, /) -> Matrix | None: ...


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """The matrices of one layer's experts, all of one dtype and code. They are never moved.

    A kernel reads each at its own address. A matrix is contiguous, on the device or in pinned host memory.

    Attributes:
        gate_up: matrix [2 · inner, width] of every expert: the rows of the gate, then those of the up projection.
        down: matrix [width, inner] of every expert.
    """

    gate_up: Matrices
    down: Matrices
    _sent: dict[tuple[torch.device | int, ...], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of_stacks(cls, gate_up: Matrix, down: Matrix, experts: int) -> "ExpertTable":
        """The table of `experts` whose matrices are contiguous in each stack."""
        return cls(_Stack(gate_up, experts), _Stack(down, experts))

    def matrices(self, expert: int) -> tuple[Matrix, Matrix]:
        """Both matrices of `expert`. Raises `ValueError` if it has none in this call."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        if gate_up is None or down is None:
            raise ValueError(f"expert {expert} has no matrices in this call")
        return gate_up, down

    def addresses(self, only: Sequence[int], device: torch.device) -> Int64[Tensor, "only 3"]:
        """Number of each expert in `only` and the addresses of its two matrices, on `device`. Made without a wait, and
        cached for a next call with the same arguments. Raises `ValueError` if an expert has no matrices, or one that
        does not begin at a multiple of 16 bytes."""
        asked = device, *only
        if asked not in self._sent:
            numbers = torch.as_tensor(only)
            found = torch.stack([numbers, *(_addresses(of, numbers) for of in (self.gate_up, self.down))], dim=1)
            if ((found[:, 1:] == 0) | (found[:, 1:] % VECTOR != 0)).any():
                for expert in only:
                    self.matrices(expert)
                raise ValueError(f"a matrix of an expert does not begin at a multiple of {VECTOR} bytes")
            self._sent.clear()
            self._sent[asked] = on_device(found, device)
        return self._sent[asked]


def scratch_numbers(pairs: int, experts: int) -> tuple[int, int]:
    """Counts of int32 numbers with which a kernel sorts `pairs` by expert: one for each place, and three for each
    possible tile. A pair is a row and one of its experts."""
    return pairs, 3 * (experts + pairs // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Equal parts of `weight`, sliced on access, because slicing hundreds at every step would be slow."""

    weight: Matrix
    experts: int

    def __getitem__(self, expert: int, /) -> Matrix:
        rows = self.weight.shape[0] // self.experts
        return self.weight[expert * rows : (expert + 1) * rows]


def _addresses(matrices: Matrices, experts: Int64[Tensor, " only"]) -> Int64[Tensor, " only"]:
    """Addresses; 0 for an expert without a matrix."""
    if isinstance(matrices, _Stack):
        return _bytes(matrices.weight).data_ptr() + experts * (matrices.weight.nbytes // matrices.experts)
    each = (matrices[expert] for expert in experts.tolist())
    return torch.tensor([0 if matrix is None else _bytes(matrix).data_ptr() for matrix in each])


def _bytes(matrix: Matrix) -> Tensor:
    return matrix.bytes if isinstance(matrix, CodedRows) else matrix
