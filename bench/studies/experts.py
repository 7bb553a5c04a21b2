"""Mixtures whose experts do not all fit: picks of routers, guesses of them, and costs of copies.

Parts, all on the CPU, over a random LLaDA2 in float32 whose answer has four blocks. A layer's branches add to a row
about --branch times its size. By 1 the rows differ as random ones do. By 0.25 masks stay alike from layer to layer and
from step to step, as those of trained models do. GPT-2 begins its training with this factor, (2 · 8)^-½.

    recorded  logits and picked experts of LLaDA-MoE, LLaDA2 and SDAR-MoE beside those of the official code
    picks     experts of a layer that a step and a block reach, how they overlap, the recall of guesses a layer ahead,
              and fetches without guesses over those of Belady's rule, with slots for a share of the experts
    stream    a call with slots for --share of the experts over a slowed link: the copy of the experts that a step
              reaches stands to its forward as with LLaDA2-mini in int4 on --link, by data sheets. Beside it the same
              call without guesses, experts fetched one by one and waited for (TIDE's schedule), and all experts in
              each forward. The answers are those of resident experts, or the point fails
    load      the peak of anonymous memory of a process that loads the model in --form with as few experts on the
              device as possible, over the booked bytes and one raw tensor

It takes about ten minutes on two idle cores. The last line of stdout says, each null as long as its rows are missing,

    families_identical, router_identical    true if all recorded cases are the same: logits, and picked experts
    experts_over_bound      a call over, forward by forward, the longer of computing and of its misses' copies: the
                            largest
    experts_hidden_share    hidden time of copies over the time that computing could hide: the smallest
    bytes_over_misses       bytes that came over those without guesses: the largest
    over_one_by_one         a forward over that with experts fetched one by one: the largest
    misses_over_belady      fetches without guesses over Belady's: the largest
    load_peak_over_plan     the largest
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from measuring.table import Row
from measuring.worker import RefusedError
from workloads import expert_streams, weight_streams
from workloads.weight_loading import LOAD, in_bytes

from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

OF, TIMED = ("case",), (*weight_streams.TIMED, "plain_ms", "layers_ms", "peak_bytes", "peak_over_plan")
AXES: Axes = {
    "part": ["recorded", "picks", "stream", "load"],
    "form": ["raw", "int4"],
    "link": ["rtx4090"],
    "branch": [1.0, 0.25],
    "share": [0.1, 0.2, 0.4, 0.8],
    "experts": [64],
    "picked": [2, 8],
    "width": [512],
    "layers": [8],
    "context": [256],
    "steps": [8],
}
QUICK: Axes = {
    "form": ["int4"], "branch": [1.0], "share": [0.3], "experts": [64], "picked": [2], "width": [64], "layers": [3],
    "context": [64], "steps": [2],
}  # fmt: skip
PICKS = {
    "a step": "{of_step:.1f}", "a block": "{of_block:.1f}", "of the step before": "{step_overlap:.0%}",
    "of the block before": "{block_overlap:.0%}", "guessed by last": "{recall_last:.0%}",
    "by router": "{recall_router:.0%}", "by both": "{recall_both:.0%}", "over Belady": "{over_belady}",
}  # fmt: skip
STREAM = {
    "resident, ms": "{resident_ms:.1f}", "streamed": "{streamed_ms:.1f}", "without guesses": "{plain_ms:.1f}",
    "one by one": "{synchronous_ms:.1f}", "all experts": "{layers_ms:.1f}", "bound": "{bound_ms:.1f}",
    "over bound": "{over_bound:.2f}", "hidden": "{hidden_share:.0%}", "there": "{hit_share:.0%}",
    "bytes over misses": "{bytes_over_misses:.2f}",
}  # fmt: skip


def local(axes: Axes) -> dict[str, Any]:
    """Nothing: models are made."""
    return {}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Part by part; the links of a share stand next to each other."""
    if wrong := [share for share in axes["share"] if not 0 < share < 1]:
        raise ValueError(f"share = {wrong[0]}; above 0 and below 1 is allowed")
    if wrong := [width for width in axes["width"] if width < 64 or width % 64]:
        raise ValueError(f"width = {wrong[0]}; a multiple of 64 is allowed")
    sizes = ("branch", "experts", "picked", "width", "layers", "context", "steps")
    for part in axes["part"]:
        if part not in AXES["part"]:
            raise unknown_name("part", part, AXES["part"])
        if part == "recorded":
            yield {"part": part}
            continue
        for values in product(*(axes[name] for name in sizes)):
            of = {"part": part, **dict(zip(sizes, values, strict=True))}
            if part == "picks":
                yield of | {"shares": axes["share"]}
            elif part == "load":
                if (of["branch"], of["picked"]) == (axes["branch"][0], axes["picked"][0]):  # loading asks no router
                    yield from (of | {"form": form} for form in axes["form"])
            else:
                yield from (of | {"share": one, "link": link} for one, link in product(axes["share"], axes["link"]))


def measure(settings: Mapping[str, Any]) -> Iterator[Row]:
    """As `workloads.expert_streams`."""
    if settings["device"] != "cpu":
        raise RefusedError(f"device {settings['device']}: links are slowed down on the CPU alone")
    if settings["part"] == "recorded":
        return expert_streams.recorded()
    parts = {"picks": expert_streams.picks, "stream": expert_streams.stream, "load": expert_streams.load}
    return parts[settings["part"]](settings)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`experts_picked`: picks of routers; `experts_streamed`: calls over a slowed link; `experts_loaded`: peaks of
    loading."""
    seen = merged(rows, of=OF, timed=TIMED)
    picked = [row | {"over_belady": _over_belady(row)} for row in seen if row["part"] == "picks"]
    streamed = [row for row in seen if row["part"] == "stream"]
    loaded = [in_bytes(row) for row in seen if row["part"] == "load"]
    return {
        "experts_picked": rows_table("{picked} of {experts}, branches {branch}", PICKS, picked),
        "experts_streamed": rows_table("{picked} of {experts}, branches {branch}, {share:.0%} stay", STREAM, streamed),
        "experts_loaded": rows_table("{experts} experts, weights {form}", LOAD, loaded),
    }


def _belady(row: Row) -> list[float]:
    return [row[name] for name in row if name.startswith("misses_over_belady_")]


def _over_belady(row: Row) -> str:
    return ", ".join(f"{each:.2f}" for each in _belady(row))


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that have goals, of medians over rounds, for the last line."""
    good = [row for row in merged(rows, of=OF, timed=TIMED) if row["status"] == "ok"]

    def of(figure: str) -> list[float]:
        return [round(row[figure], 3) for row in good if figure in row]

    told = [row for row in rows if row["part"] == "recorded"]
    whole = bool(told) and all(row["status"] == "ok" for row in told)
    return {
        "families_identical": all(row["identical"] for row in told) if whole else None,
        "router_identical": all(row["routed"] for row in told) if whole else None,
        "experts_over_bound": max(of("over_bound"), default=None),
        "experts_hidden_share": min(of("hidden_share"), default=None),
        "bytes_over_misses": max(of("bytes_over_misses"), default=None),
        "over_one_by_one": max(of("over_synchronous"), default=None),
        "load_peak_over_plan": max(of("peak_over_plan"), default=None),
        "misses_over_belady": max((round(each, 3) for row in good for each in _belady(row)), default=None),
    }
