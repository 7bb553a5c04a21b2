"""The tables of README.md, docs/benchmarks.md and docs/policies.md, made from what bench/compare.py and
bench/policy_cost.py wrote, each between two marks.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from page_marks import between_marks, put_between_marks
from rows_file import read_rows

from comparing.kept_rows import is_sound
from comparing.notes import notes, prose, second_caption
from comparing.rounds import AGAIN
from comparing.summary import MEANS, Row, grouped, is_long, number, percent, shown_figures, summary
from tiered.core.whole_file import write_then_rename

POLICIES_MARK, NOISE_MARK, SHORT_MARK = "compare", "noise", "short"
# What a first page shows of the comparison.
SHORT = ("none", "fast_dllm_dual", "dkv_pd", "dllm_cache", "polestar", "transformers, cache")
SHORT_FIGURES = ("tokens/s", "over `none`", "rows a step", "device", "host")
# Columns by task. Tasks that rewrite a list are alike to all policies.
GROUPS: dict[str, tuple[str, ...]] = {
    "lists": ("copy", "reverse", "replace", "insert", "remove"),
    "sort": ("sort",),
    "add": ("add",),
    "chain": ("chain",),
    "lookup": ("lookup",),
}
COSTS = {"over full": number("over_full", 4), "over floor": number("over_floor", 2), "overhead": number("overhead", 2)}


def put_tables(page: Path, comparisons: Mapping[str, Path], costs: Path) -> None:
    """Put the tables that `page` has marks for between them. `comparisons`: files by noise, masks first; without the
    file `costs`, its columns are left out.

    Raises:
        FileNotFoundError: a comparison was not measured.
        ValueError: no marks in `page`, or a file that is damaged.
    """
    text, first = page.read_text(), next(iter(comparisons.values()))
    made = 0
    if between_marks(text, POLICIES_MARK) is not None:
        cost = read_rows(costs, name="policies", kind=dict) if costs.exists() else None
        text, made = put_between_marks(text, POLICIES_MARK, tables(_result(first), cost)), made + 1
    if between_marks(text, NOISE_MARK) is not None:
        results = {noise: _result(path) for noise, path in comparisons.items()}
        text, made = put_between_marks(text, NOISE_MARK, noise_table(results)), made + 1
    if between_marks(text, SHORT_MARK) is not None:
        text, made = put_between_marks(text, SHORT_MARK, short_table(_result(first))), made + 1
    if not made:
        marks = " or ".join(f"<!-- {mark} -->" for mark in (POLICIES_MARK, NOISE_MARK, SHORT_MARK))
        raise ValueError(f"{page} has no {marks} with its end behind it")
    write_then_rename(page, lambda part: part.write_text(text))


def _result(path: Path) -> Row:
    """What a comparison has written. Raises as `read_rows`, also for a damaged row: a table has no holes."""
    result = read_rows(path)
    if damaged := [number for number, row in enumerate(result["rows"], start=1) if not is_sound(row)]:
        raise ValueError(f"{path}: rows {', '.join(map(str, damaged))} are damaged; measure again to replace them")
    return result


def noise_table(results: Mapping[str, Row]) -> str:
    """Markdown: right answers, and forwards of an example, by policy, noise and commit rule."""
    by_noise = {noise: grouped(result["rows"], "policy") for noise, result in results.items()}
    # One policy measured twice, and what transformers does, say nothing about noise processes.
    apart = {
        name
        for result in results.values()
        for name, variant in result.get("variants", {}).items()
        if variant.get("baseline") or name == AGAIN
    }
    heads, every = [], dict.fromkeys(name for rows in by_noise.values() for name in rows)
    policies = [name for name in every if name not in apart]
    columns: list[tuple[str, str]] = []
    for noise, result in results.items():
        for commit in grouped(result["rows"], "commit"):
            columns.append((noise, commit))
            heads += [f"{noise}, {commit}: right, {_asked(result['rows'], commit, None)}", "NFE"]
    lines, reasons = _head(heads), {}
    for policy in policies:
        cells = []
        for noise, commit in columns:
            rows = [row for row in by_noise[noise].get(policy, ()) if row["commit"] == commit]
            cells += [_share(rows), MEANS["NFE"](summary(rows))]
            reasons |= {(noise, row["why"]): policy for row in rows if "why" in row}
        lines.append(_line(policy, cells))
    # What does not fit the calls with masks is told beside their own table.
    others = [noise for noise in results if noise != next(iter(results))]
    told = [f"`{policy}`, {noise}: {why}." for (noise, why), policy in reasons.items() if noise in others]
    return "\n".join(lines) + ("\n\n" + prose(" ".join(told)) if told else "")


def tables(result: Row, cost: Row | None) -> str:
    """Markdown: accuracy by policy, and what a step costs."""
    commits = list(grouped(result["rows"], "commit"))
    slow, fast = commits[0], commits[-1]
    return "\n\n".join(
        [
            prose(f"Right answers in per cent, {slow}, and {fast} where it says so; in the head, how many were asked:"),
            _accuracy(result["rows"], slow, fast),
            *notes(result),
            prose(second_caption(result, slow, cost)),
            _figures(result["rows"], slow, None if cost is None else cost["policies"]),
        ]
    )


def short_table(result: Row) -> str:
    """Markdown: right answers, speed and bytes of a few policies."""
    slow, *_, fast = grouped(result["rows"], "commit")
    rows = {policy: own for policy, own in grouped(result["rows"], "policy").items() if policy in SHORT}
    summaries = {policy: summary([row for row in own if row["commit"] == slow]) for policy, own in rows.items()}
    columns = {name: show for name, show in shown_figures(summaries.values()).items() if name in SHORT_FIGURES}
    heads = [f"{name}, {_asked(result['rows'], slow, GROUPS[name])}" for name in ("sort", "chain")]
    lines = _head([*heads, f"{fast}: all, {_asked(result['rows'], fast, None)}", *columns])
    for policy, own in rows.items():
        by_commit = grouped(own, "commit")
        cells = [_share(row for row in by_commit.get(slow, []) if _is_of(row, GROUPS[n])) for n in ("sort", "chain")]
        cells += [_share(by_commit.get(fast, [])), *(show(summaries[policy]) for show in columns.values())]
        lines.append(_line(policy, cells))
    return "\n".join(lines)


def _accuracy(rows: list[Row], slow: str, fast: str) -> str:
    heads = [f"{name}, {_asked(rows, slow, group)}" for name, group in GROUPS.items()]
    lines = _head([*heads, f"{fast}: all, {_asked(rows, fast, None)}", *MEANS])
    for policy, own in grouped(rows, "policy").items():
        by_commit = grouped(own, "commit")
        one_by_one, confident = by_commit.get(slow, []), by_commit.get(fast, [])
        cells = [_share(row for row in one_by_one if _is_of(row, group)) for group in GROUPS.values()]
        means = summary(confident)
        lines.append(_line(policy, [*cells, _share(confident), *(show(means) for show in MEANS.values())]))
    return "\n".join(lines)


def _figures(rows: list[Row], commit: str, costs: Row | None) -> str:
    summaries = {
        policy: summary([row for row in own if row["commit"] == commit])
        for policy, own in grouped(rows, "policy").items()
    }
    columns = shown_figures(summaries.values())
    lines = _head([*columns, *(COSTS if costs is not None else ())])
    for policy, figures in summaries.items():
        cells = [show(figures) for show in columns.values()]
        if costs is not None:
            cells += [show(costs.get(policy, {})) for show in COSTS.values()]
        lines.append(_line(policy, cells))
    return "\n".join(lines)


def _is_of(row: Row, group: Iterable[str] | None) -> bool:
    """Whether a row is of a task of the group (None: of any, the long lookup too)."""
    return group is None or (row["task"] in group and not is_long(row))


def _asked(rows: list[Row], commit: str, group: Iterable[str] | None) -> int:
    """Examples that each policy was asked."""
    examples = {
        (row["task"], row["size"]): row["examples"] for row in rows if row["commit"] == commit and _is_of(row, group)
    }
    return sum(examples.values())


def _share(rows: Iterable[Row]) -> str:
    """Right answers of all, in per cent."""
    answered = [row for row in rows if "why" not in row]
    asked = sum(row["examples"] for row in answered)
    return percent(sum(row["correct"] for row in answered) / asked if asked else None)


def _head(columns: list[str]) -> list[str]:
    return [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]


def _line(policy: str, cells: list[str]) -> str:
    return f"| `{policy}` | {' | '.join(cells)} |"
