"""`tiered generate --watch` as it is run: on a terminal, without one, interrupted, and with a view that fails."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path

import pytest

from tiered.cli.main import main
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.tokens import TokenWriter

CALL = ["generate", "sort: Nora Ben Ivan Cleo", "--max-new-tokens", "32", "--block-length", "8"]
UPDATES = ["--policy", "polestar", "--policy-option", "update_threshold=0"]
ANSWER = "Ben Cleo Ivan Nora\n"
ALT, MAIN, HIDE, SHOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """The far end of a pseudo-terminal, and all that was written to it."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        self._parts: list[bytes] = []
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self.ours], [], [], 0.05)
            if ready:
                with suppress(OSError):
                    self._parts.append(os.read(self.ours, 65536))
            elif self._over.is_set():
                return

    @property
    def text(self) -> str:
        return b"".join(self._parts).decode().replace("\r\n", "\n")

    def main(self, command: list[str]) -> int:
        """Run a command of ours whose standard error this is."""
        with open(self.theirs, "w", encoding="utf-8", closefd=False) as stream, redirect_stderr(stream):
            return main(command)

    def close(self) -> str:
        """All of it."""
        time.sleep(0.1)
        self._over.set()
        self._reader.join()
        return self.text


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """One of 80 × 24 that knows colours."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    ends = Terminal()
    yield ends
    ends.close()
    os.close(ends.ours)
    os.close(ends.theirs)


def left_behind(told: str) -> str:
    """What a terminal shows when all is over: the screen of the view is gone."""
    assert told.count(ALT) == told.count(MAIN) == 1 and told.index(ALT) < told.index(MAIN)
    assert told.rindex(HIDE) < told.rindex(SHOW), "the cursor is there again"
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", told[told.index(MAIN) :])


def columns(told: str) -> list[int]:
    return [len(line) for line in told.splitlines()]


@pytest.mark.parametrize("width", [40, 200])
def test_on_a_terminal(
    width: int, terminal: Terminal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    assert terminal.main([*CALL, *UPDATES, "--watch"]) == 0
    assert capsys.readouterr().out == ANSWER
    told = terminal.close()
    rest = left_behind(told)
    assert "denoising" not in told[told.index(ALT) :], "no progress bar beside it"
    frame = re.split(r"\n\d+ forwards, ", rest)[0]
    assert " Ben Cleo Ivan Nora∎" in frame and "weights" in frame and "streamed" in frame
    assert max(columns(frame)) <= width
    assert max(columns(frame)) > 0.8 * min(width, 100)
    assert told.count("\x1b[?2026h") == told.count("\x1b[?2026l") >= 1
    assert re.search(r"\x1b\[[\d;]*3[1-7]m", told)
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.main([*CALL, *UPDATES, "--watch"]) == 0
    told = terminal.close()
    codes = {code for run in re.findall(r"\x1b\[([\d;]*)m", told) for code in run.split(";")}
    assert codes and codes <= {"", "0", "1", "3"}


def test_frames_fit_a_small_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LINES", "8")
    monkeypatch.setenv("COLUMNS", "30")
    assert terminal.main([*CALL, "--watch", "--slow", "0.02"]) == 0
    told = terminal.close()
    drawn = re.findall(r"\x1b\[\?2026h(.*?)\x1b\[\?2026l", told, re.DOTALL)
    assert "embedded · none" in drawn[0], "the policy that was chosen, not `auto`"
    for frame in drawn:
        lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", frame).split("\n")
        assert len(lines) <= 8 and max(map(len, lines)) <= 30
    left_behind(told)


def test_at_most_twelve_frames_a_second_and_the_last_is_shown(terminal: Terminal):
    assert terminal.main([*CALL, "--policy", "polestar", "--watch"]) == 0
    told = terminal.close()
    drawn = told.count("\x1b[?2026h")
    seconds = float(re.findall(r"00:(\d\d\.\d)", left_behind(told))[-1])
    assert drawn <= 12 * (seconds + 1) + 2
    assert re.search(r"forward \d+ step", left_behind(told))


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("no picture")


@pytest.mark.parametrize("how", ["picture", "last"])
def test_a_view_that_fails_ends_with_one_note(
    how: str, terminal: Terminal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    draw = Painter.picture

    def fails(self: Painter, past: tuple, width: int, height: int | None = None):
        if how == "picture" or height is None:
            raise ZeroDivisionError("no picture")
        return draw(self, past, width, height)

    monkeypatch.setattr(Painter, "picture", fails)
    assert terminal.main([*CALL, "--watch"]) == 0
    assert capsys.readouterr().out == ANSWER
    rest = left_behind(terminal.close())
    assert rest.count("ZeroDivisionError: no picture") == 1 and "Traceback" not in rest
    assert " forwards, " in rest


def test_what_others_say_meanwhile_comes_afterwards(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    draw = Painter.picture

    def chatty(self: Painter, past: tuple, width: int, height: int | None = None):
        if height is not None:
            print("a warning of somebody's", file=sys.stderr)
        return draw(self, past, width, height)

    monkeypatch.setattr(Painter, "picture", chatty)
    assert terminal.main([*CALL, "--watch"]) == 0
    told = terminal.close()
    assert "a warning" not in told[: told.index(MAIN)] and "a warning" in told[told.index(MAIN) :]


def test_without_a_terminal_a_line_for_every_forward(capsys: pytest.CaptureFixture[str]):
    assert main([*CALL, *UPDATES, "--watch", "--slow", "0.05", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["text"] == [ANSWER.strip()] and "\x1b" not in out + err
    *lines, last, figures = err.splitlines()
    assert [line.split()[1] for line in lines] == [f"forward={n + 1}" for n in range(told["num_forwards"])]
    assert figures.startswith(f"{told['num_forwards']} forwards, ") and last.startswith("watch end ")
    assert told["timings"]["total_s"] > 0.05 * told["num_forwards"]  # waits in it, which the view's rate leaves out
    fields = [dict(word.split("=", 1) for word in line.partition(" text=")[0].split()[1:]) for line in lines]
    kinds = [field["kind"] for field in fields]
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == dict(sorted(told["passes"].items()))
    final = dict(word.split("=", 1) for word in last.split()[2:])
    assert int(final["device_peak"]) == told["memory"]["tiers"]["device"]["peak"]
    rate = float(figures.partition(" tokens/s without the view's time, ")[0].split()[-1])
    assert rate == pytest.approx(int(final["tokens"]) / float(final["seconds"]), rel=0.01)  # both are rounded
    assert float(final["tokens_per_forward"]) == pytest.approx(told["tokens_per_forward"][0], abs=1e-3)
    assert sum(int(field["to_host"]) for field in fields) == int(final["to_host"]) > 0
    assert json.loads(lines[-1].partition(" text=")[2])[0]


def test_a_plain_view_that_fails_ends_with_one_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(TokenWriter, "plain", broken)
    assert main([*CALL, "--watch"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER and err.count("the view has ended: ZeroDivisionError: no picture") == 1
    assert "watch forward" not in err and " forwards, " in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slow", "1"], "go with --watch"),
        (["--watch-svg", "x.svg"], "go with --watch"),
        (["--watch", "--slow", "-1"], "--slow -1"),
        (["--watch", "--slow", "nan"], "--slow nan"),
        (["--watch", "--watch-svg", "no/such/folder/x.svg"], "no folder no/such/folder"),
    ],
)
def test_errors_come_before_work(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*CALL, *options]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err


def test_an_error_of_the_call_is_told_on_the_main_screen(terminal: Terminal):
    assert terminal.main([*CALL, "--watch", "--memory", "1MiB"]) == 2
    told = terminal.close()
    assert ALT not in told and "the device tier needs" in told


def test_a_picture_of_the_best_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "watch.svg"
    assert main([*CALL, *UPDATES, "--watch", "--watch-svg", str(file)]) == 0
    assert "polestar" in file.read_text(encoding="utf-8")
    file.unlink()
    file.mkdir()  # nothing can be written there
    assert main([*CALL, "--watch", "--watch-svg", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == 2 * ANSWER and "tiered: --watch-svg: " in err


def run_in_terminal(command: list[str], until: Callable[[str], bool], then: bytes) -> tuple[int, Terminal]:
    """Run `command` in a session whose terminal is all it has; type `then` once `until` is true of what it shows."""
    ends = Terminal()

    def own_terminal() -> None:
        import fcntl

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background have it ignored

    process = subprocess.Popen(
        command, stdin=ends.theirs, stdout=ends.theirs, stderr=ends.theirs, preexec_fn=own_terminal,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not until(ends.text) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.write(ends.ours, then)
    try:
        return process.wait(timeout=60), ends
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_gives_the_terminal_back():
    command = [sys.executable, "-m", "tiered", *CALL, "--watch", "--slow", "0.2"]
    status, ends = run_in_terminal(command, lambda told: "forward 3" in told, b"\x03")
    told = ends.close()
    assert status == 130
    assert "Traceback" not in told
    assert left_behind(told).replace("^C", "").strip() == ""
    assert termios.tcgetattr(ends.theirs) == ends.before
    os.close(ends.ours)
    os.close(ends.theirs)
