"""`tiered generate`: answers, JSON in their place, errors, and output for terminals alone."""

import io
import json
import os
import pty
import re
import sys
import termios
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import tiered
from tiered.cli.main import build_parser, main
from tiered.cli.option_flags import generation_options
from tiered.decoding.rules.registry import COMMIT_OPTIONS, COMMIT_RULES
from tiered.options import OPTION_NAMES, GenerationOptions

SHORT = ["--max-new-tokens", "32"]


def test_answers_and_json(capsys: pytest.CaptureFixture[str]):
    call = ["generate", "sort: Nora Ben Ivan Cleo", "add 0472+0389", *SHORT, "--policy", "none"]
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert out == "Ben Cleo Ivan Nora\n0861\n" and err.startswith("32 forwards, ")
    assert main([*call, "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["text"] == ["Ben Cleo Ivan Nora", "0861"]
    assert record["num_forwards"] == 32 and record["policy"] == "none" and record["options"]["max_new_tokens"] == 32
    assert record["memory"]["tiers"]["device"]["peak"] > record["memory"]["tiers"]["device"]["current"] > 0
    assert err.startswith("32 forwards, ")


def test_prompts_from_a_file_and_from_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Other characters that end a line of text, such as U+2028, stand within a prompt.
    (tmp_path / "prompts.txt").write_text("sort: Max\u2028Ada\n\nsort: Zoe Ben\r\n", encoding="utf-8")
    assert main(["generate", "--prompt-file", str(tmp_path / "prompts.txt"), *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max", "Ben Zoe"]
    monkeypatch.setattr("sys.stdin", io.StringIO("sort: Max Ada\n"))
    assert main(["generate", *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max"]


def test_a_warning_is_printed_without_its_line_of_code(monkeypatch: pytest.MonkeyPatch):
    formatted: list[str] = []

    def load(*_: Any, **__: Any) -> None:
        formatted.append(warnings.formatwarning("bytes move", UserWarning, "file.py", 7, "code"))
        raise ValueError("nothing is loaded")

    before = warnings.formatwarning
    monkeypatch.setattr("tiered.cli.generate.load_runtime", load)
    assert main(["generate", "x"]) == 2
    assert formatted == ["tiered: warning: bytes move\n"] and warnings.formatwarning is before


def test_a_prompt_means_what_a_string_means_to_the_library(capsys: pytest.CaptureFixture[str]):
    runtime = tiered.from_pretrained("embedded")
    for prompt, raw in (("sort: Max Ada", []), ("<|user|>sort: Max Ada<|assistant|>", ["--raw"])):
        assert main(["generate", *raw, prompt, *SHORT]) == 0
        assert capsys.readouterr().out == "Ada Max\n"
        assert runtime.generate(prompt, raw=bool(raw), max_new_tokens=32).text == ["Ada Max"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--max-new-tokens", "20", "--block-length", "8"], "16 or 24 would be"),
        (["x", "--policy", "fast_dllm_duel"], "did you mean 'fast_dllm_dual'"),
        (["x", "--policy", "polestar", "--policy-option", "refresh_blocks=0"], "refresh_blocks = 0"),
        (["x", "--policy-option", "refresh_interval"], "NAME=VALUE"),
        (["x", "--policy-option", "memory=5MiB"], "is no option of a policy; use --memory"),
        (["x", "--policy", "polestar", "--policy-option", "clusters=" + "[" * 100_000], "clusters = '[[["),
        (
            ["x", "--editing-threshold", "0.9"],
            "which takes editing_threshold, also needs confidence_threshold",
        ),
        (["x", "--weights", "int5"], "did you mean 'int8'?"),
        (["x", "--watch", "--watch-svg", "/"], "--watch-svg / is a folder"),
        (["x", "--model", "no/such-model"], "hf download no/such-model"),
        (["x", "--memory", "1MiB"], "the device tier needs"),
        (["x", "--prompt-file", "y"], "pass one of them"),
        (["--prompt-file", "no-such-file"], "no-such-file"),
        (["x", "--temperature", "nan"], "temperature = nan"),
        (["sort: Max Ada", ""], "prompt 1 is empty: ''"),
        (["x", "--gen-length", "32", "--max-new-tokens", "64"], "gen_length = 32 contradicts max_new_tokens = 64"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("tiered: error: ") and message in err


def test_bytes_that_are_no_text_and_streams_that_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "prompts"
    path.write_bytes(b"sort: \xff")
    assert main(["generate", "--prompt-file", str(path)]) == 2
    assert f"{path} is not text: 'utf-8'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate"]) == 2
    assert "no prompt; give one" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "x"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for module in ("app", "server"):
        monkeypatch.delitem(sys.modules, f"tiered.serving.{module}", raising=False)
    assert main(["serve", "embedded"]) == 2
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(r"tiered: error: fastapi is not installed: pip install .*\[serve\].*\n", err)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["generate", "x", "--fcator=2"], "unrecognized argument: --fcator=2; did you mean --factor?"),
        (["plan", "embedded", "--context", "64", "--polcy", "none"], "--polcy; did you mean --policy?"),
        (["generate", "x", "--zzz"], "unrecognized arguments: --zzz"),
        (["serve", "embedded", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["plan", "embedded"], "the following arguments are required: --context"),
    ],
)
def test_a_wrong_flag_is_one_line(line: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(line)
    err = capsys.readouterr().err
    assert err.startswith(f"tiered {line[0]}: error: ") and err.endswith(f" (help: tiered {line[0]} --help)\n")
    assert message in err and err.count("\n") == 1


# A value of each option that a command line carries. Ending at the end-of-sequence token is switched by name; a history
# is tensors, for callers alone.
VALUES: dict[str, Any] = {
    name: next((value for kind, value in ((int, 3), (float, 0.75)) if kind in (hint, *get_args(hint))), "word")
    for name, hint in get_type_hints(GenerationOptions).items()
    if name not in ("stop_at_eos", "eos_early_stop", "output_history")
}


def test_every_option_has_a_flag():
    assert VALUES["correction_steps"] == 3 and VALUES["factor"] == 0.75 and len(VALUES) == len(OPTION_NAMES) - 3
    flags = [word for name, value in VALUES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    switches = ["--no-stop-at-eos", "--no-eos-early-stop"]
    given = generation_options(build_parser().parse_args(["generate", "x", *flags, *switches]))
    expected = {**VALUES, "stop_at_eos": False, "eos_early_stop": False}
    assert given == expected
    assert {name: type(value) for name, value in given.items()} == {
        name: type(value) for name, value in expected.items()
    }
    # Without flags the library's defaults hold.
    plain = generation_options(build_parser().parse_args(["generate", "x"]))
    assert GenerationOptions(**plain) == GenerationOptions()


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (
            "--gen-length 64 --block_size 16 --threshold 0.5",
            {"max_new_tokens": 64, "block_length": 16, "confidence_threshold": 0.5},
        ),
        ("--alg entropy --eps 0.01", {"commit": "timestep", "confidence": "entropy", "schedule_floor": 0.01}),
        (
            "--sampling-method adaptive --max-length 64 --steps 8",
            {"commit": "adaptive", "max_new_tokens": 64, "block_steps": 8},
        ),
    ],
)
def test_official_names_are_flags(line: str, meant: dict[str, Any]):
    given = generation_options(build_parser().parse_args(["generate", "x", *line.split()]))
    assert given == {"stop_at_eos": True, **meant}


def test_help_names_every_commit_rule(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    rules = told.partition("--commit COMMIT commit rule")[2].partition("--")[0]
    assert all(name in rules for name in COMMIT_RULES)
    first, own, of_rules = re.split("options of generate:|options of commit rules:", told)
    assert first.startswith("usage: tiered generate [PROMPT ...] [OPTION ...] Answer")
    common = ("--model", "--memory", "--device", "--policy", "--max-new-tokens", "--watch", "--confidence-threshold")
    assert all(f"{flag} " in first.partition("memory below the device:")[0] for flag in common)
    assert all(f"--{name.replace('_', '-')} {name.upper()} under " in first + of_rules for name in COMMIT_OPTIONS)
    assert "--max-new-tokens MAX_NEW_TOKENS tokens of the answer; a multiple of `block_length` (default: 128)" in first
    assert "--seed" not in own and "under drift_aware: confidence above which a rise lets" in of_rules
    rules = "threshold, quota, drift_aware, joint_threshold"
    assert f"under {rules}: least confidence of a candidate that passes; in [0, 1] memory" in first


def test_uniform_noise(capsys: pytest.CaptureFixture[str]):
    rule = ["--block-steps", "4", "--tokens-per-step", "8", "--trailing-noise", "8", "--seed", "5", "--json"]
    assert main(["generate", "--raw", "x", "--model", "embedded-uniform", "--policy", "none", *SHORT, *rule]) == 0
    told = json.loads(capsys.readouterr().out)
    runtime = tiered.from_pretrained("embedded-uniform", policy="none")
    options: dict[str, Any] = {"max_new_tokens": 32, "block_steps": 4, "tokens_per_step": 8, "trailing_noise": 8}
    out = runtime.generate("x", raw=True, seed=5, **options)
    assert told["text"] == out.text and told["num_forwards"] == out.num_forwards


def test_progress_is_shown_on_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    call = ["generate", "sort: Max Ada", *SHORT]
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert out == "Ada Max\n" and "denoising" not in err
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", terminal)
        assert main(call) == 0
    assert capsys.readouterr().out == "Ada Max\n"
    assert b"denoising" in os.read(ours, 65536)
    os.close(ours)
