"""The figures of memory over the forwards of a call: stacked bytes of each tier, by account."""

from typing import Any

from reporting.accounts import account_series, total
from reporting.figure import Cell, Figure, Group, Table, missing
from reporting.skips import Source
from reporting.timeline_panel import timeline_panel
from reporting.wording import DASH, counted, listed, named, nbytes, percent, plain

HINT = "python bench/memory.py writes it."
PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
KINDS = ("refresh", "update", "step")


def timeline_figures(memory: Source) -> list[Figure]:
    """A figure for all calls, the one with most tiers first."""
    name, topic = "bytes_over_steps", "Bytes over the steps"
    calls = [call for call in memory.rows if call["timeline"]]
    if memory.gap is not None or not calls:
        return [missing(name, topic, memory.gap or f"{memory.file} has no call with a timeline", HINT)]
    calls.sort(
        key=lambda call: -sum(any(sample["tiers"].get(t) for sample in call["timeline"]) for t in ("host", "disk"))
    )
    groups = [
        Group(
            title=f"{call['name']}: {counted(call['positions'], 'position')}, {_sequences(call['batch'])}",
            panels=[timeline_panel(call, 946.0)],
            narrow=[timeline_panel(call, 370.0)],
            open=number < 2,
        )
        for number, call in enumerate(calls)
    ]
    figure = Figure(
        name=name,
        topic=topic,
        headline=_sentence(calls[0]) + _rest(calls[1:]),
        caption="What the ledger held after every forward, by account, stacked. The strip on top has the kind of every "
        "pass: a refresh recomputes every row, an update those of drifted clusters, a step the block's alone. Passes "
        "are booked at the most that they can take before a call begins, so activations and logits are level. Thin "
        "lines part blocks.",
        groups=groups,
        tables=[*(_table(call) for call in calls), *_checks(calls)],
        sources=[memory.file],
        notes=_notes(calls),
    )
    return [figure]


def _sequences(batch: int) -> str:
    return "one sequence" if batch == 1 else f"{batch} sequences"


def _sentence(call: dict[str, Any]) -> str:
    parts = []
    for tier in ("device", "host", "disk"):
        peak = max(reversed(call["timeline"]), key=lambda sample: total(sample, tier))
        if size := total(peak, tier):
            account, most = max(peak["tiers"][tier].items(), key=lambda item: item[1])
            parts.append(f"{nbytes(size)} {PLACES[tier]} ({percent(most / size)} of it {account})")
    return f"{named(call['name'])} holds at most {listed(parts) or 'nothing'}"


def _rest(calls: list[dict[str, Any]]) -> str:
    if not calls:
        return "."
    peaks = [max(total(sample, "device") for sample in call["timeline"]) for call in calls]
    if len(calls) == 1:
        return f"; {named(calls[0]['name'])} holds {nbytes(peaks[0])} on the device."
    return f"; {len(calls)} other calls hold {nbytes(min(peaks))} to {nbytes(max(peaks))} on the device."


def _table(call: dict[str, Any]) -> Table:
    series = [(tier, account) for tier in ("device", "host", "disk") for account in account_series(call, tier)]
    columns = ["forward", "block", "kind", *(f"{tier}: {account}" for tier, account in series)]
    rows = []
    for sample in call["timeline"]:
        sizes = [sample["tiers"].get(tier, {}).get(account, 0) for tier, account in series]
        before = Cell("before") if sample["forward"] < 0 else Cell(str(sample["forward"]), sample["forward"])
        rows.append(
            [
                before,
                Cell(str(sample["block"]), sample["block"]),
                Cell(sample["kind"] or DASH),
                *(Cell(nbytes(size), size) for size in sizes),
            ]
        )
    return Table(name=call["name"], columns=columns, rows=rows)


def _checks(calls: list[dict[str, Any]]) -> list[Table]:
    rows = [
        [
            Cell(call["name"]),
            Cell(f"{check['tier']}: {check['what']}" if "what" in check else check["tier"]),
            Cell(nbytes(check["ledger"]), check["ledger"]),
            Cell(nbytes(check["allocator"]), check["allocator"]),
            Cell(nbytes(check["difference"]), check["difference"]),
            Cell("stays below" if check["allowed"] is None else nbytes(check["allowed"]), check["allowed"]),
            Cell("agrees" if agrees(check) else "differs"),
        ]
        for call in calls
        for check in call["checks"]
    ]
    columns = ("call", "what", "ledger", "allocator", "difference", "allowed", "")
    return [Table(name="Ledger and allocators", columns=columns, rows=rows)] if rows else []


def agrees(check: dict[str, Any]) -> bool:
    """Whether an allocator holds what the ledger says, to what is allowed; or no more, where only that is asked."""
    if check["allowed"] is None:
        return check["allocator"] <= check["ledger"]
    return abs(check["difference"]) <= check["allowed"]


def _notes(calls: list[dict[str, Any]]) -> list[str]:
    checks = [check for call in calls for check in call["checks"]]
    kinds = [
        f"{named(call['name'])}: " + listed([counted(n, kind) for kind in KINDS if (n := _passes(call, kind))])
        for call in calls
        if any(_passes(call, kind) for kind in KINDS)
    ]
    notes = [f"Passes. {'; '.join(kinds)}."] if kinds else []
    if checks:
        good = sum(map(agrees, checks))
        share = (
            max(abs(check["difference"]) / max(1, check["ledger"]) for check in checks if check["allowed"] is not None)
            if any(check["allowed"] is not None for check in checks)
            else None
        )
        far = "" if share is None else f"; where both must agree, they differ by at most {plain(100 * share)} %"
        notes.append(f"Ledger and allocators agree in {good} of {counted(len(checks), 'check')}{far}.")
    return notes


def _passes(call: dict[str, Any], kind: str) -> int:
    return sum(sample["kind"] == kind for sample in call["timeline"])
