"""A plugin of pytest: one line of JSON in a file for every test that begins, and for every one that ends."""

import json
from pathlib import Path
from typing import Any

import pytest

_LONGEST_WHY = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file's name."""
    parser.addoption("--outcome-notes", default=None, help="file that gets a line of JSON for each event of a test")


def pytest_configure(config: pytest.Config) -> None:
    """One writer: of several processes only the first, which hears of all tests."""
    path = config.getoption("--outcome-notes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes(Path(path)))


class _Notes:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(what="begun", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # One that was skipped ends in its set-up; so does one whose set-up fails, and a failing clean-up comes late.
        if report.when == "call" or report.outcome != "passed":
            self._note(
                what="ended",
                test=report.nodeid,
                outcome=report.outcome,
                seconds=report.duration,
                why=report.longreprtext.strip()[-_LONGEST_WHY:] if report.failed else "",
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            why = report.longreprtext.strip()[-_LONGEST_WHY:]
            self._note(what="ended", test=report.nodeid, outcome="failed", seconds=0.0, why=why)

    def pytest_sessionfinish(self) -> None:
        self._file.close()

    def _note(self, **note: Any) -> None:
        self._file.write(json.dumps(note) + "\n")
