"""Costs of calls behind long prompts: seconds, rows and bytes, planned and measured.

A random model in float32 on one thread. A size is PROMPT:BLOCKS:STEPS: tokens of the prompt, blocks of 32 tokens, and
steps of each. At every size the policies take turns, without a budget and with raw keys and values. Then, at the first
size, policies of --coded take turns with each of --kv. The device then has room for --budget of the dual cache's raw
keys and values. Beside the seconds stand planned ones, by rates that the process has just measured; --dry-run adds them
up. It takes more than an hour on one idle core, half of it for the last size.
Three rounds of the first size, and one of the others:

    python bench/measure.py contexts --size 8192:8:8 --runs 3 && python bench/measure.py contexts --keep

The last line of stdout says, beside the counts,

    polestar_auto_over_dual_time    of the last size; the same of the other policies
    kv_bytes_per_element_CODEC      bytes of keys and values in all tiers under the budget, over their elements, by the
                                    first of --coded
    plan_over_measured              planned seconds over measured ones, the median of all calls
    plan_over_measured_spread       the largest such ratio over the smallest

each null as long as its rows are missing; ratios are taken within a round.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from statistics import median
from typing import Any

import torch
from measuring.pages import rows_table
from measuring.statistics import merged, paired
from measuring.study import Axes
from measuring.table import Row
from workloads.calls import BLOCK, answered, budget_of, figures, size_of, sizes_of
from workloads.calls import TIMED as CALL_TIMED
from workloads.models import random_model
from workloads.variants import KV, REFRESH_EVERY_4

from tiered.core.features import Account, Tier
from tiered.core.rates import Rates
from tiered.forward.forward_bytes import kv_bytes_per_token
from tiered.models.shape import ModelShape
from tiered.offload.device import pick_device
from tiered.planning.machine_rates import machine_rates
from tiered.planning.times import call_time
from tiered.planning.workload import Workload
from tiered.policies.base import Policy
from tiered.policies.registry import make_policy

__all__ = ["AXES", "OF", "QUICK", "TIMED", "expected", "last_line", "measure", "points", "tables"]

OF = ()
TIMED = (*CALL_TIMED, "planned_seconds", "plan_over_measured")
DUAL = "fast_dllm_dual"
AXES: Axes = {
    "size": ["8192:8:8", "16384:8:8", "16384:16:8"],
    "policy": [DUAL, "dkv_pd", "polestar", *REFRESH_EVERY_4],
    "coded": [DUAL, "dkv_pd"],
    "kv": [*KV],
    "budget": [0.5],
    "width": [512],
    "layers": [8],
}
QUICK: Axes = {
    "size": ["96:2:4"], "policy": [DUAL, "polestar-auto"], "coded": [DUAL], "kv": ["raw", "fp8"], "width": [64],
    "layers": [4],
}  # fmt: skip
CALLS = {
    "s": "{seconds:.2f}",
    "planned": "{planned_seconds:.2f}",
    "over the dual cache": "{over_dual:.3f}",
    "rows": "{rows_computed:.0f}",
    "device": "{device_mib:.1f} MiB",
}
CODED = CALLS | {"host": "{host_mib:.1f} MiB", "moved": "{moved_mib:.1f} MiB", "bytes an element": "{kv_held:.3f}"}
_START = 5.0  # seconds until a process has torch, a model and its rates


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Policies in turn at each size; then codecs under the budget."""
    first, *_ = sizes = [size_of(text, "context") for text in axes["size"]]
    for width, layers in product(axes["width"], axes["layers"]):
        calls = [(size, name, "raw", None) for size, name in product(sizes, axes["policy"])]
        calls += [(first, *of) for of in product(axes["coded"], axes["kv"], axes["budget"])]
        for size, name, kv, budget in calls:
            base, options = REFRESH_EVERY_4.get(name, (name, {}))
            make_policy(base)  # raises for an unknown name
            of = {"policy": name, "base": base, "options": options, "kv": kv, "budget": budget}
            yield size | {"width": width, "layers": layers, "block": BLOCK} | of


def measure(settings: Mapping[str, Any]) -> Iterator[Row]:
    """One row: the figures of `workloads.calls`, planned seconds, and "kv_held": bytes of keys and values in all tiers,
    over their elements."""
    rates = _rates(settings["device"], settings["threads"])
    runtime, out = answered(settings)
    tiers, shape = out.memory.tiers, runtime.model.shape
    held = sum(tiers[tier].at_peak.get(account, 0) for tier in Tier for account in (Account.KEY, Account.VALUE))
    elements = out.sequences.shape[1] * kv_bytes_per_token(shape, shape.dtype) / runtime.dtype.itemsize
    row = figures(out) | {"kv_held": held / elements}
    row["planned_seconds"] = planned(settings, out.choice.policy, shape, rates)
    yield row | {"plan_over_measured": row["planned_seconds"] / row["seconds"]}


def expected(settings: Mapping[str, Any]) -> float:
    """Planned seconds of the point. If the call chooses an option, the plan is without it, which takes at least as
    long. An unknown policy is refused at once."""
    options = {} if "auto" in settings["options"].values() else settings["options"]
    try:
        policy = make_policy(settings["base"], **options)
    except (TypeError, ValueError):
        return _START
    shape = _shape(settings["width"], settings["layers"], settings["context"] + settings["blocks"] * BLOCK)
    return _START + planned(settings, policy, shape, _rates(settings["device"], settings["threads"]))


def planned(settings: Mapping[str, Any], policy: Policy, shape: ModelShape, rates: Rates) -> float:
    """Seconds of the call of `settings`."""
    sizes = sizes_of(settings, shape)
    needed = Workload(policy, sizes).needed(budget_of(settings, shape))
    return call_time(policy, sizes, needed, rates, tokens_per_forward=max(1, BLOCK // settings["steps"])).seconds


@cache
def _shape(width: int, layers: int, positions: int) -> ModelShape:
    return random_model(width, layers, positions).shape


@cache
def _rates(device: str, threads: int) -> Rates:
    torch.set_num_threads(threads)
    return machine_rates(pick_device(device), torch.float32)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`contexts`: a line for each call without a budget; `contexts_kv`: for each codec under one."""
    seen = sorted(merged(rows, of=OF, timed=TIMED), key=by_size)
    for row in seen:
        for name in ("device", "host", "moved"):
            if f"{name}_bytes" in row:
                row[f"{name}_mib"] = row[f"{name}_bytes"] / 2**20
        if ratio := over_dual(rows, row):
            row["over_dual"] = ratio
    return {
        "contexts": rows_table("{size} `{policy}`", CALLS, [row for row in seen if "budget" not in row]),
        "contexts_kv": rows_table("{size} `{policy}`, {kv}", CODED, [row for row in seen if "budget" in row]),
    }


def by_size(row: Row) -> tuple[int, int]:
    """The shortest prompt first, and the fewest blocks."""
    return row["context"], row["blocks"]


def over_dual(rows: Sequence[Row], ours: Row) -> float | None:
    """The time of a call over that of the dual cache at the same size, without a budget: the median over rounds."""
    same = {name: ours[name] for name in ("size", "width", "layers")} | {"policy": DUAL}
    dual = next((row["point"] for row in rows if "budget" not in row and same.items() <= row.items()), None)
    ratios = [] if dual is None else paired(rows, ours["point"], dual, "seconds")
    return median(ratios) if ratios else None


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that have goals, for the last line."""
    seen = sorted(merged(rows, of=OF, timed=TIMED), key=by_size)
    free = [row for row in seen if "budget" not in row]
    over = {row["policy"]: over_dual(rows, row) for row in free if row["size"] == free[-1]["size"]}
    held = {row["kv"]: row.get("kv_held") for row in reversed(seen) if "budget" in row}
    plans = [row["plan_over_measured"] for row in seen if row["status"] == "ok"]
    return {
        **{f"{name.replace('-', '_')}_over_dual_time": over.get(name) for name in AXES["policy"] if name != DUAL},
        **{f"kv_bytes_per_element_{kv}": held.get(kv) for kv in KV},
        "plan_over_measured": median(plans) if plans else None,
        "plan_over_measured_spread": max(plans) / min(plans) if plans else None,
    }
