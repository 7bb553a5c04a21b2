"""The policies that pay by context, blocks, steps, width, budget and link: in seconds, rows and bytes.

The points are a star, because the full product would take days. Every number of blocks stands beside every context,
with the first value of each other axis. Then every other value of one of these axes stands beside every context, at the
middle number of blocks. The second link stands at the last budget. A link is an axis of policies that move bytes alone.
`none-again` is `none` once more, if other axes have their first value: the difference of the two is noise. `--steps`
are those of a block and stand for a threshold, because the random model is sure of no token. `--budget`: share of the
dual cache's keys and values that fits the device; `--link`: 10⁶ bytes a second. It takes about an hour on one idle
core.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from measuring.pages import markdown_table
from measuring.point import words
from measuring.statistics import merged, noise_floor, paired
from measuring.study import Axes
from measuring.winners import Contest, border, contests, over_least, winners
from workloads.calls import BLOCK, TIMED, measure
from workloads.variants import REFRESH_EVERY_4

from tiered.policies.registry import make_policy

__all__ = ["AXES", "OF", "QUICK", "TIMED", "measure", "points", "tables"]

OF = ()
AGAIN = "none-again"
FOURTH = "fast_dllm_dual-4th"  # every fourth block begins with a refresh
SETS = {AGAIN: ("none", {}), FOURTH: ("fast_dllm_dual", {"refresh_blocks": 4}), **REFRESH_EVERY_4}
# From the simplest on: a policy has to be better than all in front of it.
POLICIES = [
    "none",
    AGAIN,
    "fast_dllm_prefix",
    "fast_dllm_dual",
    FOURTH,
    "attended",
    "dkv_decode",
    "dkv_pd",
    "dllm_cache",
]
POLICIES += ["elastic_cache", "polestar", "polestar-drift"]
SIDES: Axes = {"steps": [4, 32], "width": [256, 512], "budget": [None, 1, 0.5], "link": [None, 100, 10]}
AXES: Axes = {"policy": POLICIES, "context": [512, 2048, 8192], "blocks": [1, 4, 16], "layers": [4], **SIDES}
QUICK: Axes = {"context": [64, 128], "blocks": [1], "steps": [4], "width": [64], "budget": [None], "link": [None]}
FIRST = {name: values[0] for name, values in SIDES.items()}
NO_FLOOR = {"pairs": 0, "p80": 0.0, "largest": 0.0}


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn within a regime."""
    first, last = {name: axes[name][0] for name in SIDES}, {"budget": axes["budget"][-1]}
    arms = [first | {"blocks": blocks} for blocks in axes["blocks"]]
    middle = first | {"blocks": axes["blocks"][len(arms) // 2]}
    arms += [middle | {name: value} for name in SIDES for value in axes[name][1:]]
    arms += [middle | last | {"link": link} for link in axes["link"][1:2]]
    for arm, context, layers, name in product(arms, axes["context"], axes["layers"], axes["policy"]):
        if name == FOURTH and arm["blocks"] == 1:
            continue  # the first block always begins with a refresh
        base, options = SETS.get(name, (name, {}))
        moves = arm["budget"] is not None or hasattr(make_policy(base, **options), "hidden_tier")
        if (arm["link"] is None or moves) and (name != AGAIN or arm == first | {"blocks": arm["blocks"]}):
            # The window of `elastic_cache` slides over an answer of one block.
            block = BLOCK * arm["blocks"] if base == "elastic_cache" else BLOCK
            of = {"policy": name, "base": base, "options": options}
            yield of | {"context": context, "block": block, "layers": layers} | arm


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """`regimes`: the winner of each regime, and the seconds of all over the fastest. `border`: the context from which
    on each policy beats all in front of it: in seconds, in rows, in bytes of the device."""
    call = ("context", "blocks", *SIDES)
    found, planned = contests(merged(rows, timed=TIMED), call), [*contests(points(AXES), call)]
    # In the order of the points, however often some were measured again.
    found = dict(sorted(found.items(), key=lambda each: planned.index(each[0]) if each[0] in planned else len(planned)))
    twice = [own for own in found.values() if {AGAIN, "none"} <= own.keys()]
    pairs = dict.fromkeys((own[AGAIN]["point"], own["none"]["point"]) for own in twice)
    floor = noise_floor([ratio for pair in pairs for ratio in paired(rows, *pair, "seconds")]) or NO_FLOOR
    noise = {"seconds": floor["p80"], "rows_computed": 0.0, "device_bytes": 0.0}
    known = dict.fromkeys([*POLICIES, *(row["policy"] for row in rows)])
    names = [name for name in known if name != AGAIN and any(name in own for own in found.values())]
    arms, lines = dict[str, dict[int, Contest]](), []
    for (context, *side, link), own in found.items():
        contest = {name: row for name, row in own.items() if name != AGAIN}
        arm = words(dict(zip(("blocks", *SIDES), (*side, link), strict=True)), without=FIRST)
        arms.setdefault(arm, {})[context] = contest
        best = [", ".join(winners(contest, figure, share)) for figure, share in noise.items()]
        ratios = {name: f"{ratio:.2f}" for name, ratio in over_least(contest, "seconds").items()}
        cells = [ratios.get(name, contest.get(name, {}).get("status")) for name in names]
        lines.append([f"{context} {arm}", *best, *[*ratios.values(), None, None][1:2], *cells])
    borders = [
        [f"`{name}`", *(border(contests, name, names[:number], noise) for contests in arms.values())]
        for number, name in enumerate(names)
    ]
    told = "`none` twice, {pairs} times: apart by {p80:.1%} at the 80th percentile, by {largest:.1%} at most.\n\n"
    columns = ["", "fastest", "fewest rows", "least bytes", "the next", *(f"`{name}`" for name in names)]
    by_regime = told.format(**floor) + markdown_table(columns, lines)
    return {"regimes": by_regime, "border": markdown_table(["", *arms], borders[1:])}
