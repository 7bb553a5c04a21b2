"""The figure of copy time by layer: what of it compute hides, and what compute waits for."""

from dataclasses import dataclass

from reporting.bars import Bar, bar_panel, keys_panel
from reporting.figure import Cell, Figure, Group, Table, missing
from reporting.skips import Source
from reporting.wording import DASH, milliseconds, nbytes, percent

NAME, TOPIC = "copies", "Copies behind compute"
HINT = "python bench/overlap.py and python bench/memory.py write them."
KEYS = (("var(--hidden-time)", "hidden: compute went on meanwhile"), ("var(--exposed-time)", "exposed: compute waited"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Copies of a call, by layer: hidden and exposed milliseconds, and bytes (None: not counted)."""

    name: str
    detail: str
    layers: dict[str, tuple[float, float, float | None]]

    @property
    def exposed(self) -> float:
        """The share of copy time that compute waited for."""
        total = sum(hidden + exposed for hidden, exposed, _ in self.layers.values())
        return sum(exposed for _, exposed, _ in self.layers.values()) / total if total else 0.0


def copy_figures(overlap: Source, memory: Source) -> list[Figure]:
    """One figure: runs with slowed copies, then the calls of the memory report."""
    slowed, calls = _slowed(overlap), _calls(memory)
    runs = slowed + calls
    if not runs:
        gaps = [source.gap for source in (overlap, memory) if source.gap]
        return [missing(NAME, TOPIC, "; ".join(gaps) or "No call copied anything", HINT)]
    groups = [
        Group(title=title, panels=[*(_panel(run, group) for run in group), keys_panel(KEYS)])
        for title, group in (
            ("Copies slowed down to a GPU's link; not measured on a GPU", slowed),
            ("Copies of the calls in the memory figure, on this machine", calls),
        )
        if group
    ]
    figure = Figure(
        name=NAME,
        topic=TOPIC,
        headline=_sentence(slowed or calls),
        caption="Time that fetches to the device took, by layer, all updates of a call together. Panels of one group "
        "have one scale.",
        groups=groups,
        tables=[_table(run) for run in runs],
        sources=[source.file for source, there in ((overlap, slowed), (memory, calls)) if there],
    )
    return [figure]


def _slowed(overlap: Source) -> list[Run]:
    return [
        Run(
            name=row["link"],
            detail="no prefetch" if not row["prefetch_layers"] else f"prefetch {row['prefetch_layers']} ahead",
            layers={
                # An asynchronous clock may see a wait end a little after its copy.
                layer: (
                    max(0.0, figures["copy_ms"] - figures["exposed_ms"]),
                    figures["exposed_ms"],
                    figures.get("bytes"),
                )
                for layer, figures in row["layers"].items()
            },
        )
        for row in overlap.rows
        if row["layers"]
    ]


def _calls(memory: Source) -> list[Run]:
    return [
        Run(
            name=call["name"],
            detail="",
            layers={
                layer: (figures["hidden_ms"], figures["exposed_ms"], figures["bytes"])
                for layer, figures in call["layers"].items()
            },
        )
        for call in memory.rows
        if call["layers"]
    ]


def _sentence(runs: list[Run]) -> str:
    best, worst = min(runs, key=lambda run: run.exposed), max(runs, key=lambda run: run.exposed)
    least, most = percent(best.exposed), percent(worst.exposed)
    if best is worst:
        return f"Compute waits for {least} of the copy time ({_named(best)}); the rest is hidden."
    return (
        f"Compute waits for {least} of the copy time at best ({_named(best)}) and {most} at worst ({_named(worst)}); "
        "the rest is hidden."
    )


def _named(run: Run) -> str:
    return ", ".join(filter(None, [run.name, run.detail]))


def _panel(run: Run, group: list[Run]):
    most = max(hidden + exposed for each in group for hidden, exposed, _ in each.layers.values())
    bars = [
        Bar(
            name=f"layer {layer}",
            parts=[(hidden, "var(--hidden-time)"), (exposed, "var(--exposed-time)")],
            shown=f"{milliseconds(exposed)} of {milliseconds(hidden + exposed)}",
            tip=f"{_named(run)}\nlayer {layer}\nhidden {milliseconds(hidden)}\nexposed {milliseconds(exposed)}"
            + ("" if size is None else f"\n{nbytes(size)}"),
        )
        for layer, (hidden, exposed, size) in run.layers.items()
    ]
    beneath = ", ".join(filter(None, [run.detail, f"{percent(run.exposed)} exposed"]))
    label = f"copy time by layer, {_named(run)}; the table below has the figures"
    return bar_panel(run.name, bars, width=460.0, most=most, label=label, beneath=beneath)


def _table(run: Run) -> Table:
    rows = [
        [
            Cell(layer, int(layer)),
            Cell(milliseconds(hidden + exposed), hidden + exposed),
            Cell(milliseconds(hidden), hidden),
            Cell(milliseconds(exposed), exposed),
            Cell(
                percent(exposed / (hidden + exposed)) if hidden + exposed else DASH, exposed / ((hidden + exposed) or 1)
            ),
            Cell(nbytes(size), size),
        ]
        for layer, (hidden, exposed, size) in run.layers.items()
    ]
    return Table(
        name=_named(run), columns=("layer", "copies", "hidden", "exposed", "share exposed", "bytes"), rows=rows
    )
