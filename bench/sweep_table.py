"""The table of docs/benchmarks.md: what C, M and T do to accuracy, speed and bytes, from the rows of bench/sweep.py.

python bench/sweep_table.py            # puts it between the page's marks; measures nothing
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from page_marks import between_marks, put_between_marks
from sweeping.rows import fault, read_parquet

from tiered.core.byte_size import format_bytes
from tiered.core.whole_file import write_then_rename

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "bench" / "results" / "sweep" / "rows.parquet"
PAGE = ROOT / "docs" / "benchmarks.md"
MARK = "sweep"
SHOWN = "sort"  # the task that hangs on fresh prompts; the others hardly differ
Row = Mapping[str, Any]


def table(rows: Iterable[Row]) -> str:
    """Right answers and tokens/s of `SHOWN` by T, a line for every C and M; then the policies without such options."""
    good = [row for row in rows if row["status"] == "ok" and row["task"] == SHOWN]
    knobs = [row for row in good if row["update_threshold"] is not None]
    thresholds = sorted({row["update_threshold"] for row in knobs})
    heads = [f"T {threshold}" for threshold in thresholds]
    lines = [_line("", [*heads, "device", "host"]), _line("---", ["---:"] * (len(heads) + 2))]
    # What renews most of the clusters first; `auto` is C where it is null.
    groups = sorted({(row["clusters"], row["top_m"]) for row in knobs}, key=lambda pair: (-pair[1], pair[0] or 0))
    for clusters, most in groups:
        own = [row for row in knobs if (row["clusters"], row["top_m"]) == (clusters, most)]
        cells = [_cell([row for row in own if row["update_threshold"] == threshold]) for threshold in thresholds]
        lines.append(_line(f"C {'auto' if clusters is None else clusters}, M {most}", [*cells, *_bytes(own)]))
    for policy in sorted({row["policy"] for row in good if row["update_threshold"] is None}):
        own = [row for row in good if row["policy"] == policy]
        lines.append(_line(f"`{policy}`", [_cell(own), *[""] * (len(heads) - 1), *_bytes(own)]))
    return "\n".join(lines)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _cell(rows: Sequence[Row]) -> str:
    """Right answers, which are the same in every run, and the middle of the runs' tokens/s."""
    if not rows:
        return "-"
    speeds = sorted(row["tokens_per_second"] for row in rows)
    return f"{rows[0]['correct']} ({speeds[len(speeds) // 2]:.0f})"


def _bytes(rows: Sequence[Row]) -> list[str]:
    return [
        format_bytes(most) if (most := max(row[name] for row in rows)) else "0"
        for name in ("device_bytes", "host_bytes")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=Path, default=ROWS, help="a sweep's table (default: that of bench/results/sweep)"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="a page with the marks (default: docs/benchmarks.md)")
    args = parser.parse_args()
    try:
        rows, text = [row for row in read_parquet(args.rows) if fault(row) is None], args.page.read_text()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if between_marks(text, MARK) is None:
        parser.error(f"{args.page} has no <!-- {MARK} --> with its end behind it")
    write_then_rename(args.page, lambda part: part.write_text(put_between_marks(text, MARK, table(rows))))
    print(json.dumps({"rows": len(rows), "page": args.page.name}))


if __name__ == "__main__":
    main()
