"""A mark is a setting of a policy. Up and to the left is better: more right answers for less work. A filled mark has at
most a point fewer right answers than `none` on the same prompts."""

from collections.abc import Sequence
from typing import Any

from studies.frontier import NONE, cells

from charts.rows import Row, good, panels
from charts.theme import alt, colour, data, policy_colours, side_by_side

CALL = ("model", "task", "size", "rule")
COLUMNS = (*CALL, "policy", "setting", "accuracy", "correct", "examples", "near", "rows", "seconds", "device_bytes")
NAMES = {"rows": "rows recomputed for an answer", "seconds": "time of an answer, s"}


def table(rows: Sequence[Row]) -> list[Row]:
    """The settings of all cells on the split that settings are chosen on, with "seconds" of one answer."""
    return [
        row
        | {"accuracy": row["correct"] / row["examples"], "seconds": row["seconds"] / row["examples"]}
        | {"setting": ", ".join(f"{name} {value}" for name, value in row["options"].items())}
        for own in cells(good(rows)).values()
        for row in own
        if row["split"] == "validation"
    ]


def chart(rows: Sequence[Row], width: int, figure: str) -> alt.TopLevelMixin:
    """A panel for each task, size and commit rule; `figure` is "rows" or "seconds"."""
    colours = policy_colours(row["policy"] for row in rows)
    across = alt.Scale(type="log", nice=False, padding=10)
    x = alt.X("cost:Q", title=NAMES[figure], scale=across).axis(format="~s" if figure == "rows" else "~g")
    y = alt.Y("right:Q", title="right answers, %", scale=alt.Scale(domain=[0, 100]))

    def draw(own: Sequence[Row], inner: int) -> Any:
        values = [
            {"cost": row[figure], "right": 100 * row["accuracy"], "policy": row["policy"], "near": row["near"]}
            for row in own
        ]
        base = data(values).encode(x, y, colour("policy", colours, width))
        dots = [
            base.transform_filter("datum.near" if near else "!datum.near").mark_point(filled=near, size=45, opacity=1)
            for near in (True, False)
        ]
        return alt.layer(*dots).properties(width=inner, height=240)

    return side_by_side(panels(rows, CALL), width, draw, margin=62, least=320)


def says(rows: Sequence[Row], figure: str) -> str:
    """The policy with the least `figure` among those as right as `none`, in the panel with most settings."""
    own = max(panels(rows, CALL).values(), key=len)
    least = min((row for row in own if row["near"]), key=lambda row: row[figure])
    none = next(row for row in own if row["policy"] == NONE)
    share = least[figure] / none[figure]
    return f"As right as without a cache: `{least['policy']}` with {share:.2f} of the {figure} of `none`"
