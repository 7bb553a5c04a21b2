"""report.html: one page with all that it needs inside, which asks the network for nothing."""

from pathlib import Path

from reporting.colours import variables
from reporting.figure import Table
from reporting.report import MAIN, Report
from reporting.svg import FONT, element, hatching
from reporting.wording import pieces
from tiered.core.extras import Extra

with Extra("bench"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

HERE = Path(__file__).resolve().parent
WORDS = {
    "C": "clusters of hidden states in a layer; each has a centroid on the device and its members on the host",
    "M": "clusters whose members an update fetches and recomputes: those that drifted most",
    "T": "commits since the last update that call for no new one; 0 updates after every step that commits",
    "step": "one forward that recomputes the rows of the current block alone",
    "update, refresh": "a forward that also recomputes drifted clusters, or every row",
    "device, host, disk": "the tiers: the accelerator's memory, pinned memory beside it, a spill file",
    "NFE, TPF": "forwards of an answer; tokens that a forward commits, without end and padding",
    "refused, failed": "the library said no before any work; the process ended without figures",
}


def page(report: Report, command: str) -> str:
    """The page as HTML. `command`: what made it."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("template.html.j2")
    return template.render(
        report=report,
        command=command,
        words=WORDS,
        main=MAIN,
        hatching=hatching(),
        colours=colour_rules(),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8").replace("FONT", FONT)),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        figures_of=figures_of,
        coded=coded,
    )


def colour_rules() -> Markup:
    """What colours are, on light and on dark pages."""
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in variables(dark=dark).items()) for dark in (False, True)
    )
    return Markup(f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}")


def coded(sentence: str) -> Markup:
    """A sentence with its names as code."""
    return Markup("").join(element("code", part) if name else escape(part) for part, name in pieces(sentence))


def figures_of(table: Table) -> list[bool]:
    """Whether each column is of figures: any row has one there."""
    return [any(row[number].value is not None for row in table.rows) for number in range(len(table.columns))]
