"""A figure over C, M and T as a table: mean and spread of every point, and for accuracy what was asked."""

from reporting.figure import Cell, Table
from reporting.knob_words import asked_of
from reporting.metrics import Metric
from reporting.points import Point, Spread, wilson
from reporting.slices import Slice
from reporting.wording import DASH


def knob_table(metric: Metric, points: Slice) -> Table:
    """One row for each point of a slice."""
    shares = metric.name == "accuracy"
    tasks = list(dict.fromkeys(task for point in points.points for task in point.tasks)) if shares else []
    heads = ["C", "M", "T", "runs", metric.unit, "least", "most"]
    heads += ["right of asked", "95 % interval", *tasks] if shares else []
    rows = []
    for point in points.points:
        spread = point.spread(metric.of)
        knobs = (point.clusters, point.settings["top_m"], point.settings["update_threshold"])
        cells = [Cell(DASH if knob is None else str(knob), knob if isinstance(knob, int) else None) for knob in knobs]
        if spread is None:
            cells += [Cell("0", 0), Cell(f"{point.status}: {point.why or 'no figure'}"), Cell(DASH), Cell(DASH)]
        else:
            cells.append(Cell(str(spread.runs), spread.runs))
            cells += [Cell(metric.show(figure), figure) for figure in (spread.value, spread.low, spread.high)]
        if shares:
            cells += _counts(point)
            cells += [_cell(metric, point.spread(metric.of, [task])) for task in tasks]
        rows.append(cells)
    return Table(name=points.title, columns=heads, rows=rows)


def _cell(metric: Metric, spread: Spread | None) -> Cell:
    return Cell(DASH) if spread is None else Cell(metric.show(spread.value), spread.value)


def _counts(point: Point) -> list[Cell]:
    """Right of asked, and the interval."""
    correct, asked = asked_of(point) if point.rows else (0, 0)
    if not asked:
        return [Cell(DASH), Cell(DASH)]
    low, high = wilson(correct, asked)
    return [Cell(f"{correct} of {asked}", correct), Cell(f"{100 * low:.1f} to {100 * high:.1f} %", low)]
