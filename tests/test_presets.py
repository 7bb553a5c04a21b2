"""Presets against published sizes, and where configs and checkpoints are found."""

import json
from pathlib import Path
from typing import Any

import pytest

from tiered.forward.forward_bytes import kv_bytes_per_token
from tiered.models.families import family_of
from tiered.models.locate import checkpoint_directory, read_config
from tiered.models.presets import ALIASES, PRESETS, preset_names, read_preset


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache of the test's own."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def download(cache: Path, model: str, **files: Any) -> Path:
    """Put a model into `cache` as Hugging Face lays it out; `_` in a file's name stands for `.`."""
    revision = "0" * 40
    repository = cache / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    for name, content in files.items():
        (snapshot / name.replace("_", ".")).write_text(json.dumps(content))
    return snapshot


def llada2(width: int, layers: int, heads: int, dense: int, expert: int) -> int:
    """Parameters of a LLaDA2: 256 experts and a shared one, 4 key heads of 128, the first layer dense."""
    attention = (heads + 2 * 4) * 128 * width + heads * 128 * width + 2 * width + 2 * 128
    mixture = 256 * (width + 1) + 257 * 3 * width * expert
    return 2 * 157184 * width + width + layers * attention + 3 * width * dense + (layers - 1) * mixture


# Parameters: LLaDA from its model card, the others by hand from the layout: Dream is Qwen2.5-7B, SDAR Qwen3-8B; GIDD's
# papers give 3B and 10B. KV bytes a token in bfloat16: 2 · layers · key/value heads · head_dim · 2.
@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes", "noise"),
    [
        ("llada-8b", 8_015_581_184, 512 * 1024, "mask"),
        ("llada-1.5", 8_015_581_184, 512 * 1024, "mask"),
        ("dream-7b", 7_615_616_512, 56 * 1024, "mask"),
        (
            "llada-moe-7b",
            2 * 157184 * 2048 + 2048 + 16 * (4 * 2048**2 + 2 * 2048 + 2 * 128 + 64 * 2048 + 64 * 3 * 2048 * 1024),
            128 * 1024,
            "mask",
        ),
        ("gidd-unif-3b", 2 * 131072 * 3072 + 3072 + 19 * (12 * 3072**2 + 11 * 3072), 228 * 1024, "uniform"),
        ("gidd-mask-3b", 2 * 131072 * 3072 + 3072 + 18 * (12 * 3072**2 + 11 * 3072), 216 * 1024, "mask"),
        ("llada2-mini", llada2(2048, 20, 16, 5120, 512), 40 * 1024, "mask"),
        ("llada2-flash", llada2(4096, 32, 32, 9216, 1024), 64 * 1024, "mask"),
        ("sdar-8b", 8_190_735_360, 144 * 1024, "mask"),
        (
            "nemotron-8b",
            2 * 131072 * 4096 + 4096 + 34 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096),
            136 * 1024,
            "mask",
        ),
        (
            # 30 layers of 16 heads: 25 with 8 key heads of 256, 5 with 2 of 512 and without values of their own.
            "diffusion-gemma",
            262144 * 2816
            + 2816 * 2
            + 3 * 2816 * 2112
            + 25 * (2 * 4096 * 2816 + 2 * 2048 * 2816 + 2 * 256)
            + 5 * (2 * 8192 * 2816 + 1024 * 2816 + 2 * 512)
            + 30 * (136 * 2816 + 3 * 2816 * 2112 + 128 * (3 * 2816 * 704 + 1) + 2),
            5 * 1024 * 2,
            "random",
        ),
        ("gidd-unif-10b", 2 * 131072 * 4608 + 4608 + 34 * (12 * 4608**2 + 11 * 4608), 612 * 1024, "uniform"),
    ],
)
def test_a_preset_has_the_released_models_size(name: str, parameters: int, kv_bytes: int, noise: str):
    config = read_preset(name)
    shape = family_of(config).shape(config)
    assert shape.parameters == parameters
    assert kv_bytes_per_token(shape, "bfloat16") == kv_bytes
    assert (shape.noise, shape.dtype) == (noise, "bfloat16")


def test_every_preset_has_its_file_and_every_file_is_a_preset():
    folder = Path(__file__).parents[1] / "tiered" / "models" / "presets"
    assert {file.stem for file in folder.glob("*.json")} == set(PRESETS)
    assert all(read_preset(name) for name in preset_names())
    assert set(ALIASES.values()) <= set(PRESETS)


@pytest.mark.parametrize("name", ["llada-8b", "llada-1.5", "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-1.5"])
def test_aliases_and_hub_ids_name_the_same_config(name: str, hub_cache: Path):
    assert read_config(name) == read_preset("llada-8b")


def test_a_config_is_found_wherever_it_is(tmp_path: Path, hub_cache: Path):
    config = {"model_type": "llada", "n_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    download(hub_cache, "acme/tiny", config_json=config)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", "acme/tiny", config):
        assert read_config(source) == config
    assert read_config("embedded")["model_type"] == "llada"


def test_a_local_folder_comes_before_a_preset(tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llada-8b").mkdir()
    (tmp_path / "llada-8b" / "config.json").write_text('{"n_layers": 1}')
    download(hub_cache, "GSAI-ML/LLaDA-1.5", config_json={"n_layers": 2})
    assert read_config("llada-8b") == {"n_layers": 1}
    assert read_config("GSAI-ML/LLaDA-1.5") == {"n_layers": 2}


def test_reading_a_mapping_copies_it():
    config = {"model_type": "llada"}
    read_config(config)["model_type"] = "other"
    assert config == {"model_type": "llada"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("lada-8b", "unknown model 'lada-8b'; did you mean 'llada-8b'"),
        ("/nowhere/at/all", "unknown model '/nowhere/at/all'"),
        ("~nobody/here", "unknown model '~nobody/here'"),
        ("acme/absent", "no directory 'acme/absent' and .* `hf download acme/absent`"),
        ("bare", "'bare' has no config.json in bare"),
        ("broken", r"broken.config\.json is damaged, it holds no JSON"),
        ("binary.json", r"binary\.json is damaged, it holds no JSON"),
        ("list.json", r"list\.json is damaged: .* not list"),
        ("deep.json", r"deep\.json is damaged: its brackets are nested too deeply"),
    ],
)
def test_a_config_that_is_not_there_or_damaged(
    source: str, message: str, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("bare", "broken"):
        Path(folder).mkdir()
    Path("broken/config.json").write_text('{"n_layers": ')
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    Path("list.json").write_text("[]")
    Path("deep.json").write_text(10**5 * '{"a":')
    with pytest.raises(ValueError, match=message):
        read_config(source)


@pytest.mark.parametrize("source", [None, 7, ["llada-8b"]])
def test_a_config_source_of_another_type(source: Any):
    with pytest.raises(TypeError, match="a name, a path or a mapping"):
        read_config(source)
    with pytest.raises(TypeError, match="a string or a Path"):
        checkpoint_directory(source)


def test_a_checkpoint_is_found_wherever_it_is(tmp_path: Path, hub_cache: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    snapshot = download(hub_cache, "acme/tiny", config_json={}, model_safetensors={})
    assert checkpoint_directory(tmp_path) == tmp_path
    assert checkpoint_directory("acme/tiny") == snapshot
    assert (checkpoint_directory("embedded") / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llada-8b", "can be planned, .* `hf download GSAI-ML/LLaDA-8B-Instruct` and load 'GSAI-ML/LLaDA-8B-Instruct'"),
        ("GSAI-ML/LLaDA-1.5", "`hf download GSAI-ML/LLaDA-1.5`"),
        ("acme/absent", "`hf download acme/absent`"),
        ("absent", "unknown model 'absent'; allowed: embedded, .*, a checkpoint's directory .none is called so"),
        ("no_weights", r"no complete checkpoint: no_weights has no \*\.safetensors"),
        ("empty", r"empty has no config\.json and no \*\.safetensors"),
        ("acme/partial", r"'acme/partial' is no complete checkpoint"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded(
    name: str, message: str, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("no_weights", "empty"):
        Path(folder).mkdir()
    Path("no_weights/config.json").write_text("{}")
    download(hub_cache, "acme/partial", config_json={})
    with pytest.raises(ValueError, match=message):
        checkpoint_directory(name)
