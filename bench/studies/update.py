"""The cost of an update beside the rows that it recomputes: its time by operation, and its launches.

A random model in float32. A size is PROMPT:BLOCKS:STEPS: tokens of the prompt, blocks of 32 tokens, and steps of each.
In a round every policy has its turn, behind that of --before, an earlier checkout of this repository, and behind the
official code of --official. All run in processes of their own. With --runs 3, figures are medians of three rounds. The
row floor is the time of a full pass times the rows that a call recomputes over its positions. A layer's launches on
CUDA are counted on the CPU: see bench/workloads/launches.py.

The last line of stdout says, beside the counts,

    polestar_over_dual_time, polestar_over_dual_rows       of the first size, with one thread
    polestar_drift_over_dkv_pd_time                        of the last size, with one thread
    two_threads_over_one                                   time of `polestar` at the first size
    update_launches_per_layer, host_reads_in_layers        of an update of `polestar`: launches of a layer, reads by the
                                                           host inside all layers of the small model of launches.py

each null as long as its rows are missing; ratios are taken within a round.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from baselines.official import located
from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads.calls import size_of
from workloads.update import OF, TIMED, measure
from workloads.variants import REFRESH_EVERY_4

from tiered.core.checks import unknown_name
from tiered.policies.registry import make_policy

__all__ = ["AXES", "LOCAL", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

POLICIES = ["fast_dllm_dual", "polestar", "polestar-drift", "polestar-window", "dllm_cache", "dkv_pd", "dkv_decode"]
AXES: Axes = {
    "part": ["launches", "seconds"], "size": ["2048:4:32", "8192:8:8"], "threads": [1, 2],
    "policy": POLICIES, "width": [512], "layers": [8],
}  # fmt: skip
QUICK: Axes = {"size": ["64:1:8"], "threads": [1], "policy": POLICIES[:2], "width": [64], "layers": [2]}
LOCAL = {
    "before": "root of an earlier checkout of this repository (git worktree add DIR REVISION)",
    "official": "folder of the official checkouts (docs/peers.md)",
    "official_python": "the python that runs them",
}
# Columns of the three tables.
CALLS = {
    "rows": "{rows:.0f}",
    "s": "{seconds:.2f}",
    "over the row floor": "{over_floor:.2f}",
    "before: s": "{before_seconds:.2f}",
    "now over before": "{over_before:.2f}",
    "same tokens": "{same_tokens:.0%}",
    "official: s": "{official_seconds:.2f}",
    "now over official": "{over_official:.2f}",
}
TIMES = {
    "forwards": "{forwards}",
    "rows": "{rows:.0f}",
    "ms": "{ms:.1f}",
    "before": "{before_ms:.1f}",
    "of which": "{of_which}",
}
LAUNCHES = {
    "launches a layer": "{launches:.0f}",
    "before": "{before_launches:.0f}",
    "of which": "{of_which}",
    "host reads in layers": "{reads:.0f}",
    "reads before": "{before_reads:.0f}",
}
LEAST = 0.02  # share of a forward


def local(axes: Axes, *, before: str | None, **flags: str | None) -> dict[str, Any]:
    """The paths of the other code."""
    if before is not None and not (Path(before) / "tiered" / "__init__.py").is_file():
        raise ValueError(f"--before {before}; the root of a checkout of this repository is allowed")
    return {"before": None if before is None else str(Path(before).resolve()), "official": located(**flags)}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The launches of all policies, then the seconds of each: they take turns within a size and a number of threads."""
    policies = {name: REFRESH_EVERY_4.get(name, (name, {})) for name in axes["policy"]}
    for policy, options in policies.values():
        make_policy(policy, **options)
    for part in axes["part"]:
        if part not in AXES["part"]:
            raise unknown_name("part", part, AXES["part"])
        if part == "launches":
            yield {"part": part, "threads": 1, "policies": policies}
            continue
        for size, width, layers, threads in product(*(axes[axis] for axis in ("size", "width", "layers", "threads"))):
            if threads < 1:
                raise ValueError(f"threads = {threads}; 1 or more are allowed")
            model = {"width": width, "layers": layers, "threads": threads}
            for name, of in policies.items():
                yield {"part": part} | size_of(size, "prompt") | model | {"policies": {name: of}}


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A line for each call; for each kind of forward, its time; and for each kind in the small model, its launches."""
    every = merged(rows, of=OF, timed=TIMED)
    policies = list(dict.fromkeys(row.get("policy") for row in every))
    every.sort(key=lambda row: (row.get("prompt", 0), policies.index(row.get("policy")), row["threads"]))
    good = [row for row in every if row["status"] == "ok"]
    calls = [row for row in good if row["part"] == "seconds" and "kind" not in row]
    commits = [f"before {row['before_commit']}" for row in calls if row.get("before_commit")]
    commits += [f"{folder} {commit}" for row in calls for folder, commit in row.get("commits", {}).items()]
    missing = [f"`official, {row['official']}`: {row['official_why']}." for row in calls if "official_why" in row]
    missing += [f"{row['part']} {row['status']}: {row['why']}." for row in every if row["status"] != "ok"]
    call = "`{policy}` {size}, threads {threads}"
    parts = [rows_table(call, CALLS, calls), ", ".join(dict.fromkeys(commits)), *dict.fromkeys(missing)]
    return {
        "update": "\n\n".join(filter(None, parts)),
        "update_times": rows_table(call + ": {kind}", TIMES, kinds(good, "seconds", "ms", digits=1)),
        "update_launches": rows_table("`{policy}`: {kind}", LAUNCHES, kinds(good, "launches", "launches", digits=0)),
    }


def kinds(rows: Sequence[dict[str, Any]], part: str, figure: str, *, digits: int) -> Iterator[dict[str, Any]]:
    """The row of each kind of forward, with "of_which": `figure` of its operations, the largest first, each behind its
    earlier value. Shares below `LEAST` are left out."""
    own = [row for row in rows if row["part"] == part and "kind" in row]
    for head in (row for row in own if "op" not in row):
        of = [row for row in own if "op" in row and all(row[n] == head[n] for n in ("point", "policy", "kind"))]
        of = sorted((row for row in of if row[figure] > LEAST * head[figure]), key=lambda row: -row[figure])
        names = [name for name in (f"before_{figure}", figure) if name in head]
        told = (f"{row['op']} {' → '.join(f'{row.get(name, 0):.{digits}f}' for name in names)}" for row in of)
        yield head | {"of_which": ", ".join(told)}


def last_line(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The figures that have goals, for the last line."""
    good = [row for row in rows if row["status"] == "ok"]
    sizes = list(dict.fromkeys(row["size"] for row in good if "size" in row)) or [""]
    calls = [row for row in good if row["part"] == "seconds" and "kind" not in row]

    def over(figure: str, *pair: tuple[str, str, int]) -> float | None:
        """The ratio of two calls, by policy, size and threads: the median over rounds."""
        ours, theirs = (
            {row["run"]: row[figure] for row in calls if (row["policy"], row["size"], row["threads"]) == call}
            for call in pair
        )
        ratios = [ours[run] / theirs[run] for run in ours.keys() & theirs.keys()]
        return round(median(ratios), 3) if ratios else None

    first = [(policy, sizes[0], 1) for policy in ("polestar", "fast_dllm_dual")]
    last = [(policy, sizes[-1], 1) for policy in ("polestar-drift", "dkv_pd")]
    updates = [row for row in good if row["part"] == "launches" and row["kind"] == "update" and "op" not in row]
    update = next((row for row in updates if row["policy"] == "polestar"), {})
    return {
        "polestar_over_dual_time": over("seconds", *first),
        "polestar_over_dual_rows": over("rows", *first),
        "polestar_drift_over_dkv_pd_time": over("seconds", *last),
        "two_threads_over_one": over("seconds", ("polestar", sizes[0], 2), ("polestar", sizes[0], 1)),
        "update_launches_per_layer": update.get("launches"),
        "host_reads_in_layers": update.get("reads"),
    }
