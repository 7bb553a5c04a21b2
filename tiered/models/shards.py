"""The safetensors files of a checkpoint: their headers, and one tensor at a time. No pickle is ever opened."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiered.models.config_source import read_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LENGTH_BYTES = 8  # of the header, in front of it


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: its shape, safetensors' name of its dtype, its first byte and its bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int

    def read(self, name: str) -> Tensor:
        """The tensor of this `name`: a view of the file, mapped as long as it lives."""
        with safe_open(self.file, framework="pt") as shard:
            return shard.get_tensor(name)


def shards_in(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint. A file may be a link, as in Hugging Face's cache.

    Raises:
        FileNotFoundError: no weights, or a shard that the index names is missing.
        ValueError: an index that is damaged, or names files elsewhere.
    """
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            raise FileNotFoundError(f"no weights in {directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        if not single.is_file():
            raise ValueError(f"{single} is no file")
        return [single]
    by_weight = read_object(index).get("weight_map")
    names = list(by_weight.values()) if isinstance(by_weight, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} is damaged: its 'weight_map' is no object of weights and names of files")
    elsewhere = [name for name in names if name in ("", "..") or name != Path(name).name]
    if elsewhere:
        raise ValueError(f"{index} names {elsewhere[0]!r}; the name of a file in the same folder is allowed")
    files = [directory / name for name in sorted(set(names))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{len(absent)} of {len(files)} shards are missing in {directory}: {', '.join(absent)}")
    return files


def read_headers(files: list[Path]) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of all files by name, file by file in the order of their bytes; and the files' metadata, as one.

    Raises:
        ValueError: a file that cannot be read (truncated, not safetensors), or a tensor in two of them.
    """
    found: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, first = _header(file)
        metadata |= header.pop("__metadata__", {})
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if name in found:
                raise ValueError(f"weight {name} is in two files: {found[name].file.name} and {file.name}")
            start, stop = entry["data_offsets"]
            found[name] = Stored(file, tuple(entry["shape"]), entry["dtype"], first + start, stop - start)
    return found, metadata


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of `file`, and the first byte of its tensors. safetensors opens the file first and checks it."""
    try:
        with safe_open(file, framework="pt"), file.open("rb") as raw:
            length = int.from_bytes(raw.read(_LENGTH_BYTES), "little")
            return json.loads(raw.read(length)), _LENGTH_BYTES + length
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors (truncated or damaged): {error}") from error
