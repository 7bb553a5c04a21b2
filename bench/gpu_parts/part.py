"""Books: the parts of a GPU day, in order, and the time that each may take."""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast


class PartModule(Protocol):
    """The module of a part. Both functions run in the part's process; what one case has made may serve the next."""

    def cases(self, setting: Any) -> list[str]:
        """Names of what is measured, in order. Cheap: no kernel is started."""
        ...

    def measure(self, setting: Any, case: str) -> dict[str, Any]:
        """The row of one case: plain types for JSON, without the name. `"ok": False` with a `"why"` where what was
        measured is wrong; `"skipped": why` where it cannot be measured on this machine. What it raises is the row of
        a failure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        name: also of its module in this folder.
        seconds: that it may take; what it leaves over is added to the next part's.
        case_seconds: that one case may take.
        what: one line for people.
    """

    name: str
    seconds: float
    case_seconds: float
    what: str

    def module(self) -> PartModule:
        """Imported on demand: it brings torch."""
        return cast(PartModule, importlib.import_module(f"gpu_parts.{self.name}"))


# What others rest on comes first: a wrong kernel makes every later figure worthless.
PARTS = (
    Part(name="machine", seconds=10, case_seconds=10, what="the device, the versions, what is not installed"),
    # Before the tests, which find its kernels compiled: Triton keeps them.
    Part(name="kernels", seconds=55, case_seconds=30, what="every kernel against higher precision"),
    Part(name="gpu_tests", seconds=150, case_seconds=150, what="the tests marked gpu"),
    Part(name="sanitizer", seconds=110, case_seconds=90, what="memcheck and racecheck over a small run"),
    Part(name="copies", seconds=10, case_seconds=10, what="copy peaks by kind of host memory"),
    Part(name="fetches", seconds=15, case_seconds=15, what="fetches by record size and route"),
    Part(name="floors", seconds=20, case_seconds=15, what="kernels against the time of their bytes"),
    Part(name="exactness", seconds=25, case_seconds=20, what="offloaded against resident, bit for bit"),
    Part(name="steps", seconds=85, case_seconds=45, what="LLaDA-8B's shape, by policy and context"),
    Part(name="budget", seconds=40, case_seconds=30, what="the longest context under a cap"),
    Part(name="profile", seconds=20, case_seconds=30, what="launches, waits of the host, a trace"),
)


def part_named(name: str) -> Part:
    """Raises `ValueError` with the nearest name where there is none such."""
    for part in PARTS:
        if part.name == name:
            return part
    from tiered.core.checks import unknown_name

    raise unknown_name("part", name, [part.name for part in PARTS])
