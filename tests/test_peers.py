"""The peers study: its implementations, its rows, and the way to official code. Stand-ins with the functions of
official checkouts are written here; none of their code is."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import measure
import pytest
import torch
from baselines import parity
from baselines.asked import PeerError
from baselines.matches import MATCHES, RULES
from baselines.official import IMPLEMENTATIONS, Official, commit_of, located
from baselines.official_worker import Implementations
from measuring.study import points_of, study_named
from measuring.worker import RefusedError
from workloads import matches
from workloads.models import save_random

from tiered.policies.registry import make_policy

peers = study_named("peers")
COMMON = {"device": "cpu", "threads": 1, "seed": 0}
TINY = {"prompt": [70], "answer": [8], "block": [4], "width": [64], "layers": [1], "examples": ["add:1"]}
WITHOUT = {"paths": {"embedded": "embedded"}, "official": {"code": None, "python": None}}
# The parts of a checkout of Fast-dLLM that are called: it answers with the block's length, or fails.
FAST = dedent(
    """
    import torch

    class LLaDAModelLM(torch.nn.Module):
        @classmethod
        def from_pretrained(cls, path, torch_dtype):
            return cls()

        def forward(self, ids):
            return ids

    def generate_with_dual_cache(model, ids, *, steps, gen_length, block_length, mask_id, threshold=None):
        print("this is no answer")
        if ids.shape[1] == 1:
            raise ValueError("too short: %s" % __file__)
        for _ in range(steps):
            model(ids)
        return torch.cat([ids, torch.full((1, gen_length), block_length)], dim=1), steps
    """
)


def settings_of(**axes: Any) -> list[dict[str, Any]]:
    return [dict(point.settings) for point in points_of(peers, dict(peers.AXES) | TINY | axes, COMMON)]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A CODE_ROOT with a stand-in for one implementation."""
    folder = tmp_path / "code" / "fastdllm"
    (folder / "llada").mkdir(parents=True)
    (folder / "llada" / "generate.py").write_text(FAST)
    (folder / "COMMIT").write_text("2a2de8c\n")
    return folder.parent


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_random(tmp_path, 64, 1, 16)
    return tmp_path


def test_every_match_is_measured_under_the_rules_of_its_official_code():
    found = settings_of()
    assert {s["match"] for s in found} == set(MATCHES) and {s["model"] for s in found} == {"random", "embedded"}
    assert all((s["rule"] == "one" and "prompt" in s) or s["model"] == "embedded" for s in found)
    assert {(s["match"], s["rule"]) for s in found} == {
        (n, rule) for n, match in MATCHES.items() for rule in match.rules
    }
    # A point says all that its rows depend on, and nothing that only one machine knows.
    assert all("official" not in s and json.dumps(s) for s in found)
    for match in MATCHES.values():
        assert match.rules and set(match.rules) <= RULES.keys() and len(match.agree) != 1
        for peer, options in (match.agree | match.others).items():
            kind, _, name = peer.partition(", ")
            if kind == "official":
                assert name in IMPLEMENTATIONS and callable(getattr(Implementations, name))
            elif kind != "transformers":
                (parity.policy if name == "parity" else make_policy)(kind, **options)
    for axis, bad in (("match", "duel"), ("rule", "two"), ("examples", "sort")):
        with pytest.raises(ValueError, match=bad):
            settings_of(**{axis: [bad]})


def test_equal_answers_are_ok_and_missing_official_code_is_refused():
    (point,) = settings_of(match=["none"], model=["random"])
    official, ours, theirs = matches.measure(point, **WITHOUT)
    assert official["status"] == "refused" and "docs/peers.md" in official["why"]
    assert ours["peer"] == "none" and theirs["peer"] == "transformers, no cache"
    for row in (ours, theirs):
        assert "status" not in row and row["same_tokens"] == 1 and row["nfe"] == 8 and row["rows"] == 8 * 78
        assert row["tokens_per_second"] == pytest.approx(8 / row["seconds"]) and "over_official" not in row
    assert not any(row.keys() & point.keys() for row in (official, ours, theirs))


def test_tasks_have_right_answers_and_whole_ones():
    (point,) = settings_of(match=["none"], model=["embedded"], rule=["one"], block=[8])
    _, ours, theirs = matches.measure(point, **WITHOUT)
    assert ours["task"] == "add" and ours["correct"] == theirs["correct"] == ours["examples"] == 1
    # Also tokens behind the end: no peer stops there.
    assert theirs["same_answers"] == 1 and theirs["nfe"] == 8


def peer(name: str, tokens: list[int], **about: Any) -> matches.Peer:
    return matches.Peer(name, lambda prompt: matches.Answer(tokens, 2.0, 3), about)


def test_another_token_fails_peers_that_have_to_agree_and_a_broken_peer_ends_alone():
    asked: list[int] = []

    def breaks(prompt: list[int]) -> matches.Answer:
        asked.append(len(prompt))
        raise PeerError("killed")

    questions = matches.Questions("random", [[1] * 100])
    four = [peer("official, x", [1, 2, 3, 4], commits={"x": "abc"}), peer("a", [1, 2, 3, 4]), peer("b", [1, 2, 3, 5])]
    rows = list(matches.rows_of([*four, peer("c", [1, 2, 3, 6])], questions, agree=3))
    assert [row.get("status", "ok") for row in rows] == ["ok", "ok", "failed", "ok"] and "25.0%" in rows[2]["why"]
    assert rows[0]["commits"] == {"x": "abc"} and "over_official" not in rows[0] and rows[1]["over_official"] == 1
    assert [row["same_tokens"] for row in rows] == [1, 1, 0.75, 0.75]
    # The first that can be had takes the place of one that cannot.
    rows = list(matches.rows_of([matches.Peer("official, x", breaks), *four[1:]], questions, agree=3))
    assert rows[0]["status"] == "failed" and rows[0]["why"] == "killed" and asked == [matches.WARM_UP]
    assert rows[1]["same_tokens"] == 1 and rows[2]["status"] == "failed"


@pytest.mark.slow
def test_official_code_answers_from_a_process_of_its_own(code: Path, checkpoint: Path):
    call = {"max_new_tokens": 8, "block_length": 4}

    def run_by(python: str) -> dict[str, Any]:
        return {"code": str(code), "python": python, "threads": 1}

    where = run_by(sys.executable)
    with Official("fast_dual", checkpoint, **where) as official:
        assert official.about["commits"] == {"fastdllm": "2a2de8c"}
        assert official.about["official_torch"] == torch.__version__
        answer = official.ask([5, 6], call, {})
        assert answer["tokens"] == [4] * 8 and answer["forwards"] == 8 and answer["seconds"] > 0
        with pytest.raises(PeerError, match=r"^ValueError: too short: fastdllm/llada/generate.py$"):
            official.ask([5], call, {})
        assert official.ask([5, 6], call, {})["tokens"] == answer["tokens"]
    assert official._process.returncode is not None
    with pytest.raises(RefusedError, match=r"no folder dkv .*docs/peers.md"):
        Official("dkv_decode", checkpoint, **where)
    with pytest.raises(PeerError, match="cannot be started"):
        Official("fast_dual", checkpoint, **run_by(str(code / "python")))
    with pytest.raises(PeerError, match="exit status 1"):
        Official("fast_dual", checkpoint, **run_by("/bin/false"))


@pytest.mark.parametrize(
    ("request_", "threshold"),
    [({}, (2.0, None)), ({"threshold": 0.9}, (0.9, None)), ({"threshold": 0.9, "early": 0.7}, (0.9, 0.7))],
)
def test_polestar_commits_one_token_by_a_threshold_that_only_the_best_passes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, float], threshold: tuple[float, float | None]
):
    seen: dict[str, Any] = {}

    def generate(model: object, ids: object, **given: Any) -> tuple[object]:
        seen.update(given)
        return (ids,)

    monkeypatch.setattr(Implementations, "_load", lambda self, kind: None)
    stand_ins = {"generation": {"generate_with_dual_cache": generate}, "modeling_llada": {"LLaDAModelLM": None}}
    monkeypatch.setitem(sys.modules, "polestar_llada", None)  # put back behind the test
    for name, has in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"polestar_llada.{name}", SimpleNamespace(**has))
    answer = Implementations(checkpoint, checkpoint).polestar()
    call = {"length": 8, "block": 4, "steps": 8, "threshold": None, "early": None, "options": {}}
    answer(torch.tensor([[1]]), call | request_)
    assert (seen.pop("threshold"), seen.pop("threshold_early")) == threshold
    assert seen == {"steps": 8, "gen_length": 8, "block_length": 4, "mask_id": 8191}


def test_a_commit_is_that_of_the_checkout_or_of_its_file(code: Path, tmp_path: Path):
    assert commit_of(code / "fastdllm") == "2a2de8c" and commit_of(code) is None

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(code / "fastdllm"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert commit_of(code / "fastdllm") == commit
    (code / "fastdllm" / "COMMIT").unlink()
    assert commit_of(code / "fastdllm") == f"{commit}-dirty"


def test_the_path_of_the_code_stands_in_no_row_and_no_command(code: Path, monkeypatch: pytest.MonkeyPatch):
    given = ["--official", str(code), f"--official-python={sys.executable}"]
    args = measure.parser_of(peers).parse_args(given)
    points, local = measure.plan(peers, args)
    assert local["official"] == {"code": str(code.resolve()), "python": sys.executable}
    assert str(code) not in json.dumps([dict(point.settings) for point in points])
    monkeypatch.setattr(sys, "argv", ["bench/measure.py", "peers", *given, "--runs", "3"])
    wanted = "python bench/measure.py peers --official PATH --official-python=PATH --runs 3"
    assert measure.command_of(args) == wanted
    bad: list[tuple[Any, Any]] = [(str(code), None), (None, "python"), (str(code / "no"), "python"), (str(code), "no")]
    for flags in bad:
        with pytest.raises(ValueError, match="--official"):
            located(*flags)


def test_the_table_has_figures_right_answers_commits_and_missing_peers(row: Callable[..., dict[str, Any]]):
    rows = [
        row("official, vanilla", commits={"llada": "b7e6c35"}, over_official=None),
        row("none", run=0, rows=99.0),
        row("none", run=1, rows=99.0, seconds=2.0),
        row("none", point="b", task="sort", correct=3, prompt=None, nfe=4.0),
        {"point": "c", "run": 0, "peer": "official, polestar", "status": "refused", "why": "no folder polestar"},
    ]
    assert peers.tables(rows)["peers"].splitlines() == [
        "|  | prompt 64: rows | prompt 64: s | prompt 64: tokens/s | prompt 64: over official |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| `official, vanilla` |  | 1.00 | 8.00 |  |",
        "| `none` | 99 | 1.50 (1.20-1.80) | 8.00 (8.00-8.00) | 0.50 (0.50-0.50) |",
        "",
        "|  | task sort: right (95 %) | task sort: NFE | task sort: same |",
        "| --- | ---: | ---: | ---: |",
        "| `none` | 3 of 3 (44-100) | 4.00 | 3 |",
        "",
        "llada b7e6c35",
        "",
        "`official, polestar` refused: no folder polestar.",
    ]
    assert peers.tables([]) == {"peers": ""}


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    """Makes a row of the random model."""

    def make(name: str, **given: Any) -> dict[str, Any]:
        figures = {"seconds": 1.0, "tokens_per_second": 8.0, "over_official": 0.5, "nfe": 8.0, "same_answers": 3}
        of = {"point": "a", "run": 0, "stamp": "x", "status": "ok", "rule": "one", "task": "random", "prompt": 64}
        made = of | {"peer": name, "examples": 3} | figures | given
        return {column: value for column, value in made.items() if value is not None}

    return make
