"""Reading a Hugging Face checkpoint: every weight is checked from the headers of its files, then read one by one."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from tiered.core.errors import NonFiniteError
from tiered.kernels.coded_weight import CodedWeight
from tiered.kernels.weight_code import WeightCode
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.models.shards import Stored, read_headers, shards_in

# safetensors' names of the dtypes that weights may have.
WEIGHT_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """The weights of a model in safetensors files, one tensor at a time.

    Attributes:
        codes: official names of the weights that the files hold in codes already, with these codes.
    """

    def __init__(self, directory: Path, shape: ModelShape, config: Mapping[str, object]) -> None:
        """Read the headers of the files in `directory`, and check that they are what `shape` and `config` say.

        Raises:
            FileNotFoundError: no weights, or a shard that the index names is missing.
            ValueError: a file that cannot be read (truncated, not safetensors), an index that names files elsewhere, or
                weights that are missing, unexpected, of another shape, or of a dtype that is no floating-point
                weight's; names every one.
        """
        self._stored, _ = read_headers(shards_in(directory))
        _check(self._stored, shape.weight_shapes)
        self.codes: Mapping[str, WeightCode] = MappingProxyType({})

    def order(self) -> Iterator[str]:
        """The official names, file by file in the order of the file's bytes."""
        yield from self._stored

    def extent(self, name: str, dtype: torch.dtype) -> tuple[Path, int, int] | None:
        """The file, first byte and bytes of the weight `name` where the file holds it as `dtype`; else None."""
        stored = self._stored[name]
        return (stored.file, stored.start, stored.nbytes) if WEIGHT_DTYPES.get(stored.dtype) == dtype else None

    def read(
        self, name: str, *, dtype: torch.dtype, device: torch.device, code: WeightCode | None = None
    ) -> Tensor | CodedWeight:
        """The weight `name` in memory of its own on `device`, as `dtype`; in `code` where one is given, made there of
        what `dtype` holds. What the files hold in codes comes in these codes, whatever is asked for.

        Raises:
            NonFiniteError: it holds NaN or infinity, in the file or because `dtype` cannot hold what is there.
            ValueError: a `code` for what is no matrix.
        """
        stored = self._stored[name]
        if code is not None and len(stored.shape) != 2:
            raise ValueError(f"the weight {name} {list(stored.shape)} is no matrix, which {code} is for")
        values = stored.read(name)
        # A copy even where dtype and device are the same: the values are the mapped file.
        weight = torch.empty(stored.shape, dtype=dtype, device=device).copy_(values)
        if not _is_finite(weight):
            raise _not_finite(name, stored.file, values, dtype)
        return weight if code is None else CodedWeight.of(weight, code)


def assign(model: nn.Module, path: str, weight: Tensor | CodedWeight | None) -> None:
    """Put `weight` in the place of the parameter, or coded weight, at `path`; None: it is elsewhere."""
    module, _, name = path.rpartition(".")
    owner = model.get_submodule(module)
    if isinstance(weight, Tensor):
        setattr(owner, name, nn.Parameter(weight, requires_grad=False))
    else:
        owner._parameters.pop(name, None)  # under the name of a parameter a module takes nothing else
        setattr(owner, name, weight)


def _check(found: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> None:
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


def _is_finite(weight: Tensor) -> bool:
    # One pass over the weight where it now is, without a copy; NaN is passed on as the least and as the most.
    return bool(torch.stack(weight.aminmax()).isfinite().all())


def _not_finite(name: str, file: Path, stored: Tensor, dtype: torch.dtype) -> NonFiniteError:
    hint = f"so it is in {file}: the file is damaged, or the training failed"
    if _is_finite(stored):
        most = float(torch.stack(stored.aminmax()).abs().max())
        wide = [name for name in BYTES_PER_ELEMENT if torch.finfo(getattr(torch, name)).max > most]
        hint = (
            f"up to {most:.3g} in {file}, it is beyond {str(dtype).removeprefix('torch.')}, which ends at "
            f"{torch.finfo(dtype).max:.3g}: dtype = {' or '.join(map(repr, wide))} holds it"
        )
    return NonFiniteError(f"the weight {name}", hint)
