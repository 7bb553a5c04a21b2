"""The commands that need no loaded model: `tiered plan`, `tiered models`, and what every command shares."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import cards
import pytest

import tiered
from tiered.__main__ import main as entry_point
from tiered.cli.main import main
from tiered.core.buffers import account_bytes
from tiered.core.errors import TierCapacityError
from tiered.core.features import Tier
from tiered.models.locate import EMBEDDED_MODELS
from tiered.models.presets import ALIASES, PRESETS, read_preset
from tiered.offload.errors import CorruptRecordError, NoRoomError, PinError, TransferError
from tiered.planning.plan import plan

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache of the test's own, not made yet."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def test_plan_prints_the_card(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "llada-8b", "--context", "4096", "--batch", "8", "--memory", "24GiB"]) == 0
    assert capsys.readouterr().out == f"{plan('llada-8b', context=4096, batch=8, memory='24GiB')}\n"


@pytest.mark.parametrize("policy", ["none", "fast_dllm_dual", "dllm_cache", "elastic_cache", "polestar"])
def test_the_list_of_buffers_is_the_plan(policy: str, capsys: pytest.CaptureFixture[str]):
    made = plan("llada-8b", context=4096, policy=policy, memory="16GiB", device="rtx4090")
    assert account_bytes(made.buffers) == {of: size for of, size in made.tiers[Tier.DEVICE].accounts.items() if size}
    flags = ["--context", "4096", "--policy", policy, "--memory", "16GiB", "--device", "rtx4090", "--buffers"]
    assert main(["plan", "llada-8b", *flags]) == 0
    card, printed = str(made), capsys.readouterr().out
    assert printed.startswith(card)
    lines = printed.removeprefix(card).splitlines()
    assert all(sum(f"  {buffer.name}  " in line for line in lines) for buffer in made.buffers if buffer.nbytes)
    assert max(map(len, lines)) <= 120
    assert {line.removeprefix("phase: ") for line in lines if line.startswith("phase: ")} == {
        buffer.phase for buffer in made.buffers if buffer.nbytes and buffer.phase
    }


def test_pages_show_plans():
    """If this fails: `python bench/cards.py`."""
    texts = [page.read_text(encoding="utf-8") for page in cards.pages()]
    assert sum(len(cards.CARD.findall(text)) for text in texts) > 2
    assert [cards.renewed(text) for text in texts] == texts
    assert all("--device" in found[1] for text in texts for found in cards.CARD.findall(text)), "it names no machine"


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]):
    sizes = "--context 640 --batch 3 --block-length 64 --memory 64GiB --host-memory 1GiB"
    switches = "--policy fast_dllm_prefix --policy-option refresh_interval=5 --dtype float16 --cfg --sampled --json"
    assert main(["plan", "dream-7b", *sizes.split(), *switches.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = {"context": 640, "batch": 3, "block_length": 64, "dtype": "float16", "cfg": True, "sampled": True}
    expected |= {"policy": "fast_dllm_prefix", "fits": True}
    expected["policy_options"] = {"refresh_interval": 5, "refresh_blocks": 1}
    assert {name: told[name] for name in expected} == expected
    assert [told["tiers"][tier]["cap"] for tier in Tier] == [64 * 2**30, 2**30, None]


def test_a_plan_that_does_not_fit_is_no_error(capsys: pytest.CaptureFixture[str]):
    call = ["plan", "llada-8b", "--context", "4096", "--memory", "1GiB"]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(call) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llada-9b", "--context", "64"], "did you mean 'llada-8b'"),
        (["llada-8b", "--context", "0"], "context = 0"),
        (["llada-8b", "--context", "32768"], "context = 32768 positions; the model was made for 4096 ("),
        (["llada-8b", "--context", "64", "--memory", "lots"], "'lots'"),
        *(
            (
                ["llada-8b", "--context", "64", flag, "24"],
                "cannot read '24' as a byte size; write a number and one of B",
            )
            for flag in ("--memory", "--host-memory", "--disk-memory")
        ),
        (["llada-8b", "--context", "64", "--policy", "lru"], "unknown policy 'lru'"),
        (["llada-8b", "--context", "64", "--policy-option", "window"], "'window'; NAME=VALUE is allowed"),
        (["llada-8b", "--context", "64", "--policy-option", "window=x"], "'window'"),
        (
            ["llada-8b", "--context", "64", "--policy", "polestar", "--policy-option", "refresh_blocks=often"],
            "'often'",
        ),
        (["acme/absent", "--context", "64"], "hf download acme/absent"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tiered: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TierCapacityError(2, 1, Tier.DEVICE, "raise it"), 2),
        (FileNotFoundError("no weights"), 2),
        (TypeError("no such type"), 2),
        (NoRoomError(5, 4, 8, "the scratch file"), 2),
        (PinError(5, "raise ulimit -l"), 2),
        (TransferError("the file has changed"), 2),
        (CorruptRecordError("another checksum"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object):
        raise error

    monkeypatch.setattr("tiered.planning.plan.plan", fail)
    assert main(["plan", "llada-8b", "--context", "64"]) == status


def test_a_bug_is_no_tidy_error(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object):
        raise KeyError("a bug")

    monkeypatch.setattr("tiered.planning.plan.plan", fail)
    with pytest.raises(KeyError):
        main(["plan", "llada-8b", "--context", "64"])


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--version"], 0, f"tiered {tiered.__version__}"),
        (["--help"], 0, "generate"),
        (["plan", "--help"], 0, "--context"),
        ([], 2, "required: COMMAND"),
        (["plan", "llada-8b"], 2, "required: --context"),
        (["plan", "llada-8b", "--context", "many"], 2, "invalid int value: 'many'"),
        (["fly"], 2, "invalid choice: 'fly'"),
    ],
)
def test_answers_of_argparse(arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == status
    assert text in "".join(capsys.readouterr())


class Told:
    """A plan with all that a model may write: colours, a title, C1 codes, a bell, and harmless text."""

    def __str__(self) -> str:
        return "\x1b[31mred \x1b]0;title\x07 \x9b2J \x7f\b\rover\r\n\tkept \u200d é"

    def as_dict(self) -> dict[str, str]:
        return {"text": str(self)}


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.planning.plan.plan", lambda *_, **__: Told())
    call = ["plan", "llada-8b", "--context", "64"]
    told: dict[str, str] = {}
    for name, (ours, theirs) in {"terminal": pty.openpty(), "pipe": os.pipe()}.items():
        with open(theirs, "w", encoding="utf-8", newline="") as stream, redirect_stdout(stream):
            assert main(call) == main([*call, "--json"]) == 0
        with open(ours, "rb", buffering=0) as stream, suppress(OSError):  # the end of a terminal is an error
            while part := stream.read(65536):
                told[name] = told.get(name, "") + part.decode()
    text, record, _ = told["pipe"].rsplit("\n", 2)
    assert text == str(Told()) and json.loads(record) == Told().as_dict()
    # The terminal itself ends lines with \r\n.
    shown = told["terminal"].replace("\r\n", "\n")
    assert shown == f"�[31mred �]0;title� �2J ���over\n\tkept \u200d é\n{record}\n"


def test_a_closed_pipe_ends_it_silently(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.planning.plan.plan", lambda *_, **__: Told())
    ours, theirs = os.pipe()
    os.close(ours)
    # Closing the stream flushes it again, as Python does at its end.
    with open(theirs, "w", encoding="utf-8") as stream, redirect_stdout(stream):
        assert main(["plan", "llada-8b", "--context", "64"]) == 141
    assert not capsys.readouterr().err


@pytest.mark.parametrize("pressed", [True, False])
def test_an_interrupt_that_a_library_turns_into_another_error(pressed: bool, monkeypatch: pytest.MonkeyPatch):
    def half_imported(*_: object, **__: object):
        try:
            if pressed:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise ImportError("half of a library")

    monkeypatch.setattr("tiered.planning.plan.plan", half_imported)
    # Tests that run in the background have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with nullcontext() if pressed else pytest.raises(ImportError):
            assert main(["plan", "llada-8b", "--context", "64"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_it_is_imported_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def find_spec(name: str, *_: object):
        if name == "tiered.cli.main":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tiered.cli.main")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert entry_point() == 130
    assert capsys.readouterr() == ("", "")


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("generate", "serve", "trace", "plan", "models"))


def test_models_lists_all_names(hub_cache: Path, capsys: pytest.CaptureFixture[str]):
    def download(model: str, config: object, *files: str):
        repository = hub_cache / f"models--{model.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        (snapshot / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        for name in files:
            (snapshot / name).touch()

    llada, dream = read_preset("llada-8b"), read_preset("dream-7b")
    download("acme/whole", llada, "model.safetensors")
    download("acme/config-only", llada)
    download("acme/dream", dream, "model.safetensors")
    download("acme/other", {"model_type": "llama"}, "model.safetensors")
    download("acme/variant", llada | {"alibi": True}, "model.safetensors")
    download("acme/damaged", "{", "model.safetensors")
    (hub_cache / "models--acme--bare" / "snapshots").mkdir(parents=True)

    assert main(["models", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["models"]) == 0
    table = capsys.readouterr().out.splitlines()
    loadable = {model["name"]: model["loadable"] for model in told["models"]}
    cached = {"acme/config-only": False, "acme/dream": True, "acme/whole": True}
    assert loadable == dict.fromkeys(EMBEDDED_MODELS, True) | dict.fromkeys(PRESETS, False) | cached
    assert told["aliases"] == dict(ALIASES)
    whole = next(model for model in told["models"] if model["name"] == "acme/whole")
    assert (whole["source"], whole["family"], whole["layers"], whole["kv_bytes_per_token"]) == (
        *("cache", "LLaDA", 32, 512 * 1024),
    )
    assert len(table) == 1 + len(loadable) + 1
    assert next(line for line in table if "acme/whole" in line).endswith("can be loaded")
    assert next(line for line in table if "dream-7b" in line).endswith("plan only")


def test_models_without_a_cache(capsys: pytest.CaptureFixture[str]):
    assert main(["models"]) == 0
    assert capsys.readouterr().out.count("\n") == 2 + len([*EMBEDDED_MODELS, *PRESETS])


def test_the_module_runs_and_help_needs_no_torch():
    code = "import runpy, sys; sys.argv = ['tiered', 'plan', '--help']\n"
    code += "try: runpy.run_module('tiered', run_name='__main__')\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: tiered plan")
