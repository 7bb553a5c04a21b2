"""Finds a checkpoint and its config.json on this machine. Never uses the network."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered.core.checks import unknown_name
from tiered.models.config_fields import end_tokens
from tiered.models.presets import PRESETS, preset_names, preset_of, read_preset

# The models in the library, by their names. A wheel has only the weights of the first.
_PACKAGE = Path(__file__).parents[1] / "embedded"
EMBEDDED_MODELS: Mapping[str, Path] = {
    "embedded": _PACKAGE / "assets",
    "embedded-uniform": _PACKAGE / "assets_uniform",
    "embedded-blocks": _PACKAGE / "assets_blocks",
    "embedded-fresh": _PACKAGE / "assets_fresh",
}


def find_directory(name: str | Path) -> Path | None:
    """The directory of `name` (an embedded model, a path, or a hub id in the local cache), or None."""
    if str(name) in EMBEDDED_MODELS:
        return EMBEDDED_MODELS[str(name)]
    path = Path(os.path.expanduser(name))
    return path if path.is_dir() else _cached_snapshot(str(name))


def checkpoint_directory(name: str | Path) -> Path:
    """The directory of the checkpoint `name`, with its config.json and at least one safetensors file. Raises
    `TypeError` unless `name` is a str or Path, and `ValueError` if no such checkpoint can be loaded."""
    if not isinstance(name, str | Path):
        raise TypeError(f"a checkpoint is named by a string or a Path, not {name!r}")
    directory = find_directory(name)
    if directory is None:
        preset = preset_of(str(name))
        if preset is None:
            raise ValueError(not_found(str(name)))
        checkpoints = PRESETS[preset]
        wanted = str(name) if str(name) in checkpoints else checkpoints[0]
        raise ValueError(
            f"{str(name)!r} can be planned, but its weights are not on this machine; download them with "
            f"`hf download {wanted}` and load {wanted!r}"
        )
    lacking = [f for f in ("config.json", "*.safetensors") if not any(directory.glob(f))]
    if lacking and str(name) in EMBEDDED_MODELS:
        raise ValueError(
            f"the weights of {str(name)!r} are only in the source tree, not in the wheel: in a checkout, load "
            f"'tiered/embedded/{directory.name}', or install with `pip install --editable .`"
        )
    if lacking:
        raise ValueError(f"{str(name)!r} is no complete checkpoint: {directory} has no {' and no '.join(lacking)}")
    return directory


def read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The config of `source`: an embedded model's name, a directory with a config.json, the path of a config.json, the
    hub id of a downloaded checkpoint, a preset, or a config. A directory precedes a preset of the same name.

    Raises:
        TypeError: `source` has none of those types.
        ValueError: there is nothing of that name (the nearest preset is named), or its content is not a config.json.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        raise TypeError(f"a config is a name, a path or a mapping, not {source!r}")
    path = Path(os.path.expanduser(source))
    if path.is_file():
        return read_object(path)
    directory = find_directory(source)
    if directory is not None:
        if not (directory / "config.json").is_file():
            raise ValueError(f"{str(source)!r} has no config.json in {directory}")
        return _with_ends(read_object(directory / "config.json"), directory / "generation_config.json")
    name = str(source)
    if preset_of(name) is not None:
        return read_preset(name)
    if is_hub_id(name):
        raise ValueError(not_found(name))
    raise ValueError(
        f"{unknown_name('model', name, [*EMBEDDED_MODELS, *preset_names()])}; or a directory with a config.json"
    )


def _with_ends(config: dict[str, Any], generation: Path) -> dict[str, Any]:
    """`config` with the end tokens of the file `generation` behind its own: there chat models have those of a turn."""
    if not generation.is_file():
        return config
    ends = end_tokens(config, read_object(generation))
    return config if ends == [None] else config | {"eos_token_id": ends}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path` of a checkpoint. Raises `ValueError` for anything else, and names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, or bytes that are not text
        raise ValueError(f"{path} is damaged, it holds no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: its brackets are nested too deeply to be read") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold an object, not {type(content).__name__}")
    return content


def not_found(name: str) -> str:
    if is_hub_id(name):
        return f"no directory {name!r} and no such model in the local cache; download it with `hf download {name}`"
    known = unknown_name("model", name, EMBEDDED_MODELS)
    return f"{known}, a checkpoint's directory (none is called so), or the id of a downloaded model"


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like `owner/model`, the id of a model on the Hugging Face hub."""
    owner, slash, model = name.partition("/")
    return bool(slash) and all(
        part.replace("-", "").replace("_", "").replace(".", "").isalnum() for part in (owner, model)
    )


def _cached_snapshot(name: str) -> Path | None:
    if not is_hub_id(name):
        return None
    # Imported here: most names are answered without it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
