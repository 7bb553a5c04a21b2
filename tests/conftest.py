"""Conditions of every test: torch's memory is poisoned, the network shut, and Triton interpreted without a GPU."""

import ctypes
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

# Before the first import of torch: processes that share the tests share the cores as well.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# On Intel's CPUs MKL sums a row's products in one order, whatever the other rows (`ONE_ORDER`), only in this mode.
if (cpus := Path("/proc/cpuinfo")).exists() and "GenuineIntel" in cpus.read_text():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Before the first Hugging Face import: a test that would download fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings
from official_names import official
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._device import _device_constructors

CUDA = torch.cuda.is_available()

if not CUDA:
    # Triton reads the variable when it is imported, and decorates its own library by it: later is too late.
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before tests/conftest.py could ask for its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"

# Tests share cores: a slow example is no failure.
settings.register_profile("tiered", deadline=None)
settings.load_profile("tiered")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` if there is none, and leave what a `covering` does without to the long run."""
    seen: set[tuple[Any, ...]] = set()
    # In the order of their checksums, the same everywhere: in a table's own, all would meet the first value of another.
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        if "gpu" in item.keywords:
            if not CUDA:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif (covering := item.get_closest_marker("covering")) and not item.get_closest_marker("long"):
            table, case = item.nodeid.split("[")[0], item.callspec.params  # pyright: ignore[reportAttributeAccessIssue]
            values = [(name, repr(value)) for name, value in sorted(case.items())]
            combined = {(table, *some) for some in combinations(values, *covering.args)}
            if combined <= seen:
                item.add_marker(pytest.mark.long)
            seen |= combined


def pytest_collection_finish():
    """Leave torch, transformers and thousands of tests, which live to the end, out of each garbage collection."""
    gc.collect()
    gc.freeze()


POISONS = {torch.bool: 1, torch.uint8: 0xFF}  # bytes of the largest value; other dtypes have NaN or a large number


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, which leaves new memory as it is, with NaN in that memory; integers are large."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        new = make(*args, **kwargs)
        has_memory = not new.is_meta and not isinstance(new, FakeTensor)
        if has_memory and not torch._C._len_torch_function_stack():  # a mode may have a poison of its own
            storage = new.untyped_storage()
            byte = POISONS.get(new.dtype, 0xFF if new.is_floating_point() else 0x7F)
            if storage.device.type == "cpu":  # not by torch, whose operations some tests count
                ctypes.memset(storage.data_ptr(), byte, storage.nbytes())
            else:
                storage.fill_(byte)  # pyright: ignore[reportAttributeAccessIssue]
        return new

    return made


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Memory that Python code asks torch for is `poisoned`, in every thread: a row left unwritten shows.

    Torch's deterministic mode would fill what its own operations ask for, too, in a sixth of the time of all tests.
    """
    _device_constructors()  # torch remembers here which functions `with torch.device(...)` is for: before the patch
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


# Imports of ours and of Hugging Face stay inside the fixtures: the variables above come first.
@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """config.json of a LLaDA with 2 layers, width 32, 4 heads on 2 key heads, 128 tokens, 256 positions."""
    return {
        "model_type": "llada",
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "mlp_hidden_size": 48,
        "vocab_size": 128,
        "max_sequence_length": 256,
        "mask_token_id": 127,
        "eos_token_id": 126,
        "pad_token_id": 125,
        "torch_dtype": "float32",
    }


@pytest.fixture(scope="session")
def random_weights() -> Callable[[Mapping[str, Any]], dict[str, Tensor]]:
    """Makes random float32 weights for a config.json of any family by official name, the same in every test."""
    from tiered.models.families import family_of

    def draw(config: Mapping[str, Any]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(shape, generator=generator).mul_(0.3).add_(1.0 if len(shape) == 1 else 0.0)
            for name, shape in family_of(config).shape(config).weight_shapes.items()
        }

    return draw


@pytest.fixture(scope="session")
def random_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]]
) -> Callable[[Mapping[str, Any]], Path]:
    """Writes the checkpoint of a config.json of any family with its `random_weights`, without a tokenizer."""
    from safetensors.torch import save_file

    def write(config: Mapping[str, Any]) -> Path:
        directory = tmp_path_factory.mktemp("random")
        (directory / "config.json").write_text(json.dumps(config))
        save_file(random_weights(config), directory / "model.safetensors")
        return directory

    return write


@pytest.fixture(scope="session")
def masked_gidd(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the recorded GIDD checkpoint, taken for a model of masks, with other values in its config.json."""
    source = Path(__file__).parent / "goldens" / "gidd" / "gidd_tiny_unif"

    def write(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("gidd_tiny_mask")
        config = json.loads((source / "config.json").read_text()) | {"noise_type": -1000.0, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def random_model(
    random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]],
) -> Callable[[Mapping[str, Any]], Any]:
    """Makes the model of a config.json of any family with its `random_weights`: no checkpoint, no tokenizer."""
    from tiered.models.families import family_of

    def make(config: Mapping[str, Any]) -> Any:
        model = family_of(config).resolve_loader().from_config(config)
        for name, weight in random_weights(config).items():
            official(model, name).copy_(weight)
        return model

    return make


@pytest.fixture
def tiny_weights(
    tiny_config: Mapping[str, Any], random_weights: Callable[[Mapping[str, Any]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The `random_weights` of `tiny_config`."""
    return random_weights(tiny_config)


@pytest.fixture
def tiny_model(tiny_config: Mapping[str, Any], random_model: Callable[[Mapping[str, Any]], Any]):
    """The `random_model` of `tiny_config`."""
    return random_model(tiny_config)


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded model's tokenizer: 111 tokens, so `tiny_model` can read what it writes."""
    from tiered.models.locate import checkpoint_directory
    from tiered.models.tokenizer import load_tokenizer

    return load_tokenizer(checkpoint_directory("embedded"))


@pytest.fixture
def write_checkpoint(
    tmp_path: Path, tiny_config: Mapping[str, Any], tiny_weights: Mapping[str, Tensor]
) -> Callable[..., Path]:
    """Writes a checkpoint as Hugging Face lays it out, the tiny one by default; returns its directory.

    Each call makes a directory of its own: one `model.safetensors`, or `shards` files with an index, and with
    `tokenizer` the embedded model's tokenizer.
    """
    from safetensors.torch import save_file

    from tiered.models.locate import checkpoint_directory
    from tiered.models.tokenizer import SETTINGS_FILE, VOCABULARY_FILE

    def write(
        config: Mapping[str, Any] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        *,
        shards: int = 1,
        tokenizer: bool = False,
    ) -> Path:
        directory = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(tiny_config if config is None else config))
        weights = tiny_weights if weights is None else weights
        if shards == 1:
            save_file(dict(weights), directory / "model.safetensors")
        else:
            names = list(weights)
            files = {
                name: f"model-{1 + i * shards // len(names):05}-of-{shards:05}.safetensors"
                for i, name in enumerate(names)
            }
            for file in set(files.values()):
                save_file({name: weights[name] for name in names if files[name] == file}, directory / file)
            index = {"metadata": {}, "weight_map": files}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        if tokenizer:
            for file in (VOCABULARY_FILE, SETTINGS_FILE):
                shutil.copy(checkpoint_directory("embedded") / file, directory)
        return directory

    return write


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few slots of few rows for stored rows. Else the slots hold all rows of a small model, and nothing is fetched."""
    from tiered.policies.polestar import hidden_bytes

    monkeypatch.setattr(hidden_bytes, "RECORD_ROWS", 4)
    monkeypatch.setattr(hidden_bytes, "MOST_SLOTS", 3)
