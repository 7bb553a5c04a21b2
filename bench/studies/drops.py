"""Losses by caches and by codes of keys, values or weights: right answers to the prompts of `none`.

Part `long` asks for answers of two to four blocks behind prompts of 1000 and 2000 tokens. (Behind 3968, all positions
of the model, it gets none right.) Part `blocks` has such answers behind short prompts, part `short` the other tasks.
Part `logits` has the distances by which codecs move logits of a canvas of masks. Every policy answers with raw keys and
values. Policies of --coded also answer with each of --kv, and those of --weighed with weights in each of --weights. All
commit tokens that are surer than 0.9. `elastic_cache` answers in one block, for which it is made. A drop is a
difference of shares with its 95 % interval, answers paired prompt by prompt. It takes about three hours on one idle
core, a quarter of one for `--part blocks,short,logits`; `--filter weights!=none` measures weights in codes alone.

The last line of stdout says, in points beside the counts,

    exact_match_drop_CODEC      of part `long`, beside raw under the same policy: the largest of all policies
    exact_match_drop_weights_CODE    the same of weights in codes
    exact_match_drops           by part, policy and codec, beside `none` with raw keys and values: [drop, low, high]
    polestar_drift_over_full    of part `long`, `polestar-drift` beside `polestar`: [drop, low, high]
    polestar_auto_over_full     the same of `polestar-auto`

each null, or left out, as long as its rows are missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import drop, merged
from measuring.study import Axes
from measuring.table import Row
from training.tasks import TASKS
from workloads import answers, kv_logits
from workloads.answer_tables import Column, Show, mean, pivot, policy, right, right_of, task, where
from workloads.answers import OF, TIMED, tasks_of
from workloads.models import local, weights
from workloads.variants import KV, ONE_BLOCK, REFRESH_EVERY_4

from tiered.core.checks import unknown_name
from tiered.models.weight_form import CODES, WeightForm
from tiered.policies.registry import make_policy

__all__ = ["AXES", "OF", "QUICK", "TIMED", "last_line", "local", "measure", "points", "tables"]

BLOCK = 32
ANSWER = {"long": 128, "blocks": 128, "short": 32, "logits": 32}
CODED = ["none", "fast_dllm_dual", "polestar"]
AXES: Axes = {
    "model": ["embedded"],
    "part": [*ANSWER],
    "policy": [*CODED, "attended", "dkv_pd", "dllm_cache", "elastic_cache", *REFRESH_EVERY_4],
    "kv": [*KV],
    "coded": CODED,
    "weights": [*CODES],
    "weighed": ["none", "fast_dllm_dual"],
    "long": ["long_lookup@960:304", "long_lookup@1984:96"],
    "blocks": [f"long_{name}:60" for name in ("copy", "reverse", "chain")],
    "short": [f"{name}:100" for name in TASKS],
    "logits": [*(f"{name}:20" for name in TASKS), "lookup@1008:10"],
}  # fmt: skip
QUICK: Axes = {
    "part": ["blocks", "short", "logits"], "policy": ["none", "dkv_pd"], "kv": ["raw", "fp8"], "coded": ["none"],
    "weights": ["int8"], "weighed": ["none"],
    "blocks": ["long_copy:1"], "short": ["sort:2"], "logits": ["sort:1"],
}  # fmt: skip
RAW = "raw"
BASE = ("none", RAW)
# By part, policy and code: True for right answers, in one order.
Key = tuple[str, str, str]
Answers = Mapping[Key, Sequence[bool]]


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """The policies of each part in turn, each with its codecs, and then with weights in codes."""
    for form in axes["weights"]:
        WeightForm.of(form)
    for model, part in product(axes["model"], axes["part"]):
        if part not in ANSWER:
            raise unknown_name("part", part, ANSWER)
        of = weights(model) | {"part": part, "tasks": tasks_of(axes[part])}
        if part == "logits":
            yield from (of | {"kv": kv, "answer": ANSWER[part]} for kv in axes["kv"])
            continue
        for name in axes["policy"]:
            base, options = REFRESH_EVERY_4.get(name, (name, {}))
            make_policy(base)  # raises for an unknown name
            call = {"max_new_tokens": ANSWER[part], "block_length": ANSWER[part] if base in ONE_BLOCK else BLOCK}
            asked = of | {"policy": name, "base": base, "call": call | {"confidence_threshold": 0.9}}
            for kv in axes["kv"] if name in axes["coded"] else ["raw"]:
                yield asked | {"kv": kv, "options": options | {"kv": kv}}
            for form in axes["weights"] if name in axes["weighed"] else []:
                raw = {"kv": "raw", "weights": form}
                yield asked | raw | {"options": options | raw}


def measure(settings: Mapping[str, Any], **local: Any) -> Iterator[Row]:
    """See `workloads.answers` and `workloads.kv_logits`."""
    return (kv_logits if settings["part"] == "logits" else answers).measure(settings, **local)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """`drops`: drops of policies; `kv`: of codecs; `weights_lost`: of weights in codes. `kv_tasks`: right answers and
    forwards of an example by task; `kv_logits`: distances of logits."""
    seen, nfe = merged(rows, of=OF, timed=TIMED), mean("nfe", 1)
    weighed = [row for row in seen if "weights" in row]
    told, found = [row for row in seen if row["part"] != "logits" and "weights" not in row], answers_of(seen)
    policies, codecs = dict[str, Column](), dict[str, Column]()
    for part in dict.fromkeys(row["part"] for row in told):
        policies |= {part: (where(part=part), right), f"{part}: lost": (where(part=part), lost(found, BASE))}
        codecs[part] = where(part=part), lost(found)
    coded = [row for row in told if row["kv"] != "raw"]
    both = {(row["policy"], kv): None for row in coded for kv in ("raw", row["kv"])}
    by_task: dict[str, Column] = {
        f"`{name}`, {kv}": (where(policy=name, kv=kv), lambda own: f"{right_of(own)}; {nfe(own)}") for name, kv in both
    }
    far = {"KL": "{kl:.2e}", "99th percentile": "{kl_p99:.2e}", "another token": "{other_token:.1%}"}
    logits = [row | {"of": task(row)} for row in seen if "kl" in row and row["kv"] != "raw"]
    return {
        "drops": pivot([row for row in told if row["kv"] == "raw"], policy, policies),
        "kv": pivot(coded, lambda row: f"{policy(row)}, {row['kv']}", codecs),
        "kv_tasks": pivot([row for row in told if "task" in row], task, by_task),
        "kv_logits": rows_table("{kv}: {of}", far, logits),
        "weights_lost": pivot(weighed, lambda row: f"{policy(row)}, {row['weights']}", codecs),
    }


def lost(found: Answers, base: tuple[str, str] | None = None) -> Show:
    """The text of a drop of a policy and codec beside those of `base`; None for the same policy with raw ones."""

    def show(rows: Sequence[Row]) -> str:
        of = part, name, _ = key(rows[0])
        beside, kv = base or (name, RAW)
        points = None if of[1:] == base else drop_of(found, (part, beside, kv), of)
        return "" if points is None else "{:.2f} ({:.2f} to {:.2f})".format(*points)

    return show


def last_line(rows: Sequence[Row]) -> dict[str, Any]:
    """Drops, for the last line."""
    found = answers_of(merged(rows, of=OF, timed=TIMED))
    beside = {of: drop_of(found, (of[0], *BASE), of) for of in found if of[1:] != BASE}
    codes = [*(kv for kv in KV if kv != RAW), *map(in_weights, CODES)]
    codecs: dict[str, list[float]] = {code: [] for code in codes}
    for part, name, code in found:
        points = drop_of(found, (part, name, RAW), (part, name, code))
        if part == "long" and code in codecs and points is not None:
            codecs[code].append(points[0])
    return {
        **{f"exact_match_drop_{code}": max(drops, default=None) for code, drops in codecs.items()},
        "exact_match_drops": {f"{part}: {name}, {code}": points for (part, name, code), points in beside.items()},
        **{
            f"polestar_{name}_over_full": drop_of(found, ("long", "polestar", RAW), ("long", f"polestar-{name}", RAW))
            for name in ("drift", "auto")
        },
    }


def key(row: Row) -> Key:
    """The key of a row's answers."""
    return row["part"], row["policy"], in_weights(row["weights"]) if "weights" in row else row["kv"]


def in_weights(code: str) -> str:
    """The name of a code of weights, not of keys and values."""
    return f"weights_{code}"


def answers_of(rows: Sequence[Row]) -> Answers:
    """Answers by key; tasks follow each other in the order in which they were asked."""
    found: dict[Key, list[bool]] = {}
    for row in rows:
        if row["status"] == "ok" and "right" in row:
            found.setdefault(key(row), []).extend(each == "1" for each in row["right"])
    return found


def drop_of(found: Answers, base: Key, ours: Key) -> list[float] | None:
    """The drop and its interval, in points; None if either was not asked, or not the same number of prompts."""
    if base not in found or ours not in found or len(found[base]) != len(found[ours]):
        return None
    return [round(100 * share, 2) for share in drop(found[base], found[ours])]
