"""The cards of `tiered plan` in README.md and docs/, made again where their command stands: `python bench/cards.py`.

A renewed card has the labels that it had before. "…" stands for lines that a card leaves out.
"""

import re
from pathlib import Path

from tiered.cli.main import build_parser
from tiered.cli.plan import planned

ROOT = Path(__file__).resolve().parents[1]
LABEL = 20  # columns
CARD = re.compile(r"(    tiered plan ([^\n]+)\n\n```\n)(.+?)```", re.DOTALL)


def renewed(page: str) -> str:
    """The text of a page with its cards as `tiered plan` prints them now."""
    return CARD.sub(lambda found: f"{found[1]}{_card(found[2], found[3])}```", page)


def _card(arguments: str, shown: str) -> str:
    made = str(planned(build_parser().parse_args(["plan", *arguments.split()])))
    if "…" not in shown:
        return f"{made}\n"
    lines, kept = made.splitlines(), []
    for line in shown.splitlines():
        if line.strip() == "…":
            kept.append(line)
            continue
        rest = [new for new in lines if new[:LABEL] == line[:LABEL]]
        if rest:
            kept.append(rest[0])
            lines = lines[lines.index(rest[0]) + 1 :]
    return "\n".join([*kept, ""])


def pages() -> list[Path]:
    """Pages that may have cards."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
