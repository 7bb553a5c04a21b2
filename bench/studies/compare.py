"""Every policy and preset, and transformers' own caches: the same questions, the same commit rules.

Answers have 32 tokens in blocks of 8, so that a canvas has finished blocks and blocks to come. A policy that is made
for another call gets that one, and `none` answers it too. `none` is measured twice: the difference of its two names is
noise. A policy that a call does not fit, or a baseline that cannot be had here, has a row that says why.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from baselines.matches import TRANSFORMERS
from measuring.statistics import merged, noise_floor, paired, spread
from measuring.study import Axes
from measuring.table import Row
from training.tasks import TASKS
from workloads.answer_tables import Column, Show, by_task, mean, pivot, policy, right, size, task, where
from workloads.answers import OF, TIMED, measure, tasks_of
from workloads.models import local, weights
from workloads.variants import RULES, Variant, all_variants, noise_of

from tiered.core.byte_size import format_bytes
from tiered.core.checks import unknown_name
from tiered.policies.registry import PRESETS, policies_for

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

ANSWER, BLOCK = 32, 8
AGAIN = "none, again"
LONG = 992  # tokens of the lookups, one a call, that give the speeds, rows and bytes of the tables
MOST = {"sort": 60, "chain": 40, "lookup": 10}  # examples of tasks in which policies differ
AXES: Axes = {
    "model": ["embedded", "embedded-uniform"],
    "rule": [*dict.fromkeys(rule for rules in RULES.values() for rule in rules)],
    "policy": [*policies_for("canvas"), *PRESETS, "transformers"],
    "examples": [*(f"{name}:{MOST.get(name, 20)}" for name in TASKS), f"lookup@{LONG}:3"],
}
QUICK: Axes = {"model": ["embedded"], "policy": ["none", "transformers"], "examples": ["sort:2", f"lookup@{LONG}:1"]}
# Columns by task. Tasks that rewrite a list are alike to all policies.
GROUPS = {
    "lists": ("copy", "reverse", "replace", "insert", "remove"),
    **{name: (name,) for name in ("sort", "add", "chain", "lookup")},
}
SHORT = ("none", "fast_dllm_dual", "dkv_pd", "dllm_cache", "polestar", "transformers, cache")
IN_UNIFORM = ("none", "fast_dllm_dual", "polestar")


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn under each rule. A name stands for all names that begin with it and a comma."""
    known, asked = AXES["policy"], tasks_of(axes["examples"])
    if wrong := next((name for name in axes["policy"] if name not in known), None):
        raise unknown_name("policy", wrong, known)
    for model in axes["model"]:
        noise = noise_of(model)
        first, *others = all_variants(slides=noise == "mask")
        compared = [first, Variant(name=AGAIN, policy="none"), *others]
        # transformers has the architecture of the model that answers from masks.
        compared += [Variant(name=name, policy=name) for name in TRANSFORMERS if noise == "mask"]
        for rule in [rule for rule in RULES[noise] if rule in axes["rule"]]:
            for each in [each for each in compared if each.name.partition(",")[0] in axes["policy"]]:
                call = each.call(answer=ANSWER, block=BLOCK) | RULES[noise][rule]
                of = {"policy": each.name, "options": dict(each.given), "call": call, "tasks": asked}
                yield weights(model) | {"noise": noise, "rule": rule} | of


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`compare`: all policies on masks; `short`: a few of them; `noise`: both kinds of noise; `uniform`: by task."""
    seen = merged(rows, of=OF, timed=TIMED)
    masks = [row for row in seen if row["noise"] == "mask"]
    slow, fast = RULES["mask"]
    groups = {name: share(masks, name, where(rule=slow), tasks) for name, tasks in GROUPS.items()}
    confident, costs = share(masks, f"{fast}: all", where(rule=fast)), figures(rows, slow)
    every = dict([*groups.values(), confident])
    every |= {head: (where(rule=fast), mean(name)) for head, name in (("NFE", "nfe"), ("TPF", "tokens_per_forward"))}
    few = dict([groups["sort"], groups["chain"], confident])
    few |= {name: costs[name] for name in ("tokens/s", "over `none`", "rows a step", "device", "host")}
    both: dict[str, Column] = {}
    for noise, rule in ((noise, rule) for noise, rules in RULES.items() for rule in rules):
        takes = where(noise=noise, rule=rule)
        both |= dict([share(seen, f"{noise}, {rule}", takes), (f"{noise}, {rule}: NFE", (takes, mean("nfe")))])
    ours = [row for row in seen if row["policy"] != AGAIN and base(row) != "transformers"]
    uniform = [row for row in ours if row["noise"] == "uniform"]
    told = [pivot(masks, policy, every), pivot(masks, policy, costs), floor(masks, rows), *refusals(masks)]
    return {
        "short": pivot([row for row in masks if row["policy"] in SHORT], policy, few),
        "compare": "\n\n".join(told),
        "noise": "\n\n".join([pivot(ours, policy, both), *refusals(uniform)]),
        "uniform": by_task([row for row in uniform if row["policy"] in IN_UNIFORM]),
    }


def share(
    rows: Sequence[Row], name: str, takes: Callable[[Row], bool], tasks: Sequence[str] = ()
) -> tuple[str, Column]:
    """A column of right answers, and its name with the number of examples of each policy. It is of `tasks` without the
    long lookups, or of all tasks with them."""

    def of(row: Row) -> bool:
        return takes(row) and (not tasks or (row.get("task") in tasks and row.get("size") != LONG))

    counts = {task(row): row["examples"] for row in rows if of(row) and "task" in row}
    return f"{name}, {sum(counts.values())}", (of, right)


def figures(runs: Sequence[Row], rule: str) -> dict[str, Column]:
    """Columns of the costs of the long lookups under `rule`. `runs`: the rows before their runs were merged."""

    def moved(rows: Sequence[Row]) -> str:
        count = (rows[0]["to_device_bytes"] + rows[0]["to_host_bytes"]) / sum(rows[0]["passes"].values())
        return format_bytes(round(count)) if count else "0"

    shown: dict[str, Show] = {
        "tokens/s": mean("tokens_per_second", 1),
        "over `none`": lambda rows: spread_words(ratios(rows[0], runs)),
        "rows a step": mean("rows_per_forward", 1),
        "from cache": mean("cache_ratio", 3),
        "device": lambda rows: ("≥ " if rows[0]["bytes"] == "counted" else "") + size("device_bytes")(rows),
        "host": size("host_bytes"),
        "moved a step": moved,
    }
    return {name: (where(size=LONG, rule=rule), show) for name, show in shown.items()}


def ratios(row: Row, runs: Sequence[Row]) -> list[float]:
    """The speed of `row` over that of `none` in the same call, by run; empty for `none` itself."""
    long = [each for each in runs if each.get("size") == LONG and each["model"] == row["model"]]
    plain = [each for each in long if base(each) == "none" and each["policy"] not in (AGAIN, row["policy"])]
    theirs = next((each["point"] for each in plain if each["call"] == row["call"]), None)
    return paired(long, row["point"], theirs, "tokens_per_second") if theirs else []


def spread_words(values: Sequence[float]) -> str:
    """The median, and with several values the 20th and 80th percentile."""
    if not values:
        return ""
    low, middle, high = spread(values)
    return f"{middle:.2f}" + (f" ({low:.2f}–{high:.2f})" if len(values) > 1 else "")  # noqa: RUF001


def floor(rows: Sequence[Row], runs: Sequence[Row]) -> str:
    """The number of runs, and the distance of two measurements of `none`, in words."""
    long = [row for row in rows if row.get("size") == LONG and row["status"] == "ok"]
    found = noise_floor([ratio for row in long if row["policy"] == AGAIN for ratio in ratios(row, runs)])
    runs_of = max((row["runs"] for row in long), default=0)
    told = f"Speeds are medians of up to {runs_of} runs." if runs_of > 1 else "Speeds are of one run."
    if found is None:
        return told
    apart = f"{100 * found['p80']:.1f} % at the 80th percentile, by {100 * found['largest']:.1f} % at most"
    return f"{told} `{AGAIN}` is `none` measured twice: {found['pairs']} such pairs are apart by {apart}."


def refusals(rows: Iterable[Row]) -> list[str]:
    """A paragraph with the reasons of policies without figures, if there are any."""
    told: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["status"] != "ok":
            told.setdefault(row["why"], {})[f"{policy(row)}, {row['rule']}"] = None
    lines = [f"{'; '.join(names)}: {why}." for why, names in told.items()]
    return [" ".join(lines)] if lines else []


def base(row: Row) -> str:
    """The policy's name without the words that tell its measurements apart."""
    return row["policy"].partition(",")[0]
