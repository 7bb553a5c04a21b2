"""What a measurement of token drift found: distances by step, layer and region, and their means."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.observe.analysis.figures import cell, mean_over_steps, plain_lists
from tiered.observe.analysis.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDriftReport:
    """Cosine distances (1 − cos) of cached keys and values to recomputed ones: the mean over the heads, rows and
    sequences of a region. Regions are in the order of `Region`; one without rows has NaN.

    Attributes:
        keys, values: float64 [steps, layers, regions].
        rows: rows that each mean is over, int64 [steps, regions]; both halves of a guided batch count.
        blocks: block of every step.
        numbers: number of every step in its block.
        kinds: what every step's forward was for (`refresh`, `update`, `step`).
    """

    keys: NDArray[np.float64] = field(repr=False)
    values: NDArray[np.float64] = field(repr=False)
    rows: NDArray[np.int64] = field(repr=False)
    blocks: list[int]
    numbers: list[int]
    kinds: list[str]

    def by_layer(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `keys` or `values` over the steps in which the region has rows, [layers, regions]; each step
        counts the same."""
        return mean_over_steps(distances, self.rows > 0)

    def by_step(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `keys` or `values` over the layers, [steps, regions]."""
        return distances.mean(axis=1)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON: every distance and its means; None where a region has no rows."""
        steps = zip(self.blocks, self.numbers, self.kinds, self.rows.tolist(), strict=True)
        return {
            "regions": [region.value for region in Region],
            "steps": [
                {"block": block, "number": number, "kind": kind, "rows": rows} for block, number, kind, rows in steps
            ],
            **{
                name: {
                    "by_layer": plain_lists(self.by_layer(distances)),
                    "by_step": plain_lists(self.by_step(distances)),
                    "all": plain_lists(distances),
                }
                for name, distances in (("keys", self.keys), ("values", self.values))
            },
        }

    def __str__(self) -> str:
        """The means by layer as plain text, fewer than 100 columns wide."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.kinds).items())
        yield f"token drift error (1 - cos), mean over {len(self.kinds)} forwards ({kinds})"
        for name, distances in (("keys", self.keys), ("values", self.values)):
            yield ""
            yield f"{name:<8}" + "".join(f"{region.value:>11}" for region in Region)
            for layer, figures in enumerate(self.by_layer(distances).tolist()):
                yield f"layer {layer:<2}" + "".join(f"{cell(figure):>11}" for figure in figures)
