"""bench/throughput.py: its rows against the runtime asked directly, the order of rounds, and what it keeps."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tiered
from tiered.embedded import tasks

BENCH = Path(__file__).resolve().parents[1] / "bench"
SMALL = [
    "--contexts",
    "64,96",
    "--batches",
    "1,2",
    "--policies",
    "fast_dllm_dual,polestar",
    "--confidences",
    "0.9,none",
]


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    module = importlib.import_module("throughput")
    rates = importlib.import_module("cost_card").Rates(flops_per_second=1e9, bytes_per_second=1e9)
    monkeypatch.setattr(module, "machine_rates", lambda device, dtype: rates)
    return module


@pytest.fixture
def run(
    throughput: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """Runs it with arguments, its usual file in a folder of its own."""
    usual = tmp_path / "results" / "throughput.json"
    monkeypatch.setattr(throughput, "OUT", usual)

    def once(*arguments: str) -> SimpleNamespace:
        throughput.main(arguments)
        written = capsys.readouterr().out
        return SimpleNamespace(out=written, last=json.loads(written.splitlines()[-1]), usual=usual)

    return once


@pytest.fixture
def counted(throughput: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for rounds: the n-th of a setting reaches 10 n tokens a second. Gives the settings in their order."""
    rounds, order = importlib.import_module("speed.rounds"), list[Any]()

    def one_round(subject: Any, setting: Any) -> dict[str, float]:
        order.append(setting)
        return dict.fromkeys(rounds.FIGURES, 1.0) | {"tokens_per_second": 10.0 * order.count(setting)}

    monkeypatch.setattr(rounds, "one_round", one_round)
    return order


def test_a_row_is_what_the_runtime_says(run: Callable[..., SimpleNamespace]):
    done = run("--contexts", "96", "--batches", "2", "--policies", "polestar", "--confidences", "none", "--rounds", "1")
    (row,) = done.last["rows"]
    chats = [
        [{"role": "user", "content": tasks.sample("lookup", "test", number, size=96).prompt}] for number in range(2)
    ]
    out = tiered.from_pretrained("embedded", device="cpu").generate(chats, max_new_tokens=32, block_length=8)
    assert row["nfe"] == sum(out.forwards) / 2 and row["nfe"] > 8
    assert row["tokens_per_forward"] == pytest.approx(out.tokens_per_forward.mean().item())
    assert (row["device_bytes"], row["host_bytes"]) == (out.memory.peak_device_bytes, out.memory.peak_host_bytes)
    assert row["low"] == row["tokens_per_second"] == row["high"] > 0 and row["rounds"] == 1
    # The first block is one of several, of as many forwards as it has tokens.
    assert 7 * row["ms_per_forward"] < 2 * row["first_block_ms"]
    assert row["first_block_ms"] < 0.9 * row["nfe"] * row["ms_per_forward"]
    assert json.loads(done.usual.read_text()) == done.last
    assert {"command", "revision", "processor"} <= done.last.keys() and done.last["block_length"] == 8
    cards = [line for line in done.out.splitlines() if "FLOP a byte" in line]
    assert [line.split(":")[0] for line in cards] == ["full pass", "block step"]
    assert " 128 of 128 rows" in cards[0] and " 8 of 128 rows" in cards[1]
    assert done.out.index("full pass") < done.out.index("tokens/s")


def test_rounds_go_over_all_settings_in_turn(run: Callable[..., SimpleNamespace], counted: list[Any]):
    done = run(*SMALL, "--rounds", "4")
    # A warm-up, then the rounds; policies next to one another in the same call.
    assert len(counted) == 5 * 16 and counted == 5 * counted[:16]
    assert [setting.policy for setting in counted[:4]] == 2 * ["fast_dllm_dual", "polestar"]
    assert len({(each.context, each.batch, each.confidence) for each in counted[:16]}) == 8
    rows = done.last["rows"]
    assert [(row["policy"], row["context"]) for row in rows] == [(each.policy, each.context) for each in counted[:16]]
    # Of 20, 30, 40, 50: the warm-up's 10 does not count.
    for row in rows:
        assert (row["low"], row["tokens_per_second"], row["high"]) == pytest.approx((26.0, 35.0, 44.0))
        assert row["rounds"] == 4


def test_what_was_measured_is_kept_after_every_round(run, throughput: ModuleType, counted, monkeypatch, tmp_path: Path):
    write, kept = throughput.write_rows, []

    def fails(path: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        write(path, head, rows)
        kept.append(json.loads(path.read_text())["rows"][0]["rounds"])

    monkeypatch.setattr(throughput, "write_rows", fails)
    done = run("--contexts", "64", "--rounds", "3", "--out", str(tmp_path / "own.json"))
    assert kept == [1, 2, 3] and not done.usual.exists()


def test_a_policy_that_does_not_fit_is_a_row_that_says_why(run: Callable[..., SimpleNamespace]):
    done = run("--quick", "--policies", "none,dkv_greedy")
    none, greedy = done.last["rows"]
    assert none["rounds"] == 2 and "why" not in none and not done.usual.exists()
    assert (
        "remasking" in greedy["why"] and greedy["tokens_per_second"] is greedy["nfe"] is None and not greedy["rounds"]
    )


def test_a_random_model_has_the_size_that_is_asked_for(run: Callable[..., SimpleNamespace]):
    sizes = ["--width", "64", "--layers", "1", "--contexts", "16,40", "--batches", "3", "--confidences", "0.9"]
    done = run("--model", "random", *sizes, "--policies", "none", "--max-new-tokens", "8", "--rounds", "1")
    assert (done.last["width"], done.last["layers"]) == (64, 1)
    short, long = done.last["rows"]
    # Never confident: a token a forward. The prompt's place is the difference between the two.
    assert short["nfe"] == long["nfe"] == 8 and long["device_bytes"] > short["device_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policies", "polstar"], "did you mean 'polestar'"),
        (["--contexts", "many"], "context = 'many'"),
        (["--batches", "0"], "batch = '0'"),
        (["--confidences", "2"], "confidence = '2'"),
        (["--rounds", "0"], "rounds = 0"),
        (["--width", "100", "--model", "random"], "width = 100; a multiple of 64"),
        (["--max-new-tokens", "12"], "not a multiple of block_length 8"),
        (["--device", "tpu"], "tpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(run, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err
