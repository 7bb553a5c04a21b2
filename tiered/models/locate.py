"""Where a checkpoint lies on this machine. Never reaches the network."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tiered.core.checks import unknown_name
from tiered.models.presets import PRESETS, preset_of

# The models that come with the library, by the names that stand for them.
_PACKAGE = Path(__file__).parents[1] / "embedded"
EMBEDDED_MODELS: Mapping[str, Path] = MappingProxyType(
    {
        "embedded": _PACKAGE / "assets",
        "embedded-uniform": _PACKAGE / "assets_uniform",
        "embedded-blocks": _PACKAGE / "assets_blocks",
    }
)


def find_directory(name: str | Path) -> Path | None:
    """The directory that `name` stands for (an embedded model's, a path, or a hub id in the local cache), or None."""
    if str(name) in EMBEDDED_MODELS:
        return EMBEDDED_MODELS[str(name)]
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    return _cached_snapshot(str(name))


def checkpoint_directory(name: str | Path) -> Path:
    """The directory of the checkpoint `name`, with its config.json and at least one safetensors file in it.

    Raises:
        TypeError: neither str nor Path.
        ValueError: nothing of that name here, or nothing to load in it; says how to download it where that is known.
    """
    if not isinstance(name, str | Path):
        raise TypeError(f"a checkpoint is named by a string or a Path, not {name!r}")
    directory = find_directory(name)
    preset = preset_of(str(name))
    if directory is None and preset is not None:
        checkpoints = PRESETS[preset]
        wanted = str(name) if str(name) in checkpoints else checkpoints[0]
        raise ValueError(
            f"{str(name)!r} can be planned, but its weights are not on this machine; download them with "
            f"`hf download {wanted}` and load {wanted!r}"
        )
    if directory is None:
        raise ValueError(not_found(name))
    lacking = [f for f in ("config.json", "*.safetensors") if not any(directory.glob(f))]
    if lacking:
        raise ValueError(f"{str(name)!r} is no complete checkpoint: {directory} has no {' and no '.join(lacking)}")
    return directory


def not_found(name: str | Path) -> str:
    """Says that no model is called `name`, and what to do about it."""
    if is_hub_id(str(name)):
        return f"no directory {str(name)!r} and no such model in the local cache; download it with `hf download {name}`"
    known = unknown_name("model", str(name), EMBEDDED_MODELS)
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
