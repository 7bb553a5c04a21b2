"""Selectors of the rows that an update renews, at equal rows, beside an oracle and a frozen prompt.

Every block begins with a refresh, and a step recomputes its block. After every --interval commits (5 is Polestar's T =
4) a step is an update. It also renews --share per cent of the rows outside the block: the prompt's, and other blocks'.
All arms update in the same steps, and all but Polestar renew the same rows in all layers. Arms (--selector):

    none, frozen, all    without a cache; without updates; with updates of all rows
    random, round_robin, oldest     blind; of equally old rows `oldest` takes any
    attention, attention_pending    rows with most attention from the block, or from its pending rows
    attention_layer_N    `attention_pending` in the N-th layer alone
    drift, drift_first   rows whose attention drifted most, over all layers or in the first one: Polestar's drift with a
                         cluster of each row; `drift_output`: rows whose attention's output drifted most
    drift_attention      `drift` times `attention`
    oracle               rows whose uncached keys and values would change the attention of the pending rows most
    oracle_output        rows whose uncached keys and values, each row's alone, bring the logits nearest to `none`: for
                         prompts up to 256 tokens, because it takes a pass over the block for each row
    attended             the policy, in every step: rows with most attention from the last step's pending rows, in the
                         last layer
    polestar-C, fresh-C  the rule of `polestar` and of `polestar-fresh` with C clusters ("auto"; "rows" for a cluster of
                         each row), members as they are, and the M that has the share of the rows on average; `renewed`
                         is the share that it took, which is more if each layer adds M

Fixed beforehand: prompts of the validation split, from --seed on, are the same for all arms. Up to --prompts of them
are for exact match, one token a step. The first --kl-prompts are for the KL from `none`, at every step of `none`'s own
canvases, over pending tokens. After every 25 prompts an arm's share stops if its interval is at most 14 points wide.
That is the width of 200 prompts half of which are right. No look at other arms stops it. In the stored table an arm's
share is left out if a smaller one has as many right as `none`, or a larger one has none right. A task of --task whose
size is in prompt tokens is asked with each of --tokens, others as they come.

The last line of stdout has, over all cells (a task, its tokens and a share) that the arms have in common,

    frozen_loses_points      points of right answers from `none` to `frozen`; `frozen_loses_interval`: 95 % interval
    drift_share_of_oracle    right answers that `drift` gains over `frozen`, as a share of what `oracle` gains
    random_share_of_oracle   the same of `random`
    share_of_oracle, share_of_oracle_kl    of each arm: the same; and of the KL that `oracle` takes from `frozen`

each null as long as rows are missing or `oracle` gains nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from measuring.statistics import drop, merged
from measuring.study import Axes
from measuring.table import Row
from training.tasks import ALL_TASKS, FRESH_TASKS, TASKS
from workloads.answer_tables import Column, Show, asked_both, pivot, right, task, where
from workloads.models import local, weights
from workloads.selection import SELECTORS
from workloads.selection_answers import FROZEN, NONE, REFERENCES, check_arm, measure

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

OF, TIMED = ("share",), ()
DRIFT, RANDOM, ORACLE = "drift", "random", "oracle"
AXES: Axes = {
    "model": ["embedded-fresh"],
    "task": ["sort", *FRESH_TASKS],
    "tokens": [256, 1024, 2048],
    "selector": [*REFERENCES, *SELECTORS, "attended", "polestar-auto", "polestar-rows", "fresh-auto", "fresh-rows"],
    "share": [1, 2, 5, 10, 20, 50],
    "interval": [1, 5],
    "split": ["validation"],
    "prompts": [200],
    "kl_prompts": [50],
}
QUICK: Axes = {
    "task": ["sort"], "selector": ["none", "frozen", "oracle", "polestar-rows"], "share": [20],
    "prompts": [2], "kl_prompts": [1],
}  # fmt: skip
# Tokens of an answer and of its blocks.
SHORT, LONG, FRESH = (32, 32), (128, 32), (64, 16)
MOST_PASSES = 256  # most tokens of a prompt of `oracle_output`
IN_TOKENS = "prompt tokens"
# A task, its size, and a share, in which arms are compared. An arm without a share is in every cell.
Cell = tuple[str, Any, Any]


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """All arms of a task and size next to each other, each with all of its shares."""
    for arm in axes["selector"]:
        check_arm(arm)
    for share in axes["share"]:
        if not 0 < share <= 100:
            raise ValueError(f"share = {share}; per cent above 0, up to 100, are allowed")
    for model, name in product(axes["model"], axes["task"]):
        if name not in ALL_TASKS:
            raise unknown_name("task", name, ALL_TASKS)
        sizes = axes["tokens"] if ALL_TASKS[name].unit == IN_TOKENS else [None]
        answer, block = SHORT if name in TASKS else FRESH if name in FRESH_TASKS else LONG
        call = {"max_new_tokens": answer, "block_length": block}
        others = (axes[axis] for axis in ("interval", "split", "prompts", "kl_prompts"))
        for size, interval, split, prompts, compared, arm in product(sizes, *others, axes["selector"]):
            if arm == "oracle_output" and (size or 0) > MOST_PASSES:
                continue
            shares = [None] if arm in REFERENCES else axes["share"]
            yield weights(model) | {
                "task": name, "size": size, "split": split, "prompts": prompts, "kl_prompts": compared,
                "selector": arm, "shares": shares, "interval": interval, "call": call,
            }  # fmt: skip


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`selection`: right answers by arm, and `selection_kl`: KL from `none`, with a column for each share;
    `selection_renewed`: the rows that arms renewed."""
    seen = merged(rows, of=OF, timed=TIMED)
    shares = dict.fromkeys(sorted({row["share"] for row in seen if row.get("share") is not None}))
    return {
        "selection": _by_share(seen, shares, right),
        "selection_kl": _by_share([row for row in seen if row["status"] != "ok" or "kl" in row], shares, _mean("kl")),
        "selection_renewed": _by_share(seen, shares, _renewed),
    }


def _by_share(rows: Sequence[Row], shares: Mapping[Any, None], show: Show) -> str:
    columns: dict[str, Column] = {"": (where(share=None), show)}
    columns |= {f"{share} %": (where(share=share), show) for share in shares}
    return pivot(rows, lambda row: f"{task(row)}: `{row['selector']}`", columns)


def _mean(figure: str) -> Show:
    return lambda rows: f"{sum(row[figure] for row in rows) / len(rows):.2e}"


def _renewed(rows: Sequence[Row]) -> str:
    found = [row["renewed"] for row in rows if "renewed" in row]
    return f"{100 * sum(found) / len(found):.1f} %" if found else ""


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of the last line."""
    seen = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]
    arms = [arm for arm in dict.fromkeys(row["selector"] for row in seen) if arm not in (NONE, FROZEN)]
    of_right, of_kl = (
        {arm: share_of_oracle(seen, arm, value) for arm in arms}
        for value in (lambda row: row["correct"] / row["examples"], lambda row: -row["kl"] if "kl" in row else None)
    )
    lost, *bounds = frozen_loses(seen) or [None]
    return {
        "frozen_loses_points": lost,
        "frozen_loses_interval": bounds or None,
        "drift_share_of_oracle": of_right.get(DRIFT),
        "random_share_of_oracle": of_right.get(RANDOM),
        "share_of_oracle": of_right,
        "share_of_oracle_kl": of_kl,
    }


def frozen_loses(rows: Sequence[Row]) -> list[float] | None:
    """Points of right answers from `none` to `frozen`, paired on the prompts of both, with their interval; None without
    both."""
    found: dict[str, list[bool]] = {NONE: [], FROZEN: []}
    of = {(row["task"], row.get("size"), row["selector"]): row for row in rows}
    for name, size, _ in dict.fromkeys(key for key in of if key[2] == NONE):
        if (frozen := of.get((name, size, FROZEN))) is not None:
            for arm, right in zip((NONE, FROZEN), asked_both(of[name, size, NONE], frozen), strict=True):
                found[arm] += right
    return [round(100 * share, 2) for share in drop(found[NONE], found[FROZEN])] if found[NONE] else None


def share_of_oracle(rows: Sequence[Row], arm: str, value: Callable[[Row], float | None]) -> float | None:
    """The gain of `arm` over `frozen`, over that of `oracle`, each summed up over the cells that all three have."""

    def cells(name: str) -> dict[Cell, float]:
        own = [row for row in rows if row["selector"] == name]
        found = {(row["task"], row.get("size"), row.get("share")): value(row) for row in own}
        return {cell: one for cell, one in found.items() if one is not None}

    ours, oracle, frozen = cells(arm), cells(ORACLE), cells(FROZEN)
    gained = possible = 0.0
    for (name, size, share), best in oracle.items():
        own, base = ours.get((name, size, None if arm in REFERENCES else share)), frozen.get((name, size, None))
        if own is not None and base is not None:
            gained, possible = gained + own - base, possible + best - base
    return round(gained / possible, 3) if possible > 0 else None
