"""Loading: every layout of a checkpoint gives the same model, in the memory of one, and runs no code of its own."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from official_names import official
from torch import Tensor

import tiered
from tiered.models.llada import LLaDA
from tiered.models.shape import BYTES_PER_ELEMENT

HEAD, EMBEDDING = "model.transformer.ff_out.weight", "model.transformer.wte.weight"
IDS = torch.arange(40).view(2, 20)


def loaded(directory: Path, **arguments: Any) -> LLaDA:
    model = tiered.from_pretrained(directory, **arguments).model
    assert isinstance(model, LLaDA)
    return model


def weights_of(model: LLaDA) -> dict[str, Tensor]:
    """The weights of `model` by their official names."""
    return {name: official(model, name) for name in model.shape.weight_shapes}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_layout_gives_the_same_weights(
    write_checkpoint: Callable[..., Path], tiny_weights: Mapping[str, Tensor], shards: int
):
    directory = write_checkpoint(shards=shards)
    assert len(list(directory.glob("*.safetensors"))) == shards
    found = weights_of(loaded(directory))
    assert found.keys() == tiny_weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in tiny_weights.items())


def test_files_may_be_links_out_of_the_folder(
    write_checkpoint: Callable[..., Path], tiny_weights: Mapping[str, Tensor], tmp_path: Path
):
    # As in Hugging Face's cache, where a snapshot is links to ../../blobs.
    directory = write_checkpoint(shards=2)
    for number, file in enumerate([*directory.iterdir()]):
        file.symlink_to(file.rename(tmp_path / f"blob-{number}"))
    found = weights_of(loaded(directory))
    assert all(torch.equal(found[name], weight) for name, weight in tiny_weights.items())


def test_a_tied_head_is_the_embedding(
    write_checkpoint: Callable[..., Path], tiny_config: Mapping[str, Any], tiny_weights: Mapping[str, Tensor]
):
    spelled_out = dict(tiny_weights) | {HEAD: tiny_weights[EMBEDDING].clone()}
    tied = {name: weight for name, weight in tiny_weights.items() if name != HEAD}
    apart, *once = (
        tiered.from_pretrained(write_checkpoint({**tiny_config, "weight_tying": is_tied}, weights, shards=2))
        for is_tied, weights in ((False, spelled_out), (True, tied), (True, spelled_out))
    )
    for runtime in once:
        assert torch.equal(runtime.logits(IDS), apart.logits(IDS))
        assert runtime.ledger.report().peak_device_bytes < apart.ledger.report().peak_device_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head + 1, f"the weight {HEAD} differs from {EMBEDDING}, but config.json ties them"),
        (lambda head: head[1:].clone(), f"1 unexpected: {HEAD}"),
        (lambda head: head.double(), f"1 unexpected: {HEAD}"),
    ],
)
def test_a_tied_head_that_is_not_the_embedding(
    write_checkpoint: Callable[..., Path],
    tiny_config: Mapping[str, Any],
    tiny_weights: Mapping[str, Tensor],
    change: Callable[[Tensor], Tensor],
    message: str,
):
    weights = dict(tiny_weights) | {HEAD: change(tiny_weights[EMBEDDING])}
    with pytest.raises(ValueError, match=message):
        tiered.from_pretrained(write_checkpoint({**tiny_config, "weight_tying": True}, weights))


@pytest.mark.parametrize("wanted", BYTES_PER_ELEMENT)
@pytest.mark.parametrize("stored", BYTES_PER_ELEMENT)
def test_dtypes_convert(
    write_checkpoint: Callable[..., Path],
    tiny_config: Mapping[str, Any],
    tiny_weights: Mapping[str, Tensor],
    stored: str,
    wanted: str,
):
    weights = {name: weight.to(getattr(torch, stored)) for name, weight in tiny_weights.items()}
    directory = write_checkpoint({**tiny_config, "torch_dtype": stored}, weights)
    assert loaded(directory).wte.weight.dtype == getattr(torch, stored)  # "auto": as stored
    for dtype in (wanted, getattr(torch, wanted)):
        runtime = tiered.from_pretrained(directory, dtype=dtype)
        assert isinstance(runtime.model, LLaDA)
        found = weights_of(runtime.model)
        # torch.equal compares bits that are converted once; to float32, from either half format, nothing is lost.
        assert all(torch.equal(found[name], weight.to(getattr(torch, wanted))) for name, weight in weights.items())
        if wanted == "float32":
            assert all(torch.equal(found[name].to(weight.dtype), weight) for name, weight in weights.items())
        held = sum(weight.numel() * weight.element_size() for weight in found.values())
        assert runtime.ledger.report().peak_device_bytes == held


def test_weights_survive_the_file(write_checkpoint: Callable[..., Path]):
    directory = write_checkpoint(shards=2)
    model = loaded(directory)
    before = {name: weight.clone() for name, weight in weights_of(model).items()}
    for file in directory.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))  # the same pages of the same file
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


# The part of `from_pretrained` that loads weights.
MEASURED = """
import json, sys, torch
from pathlib import Path
from tiered.core.ledger import Ledger
from tiered.loading import load_weights
from tiered.models.checkpoint import Checkpoint
from tiered.models.llada import LLaDA
def peak():
    status = open("/proc/self/status").read()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
def load(directory):
    with torch.device("meta"):
        model = LLaDA.from_config(json.loads((directory / "config.json").read_text()))
    checkpoint = Checkpoint(directory, model.shape, {})
    load_weights(model, checkpoint, Ledger(), dtype=torch.float32, device=torch.device("cpu"))
    return model
load(Path(sys.argv[1]))
before = peak()
model = load(Path(sys.argv[2]))
print(peak() - before, len(model.shape.weight_shapes))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's count of resident pages")
@pytest.mark.parametrize("name", ["wte", "ff_out"])
def test_a_table_of_zeros_is_refused(name: str, write_checkpoint: Callable[..., Path], tiny_weights: dict[str, Tensor]):
    official = f"model.transformer.{name}.weight"
    tiny_weights[official].zero_()
    with pytest.raises(ValueError, match=f"the weight {official} holds only zeros"):
        tiered.from_pretrained(write_checkpoint(weights=tiny_weights))


def test_loading_takes_the_model_and_one_shard(write_checkpoint: Callable[..., Path], tiny_config: Mapping[str, Any]):
    large = {**tiny_config, "d_model": 768, "mlp_hidden_size": 2048, "n_layers": 3}
    names = LLaDA.read_config(large).shape.weight_shapes
    directory = write_checkpoint(large, {name: torch.ones(shape) for name, shape in names.items()}, shards=4)
    shards = [file.stat().st_size for file in directory.glob("*.safetensors")]
    model, one_shard = sum(shards), max(shards)
    assert len(shards) == 4 and model > 60e6 and one_shard < 0.4 * model
    result = subprocess.run(
        [sys.executable, "-c", MEASURED, write_checkpoint(), directory], capture_output=True, text=True, check=True
    )
    grown, count = map(int, result.stdout.split())
    assert count == len(names)
    assert model < grown < model + 1.3 * one_shard + 10e6


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_pickled_weights_are_never_opened(write_checkpoint: Callable[..., Path], tmp_path: Path):
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    directory = write_checkpoint(tokenizer=True)
    for name in ("pytorch_model.bin", "model.bin", "training_args.bin", "model.pt", "tokenizer.pkl"):
        (directory / name).write_bytes(bomb)
    tiered.from_pretrained(directory).generate(IDS, max_new_tokens=8)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        tiered.from_pretrained(directory)
    # Not even under a name that the index gives.
    (directory / "other.safetensors").touch()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read as safetensors"):
        tiered.from_pretrained(directory)
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists()


@pytest.mark.parametrize("tokenizer_too", [False, True])
def test_code_beside_the_weights_is_never_run(
    write_checkpoint: Callable[..., Path], tiny_config: Mapping[str, Any], tmp_path: Path, tokenizer_too: bool
):
    trace = tmp_path / "trace"
    classes = {"AutoConfig": "remote.Config", "AutoModel": "remote.Model", "AutoModelForCausalLM": "remote.Model"}
    directory = write_checkpoint({**tiny_config, "auto_map": classes}, tokenizer=True)
    for name in ("remote", "configuration_llada", "modeling_llada", "tokenization_llada", "__init__"):
        (directory / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')\nraise RuntimeError('remote code ran')\n")
    if tokenizer_too:
        file = directory / "tokenizer_config.json"
        auto_map = {"AutoTokenizer": ["remote.Tokenizer", "remote.Tokenizer"]}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))
    out = tiered.from_pretrained(directory).generate("copy: Ada", max_new_tokens=8)
    assert out.text is not None
    assert not trace.exists()
