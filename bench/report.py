"""The report: one offline page of the figures of bench/measure.py, and the same page as Markdown with images.

    python bench/report.py                             # of bench/results, into bench/results/report
    python bench/report.py --results DIR --out DIR

Writes report.html, which needs no network and no other file, report.md for pull requests, and PNG and SVG of the main
figures. The page names a missing study as a gap. It counts points that were refused or failed, with the reason.
Measures nothing. The last line is JSON: files, figures, gaps.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from charts import copies, drift, frontier, knobs, operations, pareto, regimes, throughput, timeline
from charts.page import html, markdown
from charts.picture import Picture, figure_of, read_source
from measuring.provenance import command_line

from tiered.core.extras import needing
from tiered.core.whole_file import write_then_rename

with needing("bench"):
    import vl_convert

RESULTS = Path(__file__).resolve().parent / "results"
PICTURES = (  # in the order of the page
    Picture("fastest", "Which policy is fastest", regimes, ["regimes"], {"figure": "seconds"}),
    Picture("smallest", "Which policy is smallest on the device", regimes, ["regimes"], {"figure": "device_bytes"}),
    Picture("pareto", "Memory against speed", pareto, ["compare", "sweep"]),
    Picture("right_by_rows", "Right answers over rows", frontier, ["frontier"], {"figure": "rows"}),
    Picture("right_by_seconds", "Right answers over time", frontier, ["frontier"], {"figure": "seconds"}),
    Picture("accuracy", "Right answers by C, T and M", knobs, ["sweep"], {"figure": "accuracy"}),
    Picture("speed", "Tokens a second by C, T and M", knobs, ["sweep"], {"figure": "tokens_per_second"}),
    Picture("device_bytes", "MiB on the device by C, T and M", knobs, ["sweep"], {"figure": "device_bytes"}),
    Picture("bytes_over_steps", "Bytes by tier and account over the forwards", timeline, ["memory"]),
    Picture("copies", "Copies behind compute", copies, ["overlap", "memory"]),
    Picture("drift", "Drift by layer and forward", drift, ["memory"]),
    Picture("operations", "Operations by policy", operations, ["ops"]),
    Picture("throughput", "Tokens a second by context", throughput, ["throughput"]),
)
MAIN = ("fastest", "pareto", "right_by_rows", "accuracy", "bytes_over_steps")  # pictures that other pages show


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="DIR", type=Path, default=RESULTS, help="holds a folder for each study")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default: report in --results)")
    args = parser.parse_args(argv)
    if not args.results.is_dir():
        parser.error(f"--results {args.results}: there is no such folder")
    out = args.out or args.results / "report"
    studies = dict.fromkeys(study for each in PICTURES for study in each.studies)
    sources = {study: read_source(args.results, study) for study in studies}
    figures = [figure_of(picture, sources) for picture in PICTURES]
    main = {each.picture.name: each.drawn["wide"] for each in figures if each.rows and each.picture.name in MAIN}
    command = command_line(sys.argv)
    files = {"report.html": html(figures, list(sources.values()), command).encode()}
    files["report.md"] = markdown(figures, list(main), command).encode()
    for name, svg in main.items():
        files |= {f"{name}.svg": svg.encode(), f"{name}.png": vl_convert.svg_to_png(svg, scale=2)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_then_rename(out / name, lambda part, content=content: part.write_bytes(content))
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror or error}")
    told = {"figures": [each.picture.name for each in figures if each.rows]}
    gaps = list(dict.fromkeys(gap for figure in figures for gap in figure.gaps))
    print(json.dumps({"files": sorted(files)} | told | {"gaps": gaps}))


if __name__ == "__main__":
    main()
