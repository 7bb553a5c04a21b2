"""The figures over C and T: accuracy, speed, device memory and traffic, a panel for each M."""

from reporting.figure import Figure, missing
from reporting.knob_grid import knob_group
from reporting.knob_table import knob_table
from reporting.knob_words import certainty, sentence
from reporting.metrics import METRICS, Metric
from reporting.points import Point
from reporting.skips import Source
from reporting.slices import Slice, slices_of
from reporting.wording import counted

HINT = "python bench/sweep.py makes a sweep over C, M and T."
TOPICS = {
    "accuracy": "Accuracy over C and T",
    "tokens_per_second": "Speed over C and T",
    "device_bytes": "Device memory over C and T",
    "moved": "Traffic over C and T",
}
WHAT = {
    "accuracy": "Right answers in per cent, of all tasks together.",
    "tokens_per_second": "Tokens of answers a second, over all tasks; no prompt, no padding, nothing behind an end.",
    "device_bytes": "The most that the device tier held during any task, weights included.",
    "moved": "Bytes copied to the device, divided by forwards. Of several sequences a call their mean is known, the "
    "fewest that the call can have had: the figure is then an upper bound.",
}


def knob_figures(sweep: Source, points: list[Point]) -> list[Figure]:
    """One figure for each metric."""
    slices = slices_of(points)
    gap = sweep.gap or (None if slices else f"{sweep.file} has no two points that differ in C, M or T alone")
    if gap is not None:
        return [missing(name, topic, gap, HINT) for name, topic in TOPICS.items()]
    return [_figure(metric, slices, sweep.file) for metric in METRICS]


def _figure(metric: Metric, slices: list[Slice], file: str) -> Figure:
    first = slices[0]
    groups = [knob_group(metric, first, title=first.title, is_open=True)]
    tasks = list(dict.fromkeys(task for point in first.points for task in point.tasks))
    if metric.name == "accuracy" and len(tasks) > 1:
        groups += [knob_group(metric, first, title=f"{task} alone", is_open=False, tasks=[task]) for task in tasks]
    groups += [knob_group(metric, each, title=each.title, is_open=False) for each in slices[1:]]
    lost = [point for point in first.points if point.status != "ok"]
    notes = [f"{counted(len(lost), 'point')} of {len(first.points)} without figures: hatched."] if lost else []
    return Figure(
        name=metric.name,
        topic=TOPICS[metric.name],
        headline=sentence(metric, first),
        caption=f"{WHAT[metric.name]} Rows: clusters C. Columns: T, the commits that call for no update yet. Panels: "
        f"M, the clusters that an update recomputes.{certainty(metric, first)}",
        groups=groups,
        tables=[knob_table(metric, each) for each in slices],
        sources=[file],
        notes=notes,
    )
