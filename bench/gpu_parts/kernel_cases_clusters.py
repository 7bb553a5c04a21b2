"""Cases of the kernels of k-means: picks of its start, rows for empty clusters, and turned directions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gpu_parts.kernel_case import KernelCase, normal, op, size
from tiered.kernels.far_rows_ref import far_rows
from tiered.kernels.greedy_picks_ref import greedy_picks

_APART = 2**-17


class Sketch(NamedTuple):
    sketch: Tensor
    usable: Tensor
    draws: Tensor


@dataclass(frozen=True, kw_only=True)
class GreedyPicks(KernelCase):
    """Coordinates are −1/8, 0 and 1/8, so that no sum is rounded, and rounding chooses no row."""

    kernel = "greedy_picks"
    groups: int = 2
    rows: int = 4103
    width: int = 128
    clusters: int = 64
    trials: int = 12

    def tiny(self) -> Self:
        return replace(self, rows=70, width=min(self.width, 40), clusters=4)

    def draw(self, generator: torch.Generator) -> Sketch:
        shape, device = (self.groups, self.rows, self.width), generator.device
        sketch = torch.randint(-1, 2, shape, generator=generator, device=device) / 8
        draws = torch.rand(self.clusters, self.trials, generator=generator, device=device, dtype=torch.float64)
        return Sketch(sketch, torch.rand(shape[:2], generator=generator, device=device) < 0.9, draws)

    def run(self, given: Sketch, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(*given, _APART),)

    def law(self, given: Sketch) -> tuple[Tensor, ...]:
        return (greedy_picks(*given, _APART),)

    def moved(self, given: Sketch) -> int:
        return size(*given) + 8 * self.groups * self.clusters

    def arithmetic(self, given: Sketch) -> int:
        return 2 * self.groups * self.rows * self.width * self.clusters * self.trials


class Ranks(NamedTuple):
    rank: Tensor
    empty: Tensor


@dataclass(frozen=True, kw_only=True)
class FarRows(KernelCase):
    """`share` of the clusters are empty."""

    kernel = "far_rows"
    groups: int = 2
    rows: int = 16385
    clusters: int = 257
    share: float = 1.0

    def tiny(self) -> Self:
        return replace(self, rows=1100, clusters=37, share=max(self.share, 0.2))

    def draw(self, generator: torch.Generator) -> Ranks:
        rank, empty = (
            torch.rand(self.groups, count, generator=generator, device=generator.device)
            for count in (self.rows, self.clusters)
        )
        return Ranks(rank.square(), empty <= self.share)

    def run(self, given: Ranks, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(*given, _APART).where(given.empty, 0),)

    def law(self, given: Ranks) -> tuple[Tensor, ...]:
        return (far_rows(*given, _APART).where(given.empty, 0),)

    def moved(self, given: Ranks) -> int:
        return size(*given) + 8 * given.empty.numel()


class Turning(NamedTuple):
    directions: Tensor
    sums: Tensor
    empty: Tensor
    picks: Tensor
    rows: Tensor
    inverse: Tensor


@dataclass(frozen=True, kw_only=True)
class TurnDirections(KernelCase):
    """Some clusters are empty, and some sums are 0. A row is scaled, its norm is rounded, and it is divided by that.

    Attributes:
        given: dtype of the rows.
    """

    kernel, roundings = "turn_directions", 2
    dtype: torch.dtype = torch.float32
    given: torch.dtype = torch.bfloat16
    groups: int = 2
    rows: int = 300
    clusters: int = 64
    width: int = 4096

    def tiny(self) -> Self:
        return replace(self, rows=9, clusters=5, width=24 + self.width % 7)

    def draw(self, generator: torch.Generator) -> Turning:
        device, clusters = generator.device, (self.groups, self.clusters)
        directions, sums = (normal(generator, *clusters, self.width) for _ in range(2))
        sums[:, 1] = 0
        rows = normal(generator, self.groups, self.rows, self.width, dtype=self.given)
        number = torch.arange(self.clusters, device=device).expand(clusters)
        picks = torch.randint(self.rows, clusters, generator=generator, device=device)
        return Turning(
            directions / directions.norm(dim=-1, keepdim=True),
            sums,
            number % 3 == 2,
            picks,
            rows,
            1 / rows.float().norm(dim=-1),
        )

    def run(self, given: Turning, room: Sequence[Tensor]) -> Sequence[Tensor]:
        return (op(self.kernel)(*given),)

    def truth(self, given: Turning) -> tuple[Tensor, ...]:
        group = torch.arange(self.groups, device=given.picks.device)[:, None]
        turned = given.sums.double().where(~given.empty[..., None], given.rows[group, given.picks].double())
        norms = turned.norm(dim=-1, keepdim=True)
        return (torch.where(norms > 0, turned / norms, given.directions.double()),)

    def moved(self, given: Turning) -> int:
        filled = int(given.empty.sum())
        kept = given.empty.numel() - filled
        of_rows = filled * (self.width * given.rows.element_size() + 4)
        return 4 * self.width * (kept + given.empty.numel()) + of_rows + size(given.empty, given.picks)


CHECKED: tuple[KernelCase, ...] = (
    GreedyPicks(),
    GreedyPicks(width=75, trials=17),
    FarRows(),
    FarRows(share=0.02),
    TurnDirections(),
    TurnDirections(given=torch.float32, width=3584),
)
TIMED: tuple[KernelCase, ...] = ()
