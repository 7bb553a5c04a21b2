"""`tiered trace`: the file, the table, and errors before any work."""

import gzip
import json
from pathlib import Path

import pytest

from tiered.cli import trace
from tiered.cli.main import main

PROMPT = "sort: Nora Ben Ivan Cleo"
SHORT = ["--max-new-tokens", "16", "--block-length", "8", "--steps", "8", "--no-stop-at-eos"]


def test_a_trace_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    call = ["trace", PROMPT, *SHORT, "--policy", "polestar", "--policy-option", "update_threshold=0"]
    assert main([*call, "--out", str(tmp_path / "trace.json.gz")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"step", "mlp/L0", "mlp/L4", "clustering/L1", "store/L1", "head", "commit"} <= names
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert "in 8 forwards" in first and head.split() == ["operation", "ms", "share", "device", "ranges"]
    assert any(row.startswith("attention ") for row in rows) and any(row.startswith("copies ") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROMPT, "--out", "trace.txt"], "*.json or *.json.gz"),
        ([PROMPT, "--out", "no/such/folder/trace.json"], "no/such/folder"),
        ([PROMPT, "--out", "folder.json"], "is a folder"),
        ([PROMPT, "--out", "kept.json"], "--out kept.json exists"),
        ([PROMPT, "--out", "trace.json", "--prompt-file", "y"], "pass one of them"),
    ],
)
def test_refused_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("folder.json").mkdir()
    Path("kept.json").write_text("kept")
    monkeypatch.setattr(trace, "load_runtime", lambda args: pytest.fail("a model was loaded"))
    assert main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("tiered: error: ") and message in err
    assert {path.name for path in tmp_path.iterdir()} == {"folder.json", "kept.json"}
    assert Path("kept.json").read_text() == "kept"


def test_the_file_is_asked_for(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["trace", PROMPT])
    assert "--out" in capsys.readouterr().err
