"""The bytes of a call, by tier, account and forward, checked against bytes that torch allocates.

A random model and the embedded one, in float32; one call has a device budget that its features do not fit. LLaDA-8B is
planned. `about` tells rows apart; a "check" fails if the bytes differ by more than is allowed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from measuring.pages import rows_table
from measuring.statistics import merged
from measuring.study import Axes
from workloads import subjects
from workloads.memory import OF, TIMED, measure

from tiered.core.byte_size import format_bytes
from tiered.core.checks import unknown_name

__all__ = ["AXES", "OF", "QUICK", "TIMED", "local", "measure", "points", "tables"]

DUAL, EMBEDDED = "fast_dllm_dual", {"model": ["embedded"]}
PLANNED = {"model": ["llada-8b"], "positions": [4096, 16384, 32768]}
# Axes of each call, and settings that differ from its policy's defaults; the policy is the first word.
CALLS: dict[str, tuple[Axes, dict[str, Any]]] = {
    **{policy: ({}, {}) for policy in (DUAL, "polestar", "dllm_cache", "elastic_cache")},
    f"{DUAL} in three quarters of its room": ({}, {"room": 0.75}),
    f"{DUAL} on the embedded model": (EMBEDDED, {}),
    "polestar on the embedded model": (EMBEDDED, {"options": {"update_threshold": 1}}),
    **{f"{policy} on LLaDA-8B": (PLANNED, {}) for policy in (DUAL, "polestar")},
}
AXES: Axes = {"call": list(CALLS), "width": [512], "layers": [8], "positions": [2048], "answer": [64]}
QUICK: Axes = {"width": [256], "layers": [4], "positions": [1024]}
COLUMNS = {name: f"{{{name}}}" for name in ("ledger", "allocated", "differ by", "allowed", "agrees")}
FEATURES = {"features": "{kept}", "over the dual cache's": "{over:.3f}", "bytes an element": "{bytes_per_element:.3f}"}


def local(axes: Axes) -> dict[str, Any]:
    """The path of the embedded model."""
    return subjects.local(EMBEDDED)


def points(axes: Axes) -> Iterator[dict[str, Any]]:
    """Every call."""
    for call in axes["call"]:
        if call not in CALLS:
            raise unknown_name("call", call, CALLS)
        own, of = CALLS[call]
        for settings in subjects.points_of(axes | {"model": [subjects.RANDOM]} | own, "positions", "answer"):
            yield settings | {"call": call, "policy": call.split()[0], "options": {}, "room": None} | of


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The checks of all calls; and features over those of the dual cache, with hidden states by their elements."""
    checks, features, of_dual = list[dict[str, Any]](), list[dict[str, Any]](), dict[tuple[str, int], int]()
    for row in merged(rows, of=OF, timed=TIMED):
        name, at = f"{row['call']}, {row['positions']}", (row["model"], row["positions"])
        if row.get("about") == "features":
            if row["policy"] == DUAL:
                of_dual.setdefault(at, row["feature_bytes"])
            over = {"over": row["feature_bytes"] / of_dual[at]} if at in of_dual else {}
            features.append(row | over | {"name": name, "kept": format_bytes(row["feature_bytes"])})
        elif row.get("about") in ("check", "resident"):
            booked, found = row["ledger"], int(row["allocator"] if "agrees" in row else row["resident_bytes"])
            line = {"name": f"{name}, growth of the process", "status": "ok", "ledger": format_bytes(booked)}
            line |= {"allocated": format_bytes(found), "differ by": f"{(found - booked) / max(1, booked):+.2%}"}
            if "agrees" in row:
                allowed = format_bytes(row["allowed"]) if "allowed" in row else "below"
                line |= {"name": f"{name}, {row['tier']}: {row['what']}", "allowed": allowed}
                line["agrees"] = "agrees" if row["agrees"] else "DIFFERS"
            checks.append(line)
        elif row["status"] != "ok":
            checks.append(row | {"name": name})
    return {"memory": rows_table("{name}", COLUMNS, checks), "features": rows_table("{name}", FEATURES, features)}
