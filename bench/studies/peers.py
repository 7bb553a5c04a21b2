"""Policies beside transformers' caches and the official code: seconds of a call, and right answers.

A match is one algorithm in all its implementations, asked the same prompts in turn. The model `random` has one prompt
of --prompt tokens, one token a step; others have the --examples, TASK:COUNT, in one block. No official code comes
along: docs/peers.md says how to get it, and without --official its rows are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import Any

from baselines.matches import MATCHES, RULES, matches_of
from baselines.official import located
from measuring.pages import markdown_table
from measuring.statistics import interval, merged
from measuring.study import Axes
from workloads.answers import tasks_of
from workloads.matches import OF, TIMED, measure
from workloads.models import paths, weights

__all__ = ["AXES", "LOCAL", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

AXES: Axes = {
    "match": list(MATCHES), "model": ["random", "embedded"], "rule": list(RULES), "prompt": [512],
    "answer": [64], "block": [32], "width": [512], "layers": [8], "examples": ["sort:40", "lookup:5", "chain:20"],
}  # fmt: skip
QUICK: Axes = {"prompt": [64], "examples": ["sort:2"], "width": [64], "layers": [2]}
LOCAL = {"official": "folder of the official checkouts", "official_python": "the python that runs them"}


def local(axes: Axes, **flags: str | None) -> dict[str, Any]:
    """The paths of the models and of the official code."""
    return {"paths": paths(axes["model"]), "official": located(**flags)}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """A match each; matches of one checkpoint and prompt stand together."""
    for model, block in product(axes["model"], axes["block"]):
        if model != "random":
            of = weights(model) | {"tasks": tasks_of(axes["examples"], context=512)}
            # Equal tokens are not demanded: the model is so sure of some that rounding ranks them.
            found = matches_of(axes["match"], axes["rule"], answer=block, block=block)
            yield from (of | match | {"agree": 0} for match in found)
            continue
        for prompt, answer, width, layers in product(*(axes[axis] for axis in ("prompt", "answer", "width", "layers"))):
            of = {"model": model, "prompt": prompt, "width": width, "layers": layers}
            rules = [rule for rule in axes["rule"] if rule == "one"]  # it is sure of no token
            yield from (of | match for match in matches_of(axes["match"], rules, answer=answer, block=block))


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A line for every peer: figures of a call by prompt, right answers by task; then commits, and missing peers."""
    every = merged(rows, of=OF, timed=TIMED)
    good = [row for row in every if row["status"] == "ok"]
    races, asked = ([row for row in good if ("correct" in row) is right] for right in (False, True))
    commits = {folder: commit for row in good for folder, commit in row.get("commits", {}).items()}
    missing = {f"`{row['peer']}` {row['status']}: {row['why']}." for row in every if row["status"] != "ok"}
    parts = [table(races, "prompt", ("rows", "s", "tokens/s", "over official"), speed)]
    parts += [table(asked, "task", ("right (95 %)", "NFE", "same"), answers)]
    parts += [", ".join(f"{folder} {commit}" for folder, commit in commits.items()), *sorted(missing)]
    return {"peers": "\n\n".join(filter(None, parts))}


def table(rows: Sequence[dict[str, Any]], by: str, heads: Sequence[str], cells: Callable[..., list[str]]) -> str:
    """A line for every peer and rule, the columns `heads` for every value of `by`."""
    values, lines = list(dict.fromkeys(row[by] for row in rows)), dict[str, dict[Any, list[Any]]]()
    for row in rows:
        rule = "" if row["rule"] == "one" else f", {row['rule']}"
        lines.setdefault(f"`{row['peer']}`{rule}", {})[row[by]] = cells(row)
    columns = ["", *(f"{by} {value}: {head}" for value, head in product(values, heads))]
    cut = [[peer, *chain(*(own.get(value, [None] * len(heads)) for value in values))] for peer, own in lines.items()]
    return markdown_table(columns, cut) if cut else ""


def speed(row: dict[str, Any]) -> list[str]:
    """Rows that a call recomputes, and medians, with the 20th and 80th percentile of several runs."""
    spreads = [
        f" ({row[f'{n}_low']:.2f}-{row[f'{n}_high']:.2f})" if n in row and row["runs"] > 1 else "" for n in TIMED
    ]
    cells = [f"{row[name]:.2f}{spread}" if name in row else "" for name, spread in zip(TIMED, spreads, strict=True)]
    return [f"{row['rows']:.0f}" if "rows" in row else "", *cells]


def answers(row: dict[str, Any]) -> list[str]:
    """Right answers, forwards of an answer, and answers that are the first peer's, token for token."""
    low, high = (100 * share for share in interval(row["correct"], row["examples"]))
    right = f"{row['correct']} of {row['examples']} ({low:.0f}-{high:.0f})"
    return [right, f"{row['nfe']:.2f}", str(row["same_answers"])]
