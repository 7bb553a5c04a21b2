"""`tiered generate`: answers, JSON in their place, errors, and what a terminal alone is shown."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiered
from tiered.cli.generate import generation_options
from tiered.cli.main import build_parser, main
from tiered.options import COMMIT_NAMES, OPTION_NAMES, GenerationOptions

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
    (tmp_path / "prompts.txt").write_text("sort: Max Ada\n\nsort: Zoe Ben\n")
    assert main(["generate", "--prompt-file", str(tmp_path / "prompts.txt"), *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max", "Ben Zoe"]
    monkeypatch.setattr("sys.stdin", io.StringIO("sort: Max Ada\n"))
    assert main(["generate", *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == ["Ada Max"]


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
        (["x", "--policy-option", "refresh_interval=0"], "refresh_interval = 0"),
        (["x", "--policy-option", "refresh_interval"], "NAME=VALUE"),
        (["x", "--model", "no/such-model"], "hf download no/such-model"),
        (["x", "--memory", "1MiB"], "the device tier needs"),
        (["x", "--prompt-file", "y"], "not both"),
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


# A value of each option that a command line carries, that is not its default.
VALUES: dict[str, Any] = {
    "max_new_tokens": 64, "block_length": 16, "steps": 8, "commit": "threshold", "confidence_threshold": 0.5,
    "factor": 1.5, "early_threshold": 0.6, "drift_window": 3, "drift_slope": 2.5, "drift_ceiling": 1.5,
    "schedule_floor": 0.01, "confidence_temperature": 0.25, "confidence": "margin", "remasking": "random",
    "temperature": 0.75, "top_p": 0.5, "top_k": 7, "tokens_per_step": 2, "noise_schedule": "linear", "block_steps": 4,
    "correction_steps": 3, "min_new_tokens": 5, "trailing_noise": 6, "cfg_scale": 1.25, "seed": 9,
}  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "drift", "regions"])
def test_every_option_has_a_flag(command: str):
    # Ending at the end-of-sequence token is switched off by name; a history is tensors, for callers alone.
    assert {*VALUES, "stop_at_eos", "output_history"} == set(OPTION_NAMES)
    flags = [word for name, value in VALUES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    given = generation_options(build_parser().parse_args([command, "x", *flags, "--no-stop-at-eos"]))
    assert given == {**VALUES, "stop_at_eos": False}
    assert {name: type(value) for name, value in given.items()} == {
        name: type(value) for name, value in {**VALUES, "stop_at_eos": False}.items()
    }
    # Without flags the library's defaults hold.
    plain = generation_options(build_parser().parse_args([command, "x"]))
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
    told = capsys.readouterr().out.partition("commit rule: ")[2].partition("--")[0]
    assert all(name in told for name in COMMIT_NAMES)


def test_uniform_noise(capsys: pytest.CaptureFixture[str]):
    rule = ["--block-steps", "4", "--tokens-per-step", "8", "--trailing-noise", "8", "--seed", "5", "--json"]
    assert main(["generate", "--raw", "x", "--model", "embedded-uniform", "--policy", "none", *SHORT, *rule]) == 0
    told = json.loads(capsys.readouterr().out)
    runtime = tiered.from_pretrained("embedded-uniform", policy="none")
    options: dict[str, Any] = {"max_new_tokens": 32, "block_steps": 4, "tokens_per_step": 8, "trailing_noise": 8}
    out = runtime.generate("x", raw=True, seed=5, **options)
    assert told["text"] == out.text and told["num_forwards"] == out.num_forwards


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
