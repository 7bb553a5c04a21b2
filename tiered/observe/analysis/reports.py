"""What measurements found, by area of the canvas: figures of every step and layer, their means, and tables of them."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.models.shape import ModelShape


class Area(StrEnum):
    """Where a column stands to the block being denoised; the areas cover every column once."""

    PROMPT = "prompt"
    PAST = "past"  # finished blocks before the previous one
    PREVIOUS = "previous"  # the block before the current one
    CURRENT = "current"
    NEXT = "next"  # the block behind the current one
    FUTURE = "future"  # everything behind the next block


# What attention falls on: columns, `trailing` ones being noise behind the answer, which no step denoises; and `sinks`,
# learned tokens of no column.
COLUMNS: tuple[str, ...] = (*(area.value for area in Area), "trailing")
MASSES: tuple[str, ...] = (*COLUMNS, "sinks")


def area_spans(prompt_length: int, start: int, stop: int, length: int) -> dict[Area, tuple[int, int]]:
    """First column of every area and the column behind its last; equal where the area has none.

    `start` and `stop` are the columns of the current block, `prompt_length` those of the prompt with its padding, and
    `length` those of the canvas.
    """
    before, behind = max(prompt_length, 2 * start - stop), min(length, 2 * stop - start)
    edges = (0, prompt_length, before, start, stop, behind, length)
    return dict(zip(Area, itertools.pairwise(edges), strict=True))


def check_canvas(shape: ModelShape) -> None:
    """Raise `ValueError` where rows see no canvas, whose areas are compared."""
    if shape.block_causal:
        raise ValueError(
            f"areas of the canvas are compared where every row sees all of it; rows of {shape.family!r} see blocks, "
            "whose keys and values never change once they are finished"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Report:
    """Figures by step; arrays are [steps, layers, areas].

    Attributes:
        keys, values: cosine distances, float64; NaN where there is none.
        rows: rows that each distance is the mean of, int64 [steps, areas].
        blocks: block of every step.
        numbers: number of every step in its block.
    """

    keys: NDArray[np.float64] = field(repr=False)
    values: NDArray[np.float64] = field(repr=False)
    rows: NDArray[np.int64] = field(repr=False)
    blocks: list[int]
    numbers: list[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDriftReport(_Report):
    """Cosine distances (1 − cos) of cached keys and values to recomputed ones: the mean over the heads, rows and
    sequences of an area. Areas are in the order of `Area`; one without rows has NaN, both halves of a guided batch
    count.

    `kinds`: what every step was (`refresh`, `update`, `step`).
    """

    kinds: list[str]

    def by_layer(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `keys` or `values` over the steps in which the area has rows, [layers, areas]; each step counts
        the same."""
        return _mean_over_steps(distances, self.rows > 0)

    def by_step(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `keys` or `values` over the layers, [steps, areas]."""
        return distances.mean(axis=1)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON: every distance and its means; None where an area has no rows."""
        steps = zip(self.blocks, self.numbers, self.kinds, self.rows.tolist(), strict=True)
        return {
            "regions": [area.value for area in Area],
            "steps": [
                {"block": block, "number": number, "kind": kind, "rows": rows} for block, number, kind, rows in steps
            ],
            **{
                name: {
                    "by_layer": _plain(self.by_layer(distances)),
                    "by_step": _plain(self.by_step(distances)),
                    "all": _plain(distances),
                }
                for name, distances in (("keys", self.keys), ("values", self.values))
            },
        }

    def __str__(self) -> str:
        """The means by layer as plain text, fewer than 100 columns wide."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.kinds).items())
        lines = [f"token drift error (1 - cos), mean over {len(self.kinds)} forwards ({kinds})"]
        for name, distances in (("keys", self.keys), ("values", self.values)):
            cells = [list(map(_cell, row)) for row in self.by_layer(distances).tolist()]
            lines += ["", *_table(name, [*Area], cells, mean=False)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionReport(_Report):
    """Distances: 1 − cos of a row's key, or value, and that of the same row one step before, the mean over the heads,
    rows and sequences of an area. NaN where an area has no columns, and at a block's first step, which follows none.

    Attention: the weights that the rows of the current block spend on an area, the mean over heads, rows and sequences;
    they add up to 1, and are 0 where an area has no columns.

    Areas are in the order of `COLUMNS`, those of `attention` [steps, layers, masses] of `MASSES`.
    """

    attention: NDArray[np.float64] = field(repr=False)

    def by_layer(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of `keys` or `values` over the steps that have a figure, [layers, columns]; each step counts the
        same."""
        return _mean_over_steps(distances, (self.rows > 0) & self._follows[:, None])

    def attention_by_layer(self) -> NDArray[np.float64]:
        """The mean over all steps, [layers, masses]: an area without columns counts as 0, so the sum is 1."""
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
            "places": list(COLUMNS),
            "masses": list(MASSES),
            "steps": [{"block": block, "number": number, "rows": rows} for block, number, rows in steps],
            **{
                name: {
                    "overall": _plain(mean.mean(axis=0)),
                    "by_layer": _plain(mean),
                    "all": _plain(getattr(self, name)),
                }
                for name, mean in means.items()
            },
        }

    def __str__(self) -> str:
        """The means by layer and over all of them as plain text, fewer than 100 columns wide."""
        steps, follow = len(self.numbers), int(self._follows.sum())
        # Most models have no sinks, and most calls nothing behind the answer: no columns of dashes then.
        shown: list[str] = [*Area, *(["trailing"] if self.rows[:, -1].any() else [])]
        lines = [f"step drift (1 - cos), mean over the {follow} of {steps} forwards that follow another"]
        for name, distances in (("keys", self.keys), ("values", self.values)):
            cells = [list(map(_cell, row)) for row in _with_mean(self.by_layer(distances))]
            lines += ["", *_table(name, shown, cells, mean=True)]
        if self.attention[..., -1].any():
            shown.append("sinks")
        there = [*(self.rows.sum(axis=0) > 0).tolist(), True]
        cells = [
            [f"{100 * mass:.1f}" if is_there else "-" for mass, is_there in zip(row, there, strict=True)]
            for row in _with_mean(self.attention_by_layer())
        ]
        lines += ["", f"attention of the current block's rows, %, mean over {steps} forwards", ""]
        return "\n".join([*lines, *_table("", shown, cells, mean=True)])

    @property
    def _follows(self) -> NDArray[np.bool_]:
        """Steps that have one before them in their block."""
        return np.array(self.numbers) > 0


def _mean_over_steps(figures: NDArray[np.float64], there: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The mean of `figures` [steps, layers, areas] over the steps in which an area is `there` [steps, areas]; each step
    counts the same."""
    # Not nanmean: a cache that holds no numbers must show.
    total = np.where(there[:, None], figures, 0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        return total / there.sum(axis=0)


def _plain(figures: NDArray[np.float64]) -> list[Any]:
    """Nested lists, with None for NaN, which JSON does not have."""
    plain = figures.astype(object)
    plain[np.isnan(figures)] = None
    return plain.tolist()


def _with_mean(by_layer: NDArray[np.float64]) -> list[list[float]]:
    """The rows of every layer, and their mean."""
    return [*by_layer.tolist(), by_layer.mean(axis=0).tolist()]


def _cell(figure: float) -> str:
    """Three digits; `-` for what there is none of."""
    if figure != figure:
        return "-"
    return f"{figure:.2e}" if figure else "0"


def _table(name: str, shown: Sequence[str], cells: list[list[str]], *, mean: bool) -> Iterator[str]:
    """Columns `shown` of the cells of every layer; `mean`: the last row is of all of them."""
    yield f"{name:<8}" + "".join(f"{column:>11}" for column in shown)
    for layer, row in enumerate(cells):
        label = "all" if mean and layer == len(cells) - 1 else f"layer {layer}"
        yield f"{label:<8}" + "".join(f"{row[MASSES.index(column)]:>11}" for column in shown)
