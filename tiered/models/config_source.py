"""Finds and reads the config.json that a name, a path or a mapping stands for. Never reaches the network."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered.core.checks import unknown_name
from tiered.models.locate import EMBEDDED_MODELS, find_directory, is_hub_id, not_found
from tiered.models.presets import preset_names, preset_of, read_preset


def read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The config that `source` stands for.

    Args:
        source: an embedded model's name, a directory with a config.json, the path of a config.json, the hub id of a
            downloaded checkpoint, a preset, or a config itself. Where a directory and a preset share a name, the
            directory counts.

    Raises:
        TypeError: none of those types.
        ValueError: nothing of that name (the nearest preset is named), or what is there is no config.json.
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
        return read_object(directory / "config.json")
    name = str(source)
    if preset_of(name) is not None:
        return read_preset(name)
    if is_hub_id(name):
        raise ValueError(not_found(name))
    raise ValueError(
        f"{unknown_name('model', name, [*EMBEDDED_MODELS, *preset_names()])}; or a directory with a config.json"
    )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path` of a checkpoint.

    Raises:
        ValueError: no text, no JSON, none that can be parsed, or no object; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, or bytes that are no text
        raise ValueError(f"{path} is damaged, it holds no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: its brackets are nested too deeply to be read") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is to hold an object, not {type(content).__name__}")
    return content
