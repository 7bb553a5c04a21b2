"""A plugin of pytest: a line of JSON in a file for every test that begins and that ends. It imports no torch."""

import json
from pathlib import Path
from typing import Any

_LONGEST_WHY = 400


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcome-notes", default=None, help="file that gets a line of JSON for each event of a test")


def pytest_configure(config: Any) -> None:
    """One process writes: the first of several, which gets the reports of all tests."""
    path = config.getoption("--outcome-notes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes(Path(path)))


class _Notes:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(json.dumps({"what": "begun", "test": nodeid}) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A skipped test, or one whose set-up fails, ends in its set-up; a clean-up that fails comes late.
        if report.when == "call" or report.outcome != "passed":
            self._ended(report, report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._ended(report, 0.0)

    def _ended(self, report: Any, seconds: float) -> None:
        why = report.longreprtext.strip()[-_LONGEST_WHY:] if report.failed else ""
        note = {"what": "ended", "test": report.nodeid, "outcome": report.outcome, "seconds": seconds, "why": why}
        self._file.write(json.dumps(note) + "\n")
