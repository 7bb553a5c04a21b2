"""Cases of a layer's operations beside its matrix products and its attention: norm, rotation, gate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from gpu_parts.kernel_cases_attention import TIMED_KEYS
from tiered.kernels.gate_mul_ref import Activation
from tiered.kernels.rotate_ref import HeadNorms

_EPS = 1e-5
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
}


class Normed(NamedTuple):
    """Hidden states of all columns; a weight; and a branch that is added to the rows that are normed."""

    hidden: Tensor
    weight: Tensor | None
    branch: Tensor | None


@dataclass(frozen=True, kw_only=True)
class RmsNorm(KernelCase):
    """Given: hidden states of all `length` columns, of which the last `rows` are normed; a weight, if `weighted`; a
    branch, if `branched`."""

    kernel, roundings = "rms_norm", 2
    batch: int = 2
    rows: int = 257
    length: int = 300
    width: int
    offset: float | None = None
    weighted: bool = True
    branched: bool = False

    def tiny(self) -> Self:
        return replace(self, rows=5, length=9, width=24 + self.width % 16)

    def draw(self, generator: torch.Generator) -> Normed:
        weight = normal(generator, self.width, dtype=self.dtype) if self.weighted else None
        hidden = normal(generator, self.batch, self.length, self.width, dtype=self.dtype)
        branch = normal(generator, self.batch, self.rows, self.width, dtype=self.dtype) if self.branched else None
        return Normed(hidden, weight, branch)

    def room(self, given: Normed) -> tuple[Tensor, ...]:
        return () if given.branch is None else (given.hidden.clone(),)

    def run(self, given: Normed, room: Sequence[Tensor]) -> Sequence[Tensor]:
        hidden = (room[0] if room else given.hidden)[:, -self.rows :]
        normed = op(self.kernel)(hidden, given.weight, _EPS, offset=self.offset, branch=given.branch)
        return (normed, hidden) if room else (normed,)

    def truth(self, given: Normed) -> Sequence[Tensor]:
        hidden, weight = given.hidden[:, -self.rows :].double(), given.weight
        if given.branch is not None:
            hidden = hidden + given.branch.double()
        scale = 1.0 if weight is None else weight.double() + (self.offset or 0.0)
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + _EPS).sqrt() * scale
        return (normed,) if given.branch is None else (normed, hidden)

    def moved(self, given: Normed) -> int:
        rows = size(given.hidden[:, -self.rows :])
        return 2 * rows + size(given.weight) + (2 * rows if self.branched else 0)


class Rotated(NamedTuple):
    """`heads` lie as a projection leaves them. The tables are of all columns; `columns`, [batch, rows], are those of
    the rows, None for all. `norms`: norms of the heads, if they are normed."""

    heads: Tensor
    cos: Tensor
    sin: Tensor
    columns: Tensor | None
    norms: HeadNorms | None = None


@dataclass(frozen=True, kw_only=True)
class Rotate(KernelCase):
    """`tables`: number of tables, one for all sequences or one for each."""

    kernel, roundings = "rotate", 1
    batch: int = 2
    heads: int
    rows: int = 257
    head_dim: int = 128
    length: int = 5003
    tables: int = 1
    scattered: bool = True

    def tiny(self) -> Self:
        return replace(self, heads=2, rows=11, length=37, head_dim=8 + 2 * (self.head_dim % 8))

    def draw(self, generator: torch.Generator) -> Rotated:
        heads = normal(generator, self.batch, self.rows, self.heads, self.head_dim, dtype=self.dtype).transpose(1, 2)
        angles = normal(generator, self.tables, 1, self.length if self.scattered else self.rows, self.head_dim // 2) * 9
        columns = None
        if self.scattered:
            sizes = self.batch, self.rows
            columns = torch.randint(self.length, sizes, generator=generator, device=generator.device)
        return Rotated(heads, angles.cos(), angles.sin(), columns)

    def run(self, given: Rotated, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(*given),)

    def truth(self, given: Rotated) -> Sequence[Tensor]:
        left, right = given.heads.double().chunk(2, dim=-1)
        cos, sin = (table.double().expand(self.batch, -1, -1, -1) for table in (given.cos, given.sin))
        if given.columns is not None:
            index = given.columns[:, None, :, None].expand(-1, -1, -1, cos.shape[3])
            cos, sin = cos.gather(2, index), sin.gather(2, index)
        return (torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1),)

    def moved(self, given: Rotated) -> int:
        angles = 2 * self.rows * self.head_dim // 2 * 4 * self.tables
        return 2 * size(given.heads) + angles + size(given.columns)


@dataclass(frozen=True, kw_only=True)
class NormRotate(Rotate):
    """Heads of which the first `queries` have another norm than the others, the keys."""

    roundings = 3
    queries: int
    offset: float | None = None

    def tiny(self) -> Self:
        return replace(super().tiny(), queries=1)

    def draw(self, generator: torch.Generator) -> Rotated:
        weights = normal(generator, 2, self.head_dim, dtype=self.dtype)
        norms = HeadNorms(weights[0], weights[1], self.queries, _EPS, self.offset)
        return super().draw(generator)._replace(norms=norms)

    def truth(self, given: Rotated) -> Sequence[Tensor]:
        assert given.norms is not None, "they were drawn"
        sizes = self.queries, self.heads - self.queries
        each = [weight.double().expand(count, 1, -1) for weight, count in zip(given.norms[:2], sizes, strict=True)]
        scale = torch.cat(each) + (self.offset or 0.0)
        heads = given.heads.double()
        normed = heads / (heads.square().mean(-1, keepdim=True) + _EPS).sqrt() * scale
        return super().truth(given._replace(heads=normed))


@dataclass(frozen=True, kw_only=True)
class GateMul(KernelCase):
    """Given: two branches of an MLP, the halves of one product."""

    kernel, roundings = "gate_mul", 2
    rows: int = 257
    width: int
    activation: Activation = "silu"

    def tiny(self) -> Self:
        return replace(self, rows=11, width=100 + self.width % 16)

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        gate, up = normal(generator, 1, self.rows, 2 * self.width, dtype=self.dtype).chunk(2, dim=-1)
        return gate.mul_(3), up

    def run(self, given: tuple[Tensor, Tensor], room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(*given, self.activation),)

    def truth(self, given: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        gate, up = (part.double() for part in given)
        return (ACTIVATIONS[self.activation](gate) * up,)

    def moved(self, given: tuple[Tensor, Tensor]) -> int:
        return 3 * size(given[0])


CHECKED: tuple[KernelCase, ...] = (
    RmsNorm(width=4096, branched=True),
    RmsNorm(width=3584),
    RmsNorm(width=8192, dtype=torch.float32, offset=1.0),
    RmsNorm(width=256, rows=2056, length=2056, offset=0.0),
    RmsNorm(width=256, rows=2056, length=2056, weighted=False),
    Rotate(heads=32),
    Rotate(heads=28, tables=2),
    Rotate(heads=4, rows=5003, scattered=False, dtype=torch.float32),
    NormRotate(heads=40, queries=32, scattered=False),
    NormRotate(heads=20, queries=16, dtype=torch.float32, offset=1.0),
    GateMul(width=12288),
    GateMul(width=1023, dtype=torch.float32),
    GateMul(width=2112, activation="gelu"),
)
TIMED: tuple[KernelCase, ...] = (
    RmsNorm(width=4096, batch=1, rows=32, length=32, branched=True),
    Rotate(heads=32, batch=1, rows=32, length=TIMED_KEYS),
    NormRotate(heads=40, queries=32, batch=1, rows=32, length=TIMED_KEYS),
    GateMul(width=12288, rows=32),
)
