"""Where the matrices of a layer's experts lie: those of one expert may be anywhere, or in no memory at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from tiered.kernels.coded_rows import CodedRows

Matrix = Float[Tensor, "out inner"] | CodedRows


@runtime_checkable
class Matrices(Protocol):
    """A matrix for every expert, made when it is asked for; None where an expert has none in this call."""

    def __getitem__(self, expert: int, /) -> Matrix | None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """The matrices of one layer's experts, all of one dtype and code.

    Attributes:
        gate_up: matrix [2 · inner, width] of every expert: the rows of its gate, and of what the gate multiplies.
        down: matrix [width, inner] of every expert.
    """

    gate_up: Matrices | Sequence[Matrix | None]
    down: Matrices | Sequence[Matrix | None]

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


@dataclass(frozen=True, slots=True)
class _Stack:
    """Equal parts of `weight`, cut when they are asked for: to cut hundreds at every step would be slow."""

    weight: Matrix
    experts: int

    def __getitem__(self, expert: int, /) -> Matrix:
        rows = self.weight.shape[0] // self.experts
        return self.weight[expert * rows : (expert + 1) * rows]

    def __len__(self) -> int:
        return self.experts
