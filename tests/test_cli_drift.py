"""`tiered drift`: the table, the file of figures, and errors."""

import json
from pathlib import Path

import pytest

import tiered
from tiered.cli.main import main
from tiered.observe.analysis.token_drift import measure_token_drift

PROMPT = "sort: Nora Ben Ivan Cleo"
SHORT = ["--max-new-tokens", "32", "--block-length", "8", "--no-stop-at-eos"]


def test_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    policy = ["--policy", "fast_dllm_dual", "--policy-option", "refresh_interval=4"]
    assert (
        main(["drift", PROMPT, *SHORT, *policy, "--steps", "16", "--json", "--out", str(tmp_path / "drift.json")]) == 0
    )
    out, err = capsys.readouterr()
    runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual", refresh_interval=4)
    report = measure_token_drift(
        runtime, [{"role": "user", "content": PROMPT}], max_new_tokens=32, block_length=8, steps=16, stop_at_eos=False
    )
    record = json.loads((tmp_path / "drift.json").read_text())
    # The file says, beside it, what it was made on.
    assert json.loads(out).items() <= record.items() and out.count("\n") == 1 and not err
    assert {name: record[name] for name in report.as_dict()} == report.as_dict()
    assert record["policy_options"] == {"refresh_interval": 4} and record["prompts"] == [PROMPT]
    assert record["options"]["steps"] == 16 and record["device"] == "cpu" and record["torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["drift.json"]


def test_several_prompts_without_a_cache(capsys: pytest.CaptureFixture[str]):
    assert main(["drift", PROMPT, "add 0472+0389", *SHORT, "--policy", "none", "--steps", "4"]) == 0
    figures = [line.split()[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("layer")]
    assert figures and all(float(figure) <= 1e-6 for line in figures for figure in line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROMPT, "--out", "no/such/folder/file.json"], "no/such/folder"),
        ([PROMPT, "--policy", "polestar", "--policy-option", "refresh_interval=0"], "refresh_interval = 0"),
        ([PROMPT, "--memory", "1MiB"], "the device tier needs"),
        ([PROMPT, "--prompt-file", "y"], "not both"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["drift", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("tiered: error: ") and message in err
