"""`tiered generate --watch` as it is run: on a terminal, without one, interrupted, and with a view that fails."""

import errno
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
from typing import Any

import pytest

from tiered.cli.main import main
from tiered.observe.watch.picture import Painter
from tiered.observe.watch.watching import PlainView

ROOT = Path(__file__).parents[1]
CALL = ["generate", "sort: Nora Ben Ivan Cleo", "--max-new-tokens", "32", "--block-length", "8"]
UPDATES = ["--policy", "polestar", "--policy-option", "update_threshold=0"]
ANSWER = "Ben Cleo Ivan Nora\n"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


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
    """The text on the terminal at the end: all that came after the view began anew for the last time."""
    assert told.rindex(HIDE) < told.rindex(SHOW), "the cursor is there again"
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", told[max(told.rfind("\x1b[2K"), 0) :])


@pytest.mark.parametrize("width", [40, 200])
def test_on_a_terminal(
    width: int, terminal: Terminal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    assert terminal.main([*CALL, *UPDATES, "--watch"]) == 0
    assert capsys.readouterr().out == ANSWER
    told = terminal.close()
    assert "denoising" not in told, "no progress bar beside it"
    frame, figures = re.split(r"\n(?=\d+ forwards, )", left_behind(told))
    assert "embedded · polestar"[:width] in frame and " Ben Cleo Ivan Nora∎\n" in frame
    assert "weights" in frame and "streamed" in frame and "tokens/s without the view's time" in figures
    assert 0.8 * min(width, 100) < max(map(len, frame.splitlines())) <= width
    assert re.search(r"\x1b\[[\d;]*3[1-7]m", told)
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.main([*CALL, *UPDATES, "--watch"]) == 0
    codes = {code for run in re.findall(r"\x1b\[([\d;]*)m", terminal.close()) for code in run.split(";")}
    assert codes and codes <= {"", "0", "1", "3", "4"}


def test_at_most_twelve_frames_a_second_on_a_small_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LINES", "8")
    monkeypatch.setenv("COLUMNS", "50")
    began = time.monotonic()
    assert terminal.main([*CALL, "--watch", "--slow", "0.02"]) == 0
    told = terminal.close()
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", told).split("embedded · ")[1:]
    assert all(frame.startswith("none") for frame in drawn), "the policy that was chosen, not `auto`"
    assert 2 <= len(drawn) <= 12 * (time.monotonic() - began) + 3
    assert all(len(frame.split("\n")) <= 8 for frame in drawn[:-1])


@pytest.mark.parametrize("at", ["live", "last"])
def test_a_view_that_fails_ends_with_one_note(
    at: str, terminal: Terminal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    draw = Painter.picture

    def fails(self: Painter, frame: Any, width: int, height: int | None = None):
        if at == "live" or height is None:
            raise ZeroDivisionError("no picture")
        return draw(self, frame, width, height)

    monkeypatch.setattr(Painter, "picture", fails)
    assert terminal.main([*CALL, "--watch"]) == 0
    assert capsys.readouterr().out == ANSWER
    told = terminal.close()
    assert told.count("the view has ended: ZeroDivisionError: no picture") == 1 and "Traceback" not in told
    assert " forwards, " in told and told.rindex(HIDE) < told.rindex(SHOW)


def test_a_warning_meanwhile_is_not_lost(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    draw = Painter.picture

    def chatty(self: Painter, frame: Any, width: int, height: int | None = None):
        print("a warning", file=sys.stderr)
        return draw(self, frame, width, height)

    monkeypatch.setattr(Painter, "picture", chatty)
    assert terminal.main([*CALL, "--watch"]) == 0
    assert "a warning\n" in terminal.close()


def test_a_terminal_needs_the_extra(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert terminal.main([*CALL, "--watch"]) == 2
    (line,) = terminal.close().splitlines()
    assert re.fullmatch(r"tiered: error: rich(\.live)? is not installed: pip install .*\[watch\].*", line)


def test_all_else_needs_no_extra_and_no_compiler():
    lines = (
        "import sys; sys.modules['rich'] = None; sys.path.insert(0, 'bench'); import tiered, demo",
        "from tiered.cli.main import main",
        f"code = main({[*CALL, '--watch']!r})",
        "assert not {'torch._dynamo', 'transformers.models'} & set(sys.modules)",  # which take longer than the answer
        "sys.exit(code)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout == ANSWER, done.stderr
    assert done.stderr.startswith("watch forward=1 ")


def test_without_a_terminal_a_line_for_every_forward(capsys: pytest.CaptureFixture[str]):
    assert main([*CALL, *UPDATES, "--watch", "--slow", "0.05", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["text"] == [ANSWER.strip()] and "\x1b" not in out + err
    *lines, figures = err.splitlines()
    assert [line.split()[1] for line in lines] == [f"forward={n + 1}" for n in range(told["num_forwards"])]
    assert figures.startswith(f"{told['num_forwards']} forwards, ")
    assert told["timings"]["total_s"] > 0.05 * told["num_forwards"]  # waits in it, which the view's rate leaves out
    fields = [dict(word.split("=", 1) for word in line.partition(" text=")[0].split()[1:]) for line in lines]
    kinds = [field["kind"] for field in fields]
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == dict(sorted(told["steps_by_kind"].items()))
    last = fields[-1]
    rate = float(figures.partition(" tokens/s without the view's time, ")[0].split()[-1])
    assert rate == pytest.approx(int(last["tokens"]) / float(last["seconds"]), rel=0.01, abs=0.06)  # both are rounded
    assert float(last["tokens_per_forward"]) == pytest.approx(told["tokens_per_forward"][0], abs=1e-3)
    moved = told["tiers"]["ways"]
    assert 0 < sum(int(field["to_host"]) for field in fields) <= moved["store"]["nbytes"]
    assert json.loads(lines[-1].partition(" text=")[2])[0]


def test_a_plain_view_that_fails_ends_with_one_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no picture")

    monkeypatch.setattr(PlainView, "show", broken)
    assert main([*CALL, "--watch"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER and err.count("the view has ended: ZeroDivisionError: no picture") == 1
    assert "watch forward" not in err and " forwards, " in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slow", "1"], "need --watch"),
        (["--watch-svg", "x.svg"], "need --watch"),
        (["--watch", "--slow", "-1"], "--slow -1"),
        (["--watch", "--slow", "nan"], "--slow nan"),
        (["--watch", "--watch-svg", "no/such/folder/x.svg"], "no folder no/such/folder"),
    ],
)
def test_errors_come_before_work(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([*CALL, *options]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err


def test_an_error_of_the_call_opens_no_view(terminal: Terminal):
    assert terminal.main([*CALL, "--watch", "--memory", "1MiB"]) == 2
    told = terminal.close()
    assert HIDE not in told and "the device tier needs" in told


def test_a_picture_of_the_best_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "watch.svg"
    assert main([*CALL, *UPDATES, "--watch", "--watch-svg", str(file)]) == 0
    assert "polestar" in file.read_text(encoding="utf-8")
    assert main([*CALL, "--watch", "--watch-svg", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ANSWER and f"--watch-svg {file} exists" in err
    monkeypatch.setattr(Painter, "write_svg", fail)
    assert main([*CALL, "--watch", "--watch-svg", str(tmp_path / "other.svg")]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER and "tiered: --watch-svg: [Errno 28] No space left on device" in err


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
    assert left_behind(told).count("embedded · none") <= 1
    assert termios.tcgetattr(ends.theirs) == ends.before
    os.close(ends.ours)
    os.close(ends.theirs)
