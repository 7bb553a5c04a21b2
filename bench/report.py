"""The report: one offline page from what the other scripts wrote, and the same as Markdown with images.

    python bench/report.py                                       # everything in bench/results
    python bench/report.py bench/results/sweep --out bench/results/report
    python bench/report.py /tmp/sweep --memory /tmp/memory.json --out /tmp/report

Writes into --out: report.html, which needs no network and no other file, report.md for pull requests, and PNG and SVG
of the main figures. An input that is missing is a gap that the page names; a row that is none is left out, and the page
says which and why. Measures nothing. The last line is JSON: files, figures, gaps, and how much was left out.
"""

import argparse
import json
import sys
from pathlib import Path

from reporting.files import write_all
from reporting.images import images
from reporting.markdown import markdown
from reporting.page import page
from reporting.report import MAIN, Report, report_of
from reporting.sources import Paths, read_sources

from tiered.core.provenance import command_line

RESULTS = Path(__file__).resolve().parent / "results"
INPUTS = ("memory", "compare", "overlap", "ops", "throughput")


def files_of(report: Report, command: str) -> dict[str, bytes]:
    """All files of a report, by name."""
    shown = [figure for figure in report.figures if figure.gap is None and figure.name in MAIN]
    files = {name: data for figure in shown for name, data in images(figure).items()}
    texts = {
        "report.html": page(report, command),
        "report.md": markdown(report, [figure.name for figure in shown], command),
    }
    return files | {name: text.encode() for name, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sweep",
        metavar="DIR",
        type=Path,
        nargs="?",
        default=RESULTS / "sweep",
        help="folder of a sweep (default: bench/results/sweep)",
    )
    for name in INPUTS:
        parser.add_argument(
            f"--{name}",
            metavar="FILE.json",
            type=Path,
            default=RESULTS / f"{name}.json",
            help=f"what bench/{name}.py wrote (default: bench/results/{name}.json)",
        )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=RESULTS / "report",
        help="folder of the report (default: bench/results/report)",
    )
    args = parser.parse_args()
    sources = read_sources(Paths(sweep=args.sweep, **{name: getattr(args, name) for name in INPUTS}))
    report = report_of(sources)
    files = files_of(report, command_line(sys.argv))
    try:
        write_all(args.out, files)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror or error}")
    summary = {
        "files": sorted(files),
        "figures": [figure.name for figure in report.figures if figure.gap is None],
        "gaps": report.gaps,
        "skipped": len(sources.skipped),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
