"""A figure over C and T: a grid for each M, and what its shades mean."""

from collections.abc import Iterable
from typing import Any

from reporting.figure import Group
from reporting.grid_panel import Square, grid_panel, hatch_panel, ramp_panel
from reporting.metrics import Metric
from reporting.points import Point, Spread
from reporting.slices import Slice
from reporting.svg import Panel
from reporting.wording import counted, listed


def knob_group(metric: Metric, points: Slice, *, title: str, is_open: bool, tasks: list[str] | None = None) -> Group:
    """Panels of a slice; `tasks`: those that count, None: all."""
    spreads = {point.name: point.spread(metric.of, tasks) for point in points.points}
    figures = [spread.value for spread in spreads.values() if spread is not None]
    low, high = _range(metric, figures)

    def panel(top_m: Any) -> Panel:
        def square(column: Any, row: Any) -> Square | None:
            point = points.at(C=row, M=top_m, T=column)
            return None if point is None else _square(metric, point, spreads[point.name], low, high)

        name = f"M = {'default' if top_m is None else top_m}"
        return grid_panel(
            title=name,
            label=f"{metric.noun}, {name}; the table below has the figures",
            columns=points.levels("T"),
            rows=points.levels("C"),
            names=("T", "C"),
            square=square,
            ramp=metric.ramp,
        )

    hatched = listed(list(dict.fromkeys(point.status for point in points.points if spreads[point.name] is None)))
    legend = []
    if figures:
        ends = (metric.cell(low, high), metric.cell(high, high))
        legend = [ramp_panel(metric.ramp, ends, metric.unit_of(high))]
    legend += [hatch_panel(hatched)] if hatched else []
    return Group(title=title, panels=[*map(panel, points.levels("M")), *legend], open=is_open)


def _square(metric: Metric, point: Point, spread: Spread | None, low: float, high: float) -> Square:
    if spread is None:
        return Square(shown=point.status, tip=f"{point.label}\n{point.status}: {point.why or 'no figure'}")
    lines = [point.label, metric.show(spread.value)]
    if spread.runs > 1:
        lines.append(f"{metric.show(spread.low)} to {metric.show(spread.high)} in {spread.runs} runs")
    if point.lost:
        lines.append(f"{counted(point.lost, 'run')} without figures: {point.why}")
    return Square(
        shown=metric.cell(spread.value, high),
        below=_far(metric, spread),
        share=(spread.value - low) / ((high - low) or 1),
        value=spread.value,
        tip="\n".join(lines),
    )


def _far(metric: Metric, spread: Spread) -> str:
    """How far the farthest run was: in per cent of the mean, or in points of a share."""
    far = max(spread.high - spread.value, spread.value - spread.low)
    share = far / spread.value if metric.ratio and spread.value else far
    return f"\N{PLUS-MINUS SIGN}{100 * share:.1f}{' %' if metric.ratio else ''}" if share >= 0.0005 else ""


def _range(metric: Metric, figures: Iterable[float]) -> tuple[float, float]:
    """Of the shades: that of the figures, but never so narrow that noise looks like a finding."""
    figures = list(figures)
    if not figures:
        return 0.0, 1.0
    low, high = min(figures), max(figures)
    least = metric.least if not metric.ratio else metric.least * high
    return (low, high) if high - low >= least else (max(0.0, high - least), high or 1.0)
