"""Reading a Hugging Face checkpoint: every weight is checked from the shards' headers, then streamed into the model.

safetensors only: no pickle is ever opened.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tiered.core.errors import NonFiniteError
from tiered.models.base import DiffusionModel
from tiered.models.config_source import read_object
from tiered.models.shape import BYTES_PER_ELEMENT

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# safetensors' names of the dtypes that weights may have.
WEIGHT_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Weight:
    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_weights(model: DiffusionModel, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill `model`, which was built on the meta device, from the safetensors files in `directory`.

    One tensor at a time goes to `device` as `dtype`, so host memory holds the model and the pages of one shard.

    Raises:
        NonFiniteError: a weight holds NaN or infinity, in the file or because `dtype` cannot hold what is there.
        FileNotFoundError: no weights, or a shard that the index names is missing.
        ValueError: a file that cannot be read (truncated, not safetensors), an index that names files elsewhere, or
            weights that are missing, unexpected, of another shape, or of a dtype that is no floating-point weight's;
            names every one, before any is loaded.
    """
    found = _read_headers(_shards(directory))
    _check(found, model.shape.weight_shapes)
    by_file: dict[Path, list[str]] = {}
    for name in model.shape.weight_shapes:
        by_file.setdefault(found[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as shard:
            for name in names:
                # A copy even where dtype and device are the same: safetensors returns a view of the mapped file.
                weight = torch.empty(found[name].shape, dtype=dtype, device=device).copy_(shard.get_tensor(name))
                if not _is_finite(weight):
                    raise _not_finite(name, found[name], shard.get_tensor(name), dtype)
                _assign(model, model.parameter_name(name), weight)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"weights that the shape does not list: {left}"


def _shards(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint. A file may be a link, as in Hugging Face's cache; a name is no way out."""
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


def _read_headers(files: list[Path]) -> dict[str, _Weight]:
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    if name in found:
                        raise ValueError(f"weight {name} is in two files: {found[name].file.name} and {file.name}")
                    entry = shard.get_slice(name)
                    found[name] = _Weight(file, tuple(entry.get_shape()), entry.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors (truncated or damaged): {error}") from error
    return found


def _check(found: Mapping[str, _Weight], expected: Mapping[str, tuple[int, ...]]) -> None:
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} {list(weight.shape)} instead of {list(expected[name])}"
            for name, weight in found.items()
            if name in expected and weight.shape != expected[name]
        ],
        f"of another dtype than {', '.join(WEIGHT_DTYPES)}": [
            f"{name} {weight.dtype}"
            for name, weight in found.items()
            if name in expected and weight.dtype not in WEIGHT_DTYPES
        ],
    }
    lines = [f"{len(names)} {what}: {', '.join(names)}" for what, names in problems.items() if names]
    if lines:
        raise ValueError("the weights do not fit config.json; " + "; ".join(lines))


def _is_finite(weight: torch.Tensor) -> bool:
    # One pass over the weight where it now is, without a copy; NaN is passed on as the least and as the most.
    return bool(torch.stack(weight.aminmax()).isfinite().all())


def _not_finite(name: str, weight: _Weight, stored: torch.Tensor, dtype: torch.dtype) -> NonFiniteError:
    hint = f"so it is in {weight.file}: the file is damaged, or the training failed"
    if _is_finite(stored):
        most = float(torch.stack(stored.aminmax()).abs().max())
        wide = [name for name in BYTES_PER_ELEMENT if torch.finfo(getattr(torch, name)).max > most]
        hint = (
            f"up to {most:.3g} in {weight.file}, it is beyond {str(dtype).removeprefix('torch.')}, which ends at "
            f"{torch.finfo(dtype).max:.3g}: dtype = {' or '.join(map(repr, wide))} holds it"
        )
    return NonFiniteError(f"the weight {name}", hint)


def _assign(model: nn.Module, path: str, weight: torch.Tensor) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(weight, requires_grad=False))
