"""What a measurement by region found: drift from step to step, attention by place, and their means."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.observe.analysis.figures import cell, mean_over_steps, plain_lists
from tiered.observe.analysis.regions import Region

# Columns of the canvas, each in one place; `trailing`: noise behind the answer, which nobody denoises.
PLACES: tuple[str, ...] = (*(region.value for region in Region), "trailing")
# What attention falls on: `sinks` are learned tokens of no column.
MASSES: tuple[str, ...] = (*PLACES, "sinks")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionReport:
    """Step drift: 1 − cos of a row's key, or value, and the same row's one step before, the mean over the heads, rows
    and sequences of a place. NaN where a place has no columns, and at a block's first step, which follows none.

    Attention: the weights that the rows of the current block spend on a place, the mean over heads, rows and sequences;
    they add up to 1, and are 0 where a place has no columns.

    Attributes:
        keys, values: step drift, float64 [steps, layers, places], in the order of `PLACES`.
        attention: float64 [steps, layers, masses], in the order of `MASSES`.
        rows: rows of each place, int64 [steps, places].
        blocks: block of every step.
        numbers: number of every step in its block.
    """

    keys: NDArray[np.float64] = field(repr=False)
    values: NDArray[np.float64] = field(repr=False)
    attention: NDArray[np.float64] = field(repr=False)
    rows: NDArray[np.int64] = field(repr=False)
    blocks: list[int]
    numbers: list[int]

    def by_layer(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `keys` or `values` over the steps that have a figure, [layers, places]; each step counts the
        same."""
        return mean_over_steps(distances, (self.rows > 0) & self._follows[:, None])

    def attention_by_layer(self) -> NDArray[np.float64]:
        """The mean over all steps, [layers, masses]: a place without columns counts as 0, so the sum is 1."""
        return self.attention.mean(axis=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON: every figure and its means by layer and overall; None for NaN."""
        means = {
            "keys": self.by_layer(self.keys),
            "values": self.by_layer(self.values),
            "attention": self.attention_by_layer(),
        }
        steps = zip(self.blocks, self.numbers, self.rows.tolist(), strict=True)
        return {
            "places": list(PLACES),
            "masses": list(MASSES),
            "steps": [{"block": block, "number": number, "rows": rows} for block, number, rows in steps],
            **{
                name: {
                    "overall": plain_lists(mean.mean(axis=0)),
                    "by_layer": plain_lists(mean),
                    "all": plain_lists(getattr(self, name)),
                }
                for name, mean in means.items()
            },
        }

    def __str__(self) -> str:
        """The means by layer and over all of them as plain text, fewer than 100 columns wide."""
        return "\n".join(self._lines())

    @property
    def _follows(self) -> NDArray[np.bool_]:
        """Steps that have one before them in their block."""
        return np.array(self.numbers) > 0

    def _lines(self) -> Iterator[str]:
        steps = len(self.numbers)
        # Most models have no sinks, and most calls nothing behind the answer: no columns of dashes then.
        trailing, sinks = bool(self.rows[:, -1].any()), bool(self.attention[..., -1].any())
        shown = [*range(len(Region)), *([len(Region)] if trailing else [])]
        yield f"step drift (1 - cos), mean over the {int(self._follows.sum())} of {steps} forwards that follow another"
        for name, distances in (("keys", self.keys), ("values", self.values)):
            yield ""
            yield from _table(name, shown, [list(map(cell, row)) for row in _with_mean(self.by_layer(distances))])
        if sinks:
            shown = [*shown, len(PLACES)]
        yield ""
        yield f"attention of the current block's rows, %, mean over {steps} forwards"
        yield ""
        there = [*(self.rows.sum(axis=0) > 0).tolist(), True]
        attention = [
            [f"{100 * mass:.1f}" if is_there else "-" for mass, is_there in zip(row, there, strict=True)]
            for row in _with_mean(self.attention_by_layer())
        ]
        yield from _table("", shown, attention)


def _with_mean(by_layer: NDArray[np.float64]) -> list[list[float]]:
    """The rows of every layer, and their mean."""
    return [*by_layer.tolist(), by_layer.mean(axis=0).tolist()]


def _table(name: str, shown: list[int], cells: list[list[str]]) -> Iterator[str]:
    yield f"{name:<8}" + "".join(f"{MASSES[place]:>11}" for place in shown)
    names = [*(f"layer {layer}" for layer in range(len(cells) - 1)), "all"]
    for label, row in zip(names, cells, strict=True):
        yield f"{label:<8}" + "".join(f"{row[place]:>11}" for place in shown)
