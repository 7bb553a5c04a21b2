"""`tiered generate`: answers, JSON on the last line, errors, and a progress bar for terminals only."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tiered.cli.main import main

SHORT = ["--max-new-tokens", "32"]


def test_answers_and_json(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "sort: Nora Ben Ivan Cleo", "add 0472+0389", *SHORT, "--policy", "none", "--json"]) == 0
    out, err = capsys.readouterr()
    first, second, last = out.splitlines()
    assert (first, second) == ("Ben Cleo Ivan Nora", "0861")
    record = json.loads(last)
    assert record["text"] == [first, second]
    assert record["num_forwards"] == 32 and record["policy"] == "none"
    assert record["memory"]["tiers"]["device"]["peak"] > record["memory"]["tiers"]["device"]["current"] > 0
    assert err.startswith("32 forwards, ")


def test_prompts_from_a_file_and_from_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "prompts.txt").write_text("sort: Max Ada\n\nsort: Zoe Ben\n")
    assert main(["generate", "--prompt-file", str(tmp_path / "prompts.txt"), *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max", "Ben Zoe"]
    monkeypatch.setattr("sys.stdin", io.StringIO("sort: Max Ada\n"))
    assert main(["generate", *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max"]


def test_raw_leaves_the_chat_template_out(capsys: pytest.CaptureFixture[str]):
    templated = "<|user|>sort: Max Ada<|assistant|>"
    assert main(["generate", "--raw", templated, *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--max-new-tokens", "20", "--block-length", "8"], "16 or 24 would be"),
        (["x", "--policy", "fast_dllm_duel"], "did you mean 'fast_dllm_dual'"),
        (["x", "--policy-option", "refresh_interval=0"], "refresh_interval = 0"),
        (["x", "--policy-option", "refresh_interval"], "NAME=VALUE"),
        (["x", "--model", "no/such-model"], "hf download no/such-model"),
        (["x", "--memory", "1MiB"], "the device tier needs"),
        (["x", "--prompt-file", "y"], "not both"),
        (["--prompt-file", "no-such-file"], "no-such-file"),
        (["x", "--temperature", "nan"], "temperature = nan"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("tiered: error: ") and message in err


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_and_nowhere_else():
    command = [sys.executable, "-m", "tiered", "generate", "sort: Max Ada", *SHORT]
    quiet = subprocess.run(command, capture_output=True, text=True, check=True)
    assert quiet.stdout == "Ada Max\n" and "denoising" not in quiet.stderr
    ours, theirs = pty.openpty()
    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    assert shown.returncode == 0 and shown.stdout == b"Ada Max\n"
    assert b"denoising" in os.read(ours, 65536)
    os.close(ours)
