"""Reads what compute-sanitizer and the program under it have said, and makes a row of it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DONE = "sanitized: "  # what the program's last line begins with; JSON follows
ERROR_STATUS = 99  # the tool's exit status where it found something and the program itself ended well
PREFIX = "========="
_REFUSALS = re.compile(
    r"not supported|unable to|failed to (?:initiali[sz]e|load|connect|inject|attach)|internal sanitizer error"
    r"|unrecognised option|unrecognized option|invalid option",
    re.IGNORECASE,
)
_SUMMARY = re.compile(
    r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: \d+ hazards? displayed \()(?P<errors>\d+) errors?"
    r"(?:, (?P<warnings>\d+) warnings?)?"
)
_BLOCKS, _BLOCK_LINES = 4, 6  # of findings, that a row keeps
_TAIL = 8  # lines of the program's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over.

    Attributes:
        text: what it said, the tool's lines among the program's.
        status: exit status; None where it was killed, because it took longer than its `limit`.
        seconds, limit: how long it took and might have taken.
    """

    text: str
    status: int | None
    seconds: float
    limit: float

    @property
    def late(self) -> bool:
        """Whether it was stopped, or has stopped itself, because of its limit."""
        return self.status is None or re.search(r"^Timeout \(\d", self.text, re.MULTILINE) is not None


def row_of(tool: str | None, ended: Ended) -> dict[str, Any]:
    """The row of a run. `ok` where the program ended well with every answer right and `tool` (None: it ran without
    one) found nothing; what was found under `errors`. A tool that refuses, or gives no verdict in time, is skipped.

    Raises:
        RuntimeError: the program failed by itself, or the tool said nothing that is a verdict.
    """
    tools, own = _parted(ended.text)
    ran = _last_words(own)
    row: dict[str, Any] = {"run_s": round(ended.seconds, 1)}
    summed_up = tool is None
    if tool is not None:
        verdict = _verdict(tools)
        summed_up = verdict.summed_up
        row |= {"errors": verdict.errors, "warnings": verdict.warnings, "found": verdict.found}
        if verdict.errors:
            row |= {"ok": False, "why": f"{tool}: {verdict.errors} errors"}
            return row if ran else row | {"tail": own[-_TAIL:]}
        refusal = next((line for line in tools if _REFUSALS.search(line)), None)
        if refusal is not None and (ran is None or not summed_up):
            return {"skipped": f"{tool}: {refusal}", "tail": own[-_TAIL:]}
        if ended.late:
            return {"skipped": f"{tool}: no verdict in {ended.limit:.0f} s", "tail": own[-_TAIL:]}
    if ended.late:
        raise RuntimeError(f"did not end in {ended.limit:.0f} s: {_told(own)}")
    if ran is None:
        raise RuntimeError(f"the program ended with status {ended.status}: {_told(own)}")
    row |= {name: value for name, value in ran.items() if name != "wrong"}
    if ran["wrong"]:
        return row | {"ok": False, "why": "; ".join(ran["wrong"][:_BLOCKS])}
    if ended.status != 0:
        raise RuntimeError(f"exit status {ended.status} though the program ended well: {_told(tools or own)}")
    if not summed_up:
        raise RuntimeError(f"{tool} gave no summary: {_told(tools)}")
    return row | {"ok": True}


def _parted(text: str) -> tuple[list[str], list[str]]:
    """The tool's lines without their prefix, and the program's own that are not empty."""
    tools, own = [], []
    for line in text.splitlines():
        if line.startswith(PREFIX):
            tools.append(line.removeprefix(PREFIX).removeprefix(" ").rstrip())
        elif line.strip():
            own.append(line.rstrip())
    return tools, own


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the tool counted, or, where it was stopped before, as many errors as it had told; the first findings."""

    errors: int
    warnings: int
    found: list[list[str]]
    summed_up: bool


def _verdict(lines: Sequence[str]) -> _Verdict:
    """A finding is a line with indented ones below it."""
    blocks: list[list[str]] = []
    for line in lines:
        if line.startswith(" "):
            if blocks and "Host Frame" not in line and "host backtrace" not in line:
                blocks[-1].append(line.strip())
        else:
            blocks.append([line])
    findings = [block for block in blocks if len(block) > 1]
    found = [block[:_BLOCK_LINES] for block in findings[:_BLOCKS]]
    sums = [(int(match["errors"]), int(match["warnings"] or 0)) for line in lines if (match := _SUMMARY.search(line))]
    # The largest: behind it may stand how many of them were not printed.
    errors, warnings = max(sums, default=(len(findings), 0))
    return _Verdict(errors, warnings, found, bool(sums))


def _last_words(own: Sequence[str]) -> dict[str, Any] | None:
    """What the program says it ran; None where it did not get to its end."""
    said = next((line for line in reversed(own) if line.startswith(DONE)), None)
    return None if said is None else json.loads(said.removeprefix(DONE))


def _told(lines: Sequence[str]) -> str:
    return " | ".join(lines[-_TAIL:]) or "it said nothing"
