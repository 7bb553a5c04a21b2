"""How measurements are told: figures as cells of a table, arrays as plain lists, means over the steps that have one."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def cell(figure: float) -> str:
    """Three digits; `-` for what there is none of."""
    if figure != figure:
        return "-"
    return f"{figure:.2e}" if figure else "0"


def plain_lists(figures: NDArray[np.float64]) -> list[Any]:
    """Nested lists, with None for NaN, which JSON does not have."""
    plain = figures.astype(object)
    plain[np.isnan(figures)] = None
    return plain.tolist()


def mean_over_steps(
    figures: NDArray[np.float64],  # [steps, layers, regions]
    there: NDArray[np.bool_],  # [steps, regions]
) -> NDArray[np.float64]:
    """The mean over the steps in which a region is `there`, [layers, regions]; each step counts the same."""
    # Not nanmean: a cache that holds no numbers must show.
    total = np.where(there[:, None], figures, 0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        return total / there.sum(axis=0)
