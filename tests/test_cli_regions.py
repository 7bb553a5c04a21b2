"""`tiered regions`: both tables, the file of figures, the policy it runs under, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiered
from tiered.cli.main import main
from tiered.observe.analysis.regions_report import measure_regions

PROMPT = "sort: Nora Ben Ivan Cleo"
SHORT = ["--max-new-tokens", "32", "--block-length", "8", "--no-stop-at-eos"]
# A rule by which a cache changes tokens.
FAST = ["--confidence-threshold", "0.3"]


@pytest.mark.parametrize("policy", [[], ["--policy", "fast_dllm_dual", "--policy-option", "refresh_interval=3"]])
def test_tables_and_file(policy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["regions", PROMPT, *SHORT, *FAST, *policy, "--out", str(tmp_path / "regions.json")]) == 0
    out, err = capsys.readouterr()
    options: dict[str, Any] = {"refresh_interval": 3} if policy else {}
    runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual" if policy else "none", **options)
    chat = [{"role": "user", "content": PROMPT}]
    report = measure_regions(
        runtime, chat, max_new_tokens=32, block_length=8, confidence_threshold=0.3, stop_at_eos=False
    )
    record = json.loads((tmp_path / "regions.json").read_text())
    assert out == f"{report}\n" and not err
    assert {name: record[name] for name in report.as_dict()} == report.as_dict()
    assert record["policy"] == runtime.policy.name and record["policy_options"] == options
    assert record["prompts"] == [PROMPT] and record["options"]["confidence_threshold"] == 0.3
    assert record["device"] == "cpu" and record["torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["regions.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROMPT, "--out", "no/such/folder/file.json"], "no/such/folder"),
        ([PROMPT, "--memory", "1MiB"], "the device tier needs"),
        ([PROMPT, "--prompt-file", "y"], "not both"),
        ([PROMPT, "--trailing-noise", "-1"], "trailing_noise = -1"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["regions", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("tiered: error: ") and message in err
