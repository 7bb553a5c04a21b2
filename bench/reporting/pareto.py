"""The figure of device bytes against tokens a second, with accuracy as colour and the frontier of those that are as
good as the best."""

from reporting.contenders import CLOSE, Contender, Workload, frontier, workloads
from reporting.figure import Cell, Figure, Group, Table, missing
from reporting.grid_panel import ramp_panel
from reporting.pareto_panel import pareto_panel, shapes_panel
from reporting.points import Point, wilson
from reporting.skips import Source
from reporting.wording import DASH, listed, named, nbytes, percent, plain

NAME, TOPIC = "pareto", "Memory against speed"
COUNTED = (
    " Bytes of baselines are counted: weights and cached tensors, without what a pass takes. They belong further to "
    "the right, and no line goes through them."
)
HINT = "python bench/sweep.py and python bench/compare.py make what is compared."


def pareto_figures(sweep: Source, points: list[Point], compare: Source) -> list[Figure]:
    """One figure, with a panel for every workload."""
    found = workloads(sweep, points, compare)
    if not found:
        gaps = [source.gap for source in (sweep, compare) if source.gap] or ["No two rows answered the same calls"]
        return [missing(NAME, TOPIC, "; ".join(gaps), HINT)]
    first, *others = found
    accuracies = [share for each in found for who in each.contenders if (share := each.accuracy(who)) is not None]
    low, high = min(accuracies, default=0.0), max(accuracies, default=1.0)
    low = min(low, high - 0.1)
    legend = ramp_panel("accuracy", (percent(max(0.0, low)), percent(high)), "accuracy")
    keys = shapes_panel([kind for kind in ("sweep", "policy", "baseline") if any(_has(each, kind) for each in found)])
    groups = [
        Group(
            title=first.title,
            panels=[pareto_panel(first, 946.0, 460.0, low, high), legend, keys],
            narrow=[pareto_panel(first, 370.0, 380.0, low, high), legend, keys],
        )
    ]
    groups += [
        Group(
            title=each.title,
            panels=[pareto_panel(each, 946.0, 400.0, low, high)],
            narrow=[pareto_panel(each, 370.0, 360.0, low, high)],
            open=number == 0,
        )
        for number, each in enumerate(others)
    ]
    figure = Figure(
        name=NAME,
        topic=TOPIC,
        headline=_sentence(first),
        caption="Up and to the left is better: more tokens a second, fewer bytes in the device tier at its peak, "
        f"weights included. The solid line joins those within {100 * CLOSE:g} points of the best accuracy for whom no "
        "other of them is as small and as fast; the dotted line all for whom no other is, right or wrong. Accuracy is "
        "over the tasks that all in a panel were asked. Panels have other calls: they do not compare with one another."
        + COUNTED
        * any(who.counted for each in found for who in each.contenders),
        groups=groups,
        tables=[_table(each) for each in found],
        sources=sorted({file for each in found for file in each.files}),
        notes=[f"{each.title}: accuracy over {listed(each.tasks)}." for each in found if each.tasks],
    )
    return [figure]


def _has(workload: Workload, kind: str) -> bool:
    return any(who.kind == kind for who in workload.contenders)


def _sentence(workload: Workload) -> str:
    close = workload.close()
    fastest, smallest = frontier(close)[-1], frontier(close)[0]
    best = max((share for who in close if (share := workload.accuracy(who)) is not None), default=None)
    among = "" if best is None else f"Within {100 * CLOSE:g} points of the best accuracy ({percent(best)}), "
    if fastest is smallest:
        return f"{among}{named(fastest.name)} is both the fastest and the smallest: {_figures(fastest)}."
    return (
        f"{among}{named(fastest.name)} is the fastest ({_figures(fastest)}), {named(smallest.name)} the smallest "
        f"({_figures(smallest)})."
    )


def _figures(who: Contender) -> str:
    return f"{plain(who.speed.value)} tokens/s in {nbytes(who.nbytes)}"


def _table(workload: Workload) -> Table:
    line, close = frontier(workload.close()), workload.close()
    rows = []
    for who in sorted(workload.contenders, key=lambda each: -each.speed.value):
        share = workload.accuracy(who)
        correct, asked = (sum(who.right[task][place] for task in workload.tasks) for place in (0, 1))
        low, high = wilson(correct, asked) if asked else (0.0, 1.0)
        rows.append(
            [
                Cell(who.name),
                Cell(who.settings or DASH),
                Cell(who.kind),
                Cell(f"≥ {nbytes(who.nbytes)}" if who.counted else nbytes(who.nbytes), who.nbytes),
                Cell(plain(who.speed.value), who.speed.value),
                Cell(
                    f"{plain(who.speed.low)} to {plain(who.speed.high)}" if who.speed.runs > 1 else DASH, who.speed.low
                ),
                Cell(percent(share), share),
                Cell(f"{correct} of {asked}; {100 * low:.1f} to {100 * high:.1f} %" if asked else DASH, low),
                Cell("on the line" if who in line else "as right" if who in close else ""),
            ]
        )
    heads = (
        "who",
        "settings",
        "kind",
        "device peak",
        "tokens/s",
        "spread",
        "accuracy",
        "right; 95 % interval",
        "frontier",
    )
    return Table(name=workload.title, columns=heads, rows=rows)
