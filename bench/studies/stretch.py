"""Lookups at and past the positions that an embedded model knows, by the scaling of its rotation.

The model was trained on lookups of up to 2048 tokens and on shorter ones mostly; its config allows 4096 positions. A
scaling is KIND:FACTOR:TRAINED, the last in positions, or `default`. `none` answers, with all tokens surer than 0.9 at
once: errors are the model's. Positions are those of a call, answer included. It takes about half an hour on one idle
core.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from workloads.answer_tables import mean, pivot, right_of, where
from workloads.answers import OF, TIMED, measure
from workloads.models import local, weights

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

ANSWER = 32
AXES: Axes = {
    "model": ["embedded"],
    "scaling": [
        "default",
        *(f"{kind}:{times}" for kind in ("linear", "ntk", "yarn") for times in ("2:2048", "4:1024")),
    ],
    "positions": [1024, 2048, 4096],
    "examples": [60],
}
QUICK: Axes = {"scaling": ["default", "ntk:2:2048"], "positions": [256], "examples": [1]}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Scalings in turn at each number of positions."""
    for model, positions, scaling, count in product(
        *(axes[name] for name in ("model", "positions", "scaling", "examples"))
    ):
        call = {"max_new_tokens": ANSWER, "block_length": ANSWER, "confidence_threshold": 0.9}
        of = {"policy": "none", "options": {"rope_scaling": scaling_of(scaling)}, "call": call}
        asked = {"scaling": scaling, "positions": positions, "tasks": [["lookup", positions - ANSWER, count]]}
        yield weights(model) | asked | of


def scaling_of(text: str) -> dict[str, Any]:
    """The scaling as config.json has it. Raises `ValueError`."""
    if text == "default":
        return {"rope_type": text}
    kind, _, numbers = text.partition(":")
    try:
        factor, trained = map(int, numbers.split(":"))
    except ValueError as error:
        raise ValueError(f"scaling = {text!r}; default, or KIND:FACTOR:TRAINED as yarn:2:2048, is allowed") from error
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": trained}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Right answers, and forwards of an example, by scaling and positions."""
    seen, nfe = merged(rows, of=OF, timed=TIMED), mean("nfe", 1)
    columns = {
        f"{positions} positions": (where(positions=positions), lambda own: f"{right_of(own)}; {nfe(own)}")
        for positions in dict.fromkeys(row["positions"] for row in seen)
    }
    return {"stretch": pivot(seen, lambda row: f"`{row['scaling']}`", columns)}
